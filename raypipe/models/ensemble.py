"""Several models as one: uint8 pixels -> the weighted mean of what its members say.

An ensemble predicts as its members do, each at its own resolution and over its own views. Its score
of a class or a tag is the weighted mean of theirs (Caruana et al. 2004, "Ensemble Selection from
Libraries of Models"); a number is the weighted mean of their numbers. Its features, for drift
checks, are its first member's.

- The pixels come at the side of its largest member. A smaller member shrinks them inside: `shrunk`
  says how, and how far that is from decoding once more.
- Members with the same frozen backbone at the same side share it: one forward pass, several heads.
- Every member knows the same classes in the same order, and has the same task.

Shapes: pixels_BHWC uint8 0-255, features_BD, scores_BC and logits_BC float32; L pixels a side come
in, and S pixels a side are what a member was trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError, DataError
from raypipe.models.calibrate import tempered
from raypipe.models.predictor import Predictor
from raypipe.models.tasks import Kind
from raypipe.models.zoo import ImageModel, ModelConfig, views

_BARE = {"pretrained": False, "mode": "finetune", "frozen_blocks": 0}
# Settings that change no frozen feature. One that is not named here keeps two backbones apart.
_NOT_THE_BACKBONE = {
    *_BARE,
    *("task", "dropout", "norm_momentum", "views", "calibrate", "head", "landmarks"),
}
FEWEST = 1e-30  # a mean probability is at least this, so that its logarithm is finite


@dataclass(frozen=True)
class Member:
    """One model of an ensemble, without its weights."""

    model: ModelConfig

    weight: float = 1.0
    """Its share, in relation to the others'."""

    temperature: float = 1.0
    """Its own, if it was calibrated before it joined."""

    name: str = ""
    """Where it comes from, as a trial of a search."""

    def to_json(self) -> dict[str, Any]:
        """Plain values. The config is resolved: nothing is left to look up."""
        return {
            "model": self.model.resolved().model_dump(mode="json"),
            "weight": self.weight,
            "temperature": self.temperature,
            "name": self.name,
        }

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> Member:
        """What `to_json` wrote."""
        fields = {name: value for name, value in read.items() if name != "model"}
        # A reader need not have the pretrained weights, which a validated config would ask for.
        bare = ModelConfig.model_validate(read["model"] | _BARE)
        as_made = {name: read["model"][name] for name in _BARE}
        return cls(bare.model_copy(update=as_made), **fields)

    @property
    def shared(self) -> str:
        """Members with equal keys share a backbone; "": it is this member's own."""
        if self.model.mode != "frozen":
            return ""
        kept = self.model.resolved().model_dump(mode="json", exclude=_NOT_THE_BACKBONE)
        return json.dumps(kept, sort_keys=True)


class EnsembleModel(Predictor):
    """The weighted mean of several ImageModels.

    `bodies` are the models with a backbone of their own. `heads` are one a member. Raises DataError
    for no members, and for weights that are no shares.
    """

    def __init__(self, members: Sequence[Member], classes: int) -> None:
        super().__init__()
        self.members = _merged(members)
        tasks = {member.model.task for member in self.members}
        if len(tasks) > 1:
            raise DataError("Members of an ensemble have one task", got=sorted(tasks))
        self.task = self.members[0].model.task
        self.temperature = 1.0
        self.side_px = max(member.model.pixels for member in self.members)
        total = sum(member.weight for member in self.members)
        self.shares = tuple(member.weight / total for member in self.members)

        self.bodies, self.heads = nn.ModuleList(), nn.ModuleList()
        self.body_of = bodies_of(self.members)
        sides: list[int] = []
        for member, number in zip(self.members, self.body_of, strict=True):
            built = ImageModel(member.model.model_copy(update=_BARE), classes)
            if number == len(self.bodies):
                self.bodies.append(built)
                sides.append(built.side_px)
            self.heads.append(built.head)
        # A body's head stands among the heads: else it would be among the weights twice.
        for body in self.bodies:
            body.head = nn.Identity()
        # No buffers, as the normalisation of an ImageModel.
        self._shrink = [_shrinking(self.side_px, side_px) for side_px in sides]
        first = self.bodies[0]
        assert isinstance(first, ImageModel)
        self.widths = (first.widths[0], classes)

    def load_members(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Load each member's weights, of a whole ImageModel, in the order of `members`.

        Raises ConfigError for weights of another model.
        """
        if len(weights) != len(self.members):
            raise DataError(
                "An ensemble needs the weights of each member",
                got=f"{len(weights)} of {len(self.members)}",
            )
        for place, (member, of_member) in enumerate(zip(self.members, weights, strict=True)):
            head, rest = split(of_member)
            try:
                self.heads[place].load_state_dict(head)
                self.bodies[self.body_of[place]].load_state_dict(rest)
            except RuntimeError as e:
                raise ConfigError(
                    "The weights of a member are another model's",
                    got=member.name or member.model.name,
                    rule=str(e).splitlines()[-1].strip()[:200],
                ) from None

    def answers(self, pixels_BHWC: Tensor) -> tuple[Tensor, Tensor]:
        """(features_BD, scores_BC): features are the first member's, of the image as it is."""
        features, said = self._said(pixels_BHWC)
        mean_BC = sum(share * scores for share, scores in zip(self.shares, said, strict=True))
        assert isinstance(mean_BC, Tensor)
        return features, tempered(self.task, mean_BC, self.temperature)

    def _said(self, pixels_BHWC: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The first member's features_BD, and scores_BC of each member."""
        features: Tensor | None = None
        said: dict[int, Tensor] = {}
        for number, body in enumerate(self.bodies):
            assert isinstance(body, ImageModel)
            seen_BHWC = pixels_BHWC
            if (matrix_SL := self._shrink[number]) is not None:
                # They follow the pixels: `to` does not move what is no buffer.
                matrix_SL = self._shrink[number] = matrix_SL.to(pixels_BHWC.device)
                seen_BHWC = shrunk(pixels_BHWC, matrix_SL)
            mine = [place for place, of in enumerate(self.body_of) if of == number]
            of_views = [body.embed(view) for view in views(seen_BHWC, body._views)]
            if number == 0:
                features = of_views[0]
            for place in mine:
                scores = [self.scores(self.heads[place](one)).float() for one in of_views]
                mean_BC = torch.stack(scores).mean(0)
                said[place] = tempered(self.task, mean_BC, self.members[place].temperature)
        assert features is not None
        return features, [said[place] for place in range(len(self.members))]

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """features_BD of the first member."""
        return self._said(pixels_BHWC)[0]

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """logits_BC: `scores` of them are the mean scores."""
        return logits_of(self.task, self.answers(pixels_BHWC)[1])

    def for_inference(self) -> EnsembleModel:
        """A copy that only predicts: batch norms are folded into convolutions."""
        copy = deepcopy(self).eval()
        for number, body in enumerate(copy.bodies):
            assert isinstance(body, ImageModel)
            copy.bodies[number] = body.for_inference()
        return copy

    @property
    def spread(self) -> float:
        """Of a regression: the standard deviation of its training labels."""
        spread = self.heads[0].spread
        assert isinstance(spread, Tensor)
        return float(spread)


def bodies_of(members: Sequence[Member]) -> list[int]:
    """Which body each member uses: its own, or that of the first one with the same backbone."""
    known: dict[str, int] = {}
    own = (member.shared or f"#{place}" for place, member in enumerate(members))
    return [known.setdefault(key, len(known)) for key in own]


def logits_of(task: Kind, scores_BC: Tensor) -> Tensor:
    """Logits whose scores are these: the inverse of `tasks.scores`."""
    if task == "regression":
        return scores_BC
    p_BC = scores_BC.clamp_min(FEWEST)
    if task == "single_label":
        return p_BC.log()
    return p_BC.log() - (1 - scores_BC).clamp_min(FEWEST).log()


def split(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the head's, the others') of an ImageModel's weights."""
    head = {n.removeprefix("head."): w for n, w in weights.items() if n.startswith("head.")}
    rest = {n: w for n, w in weights.items() if not n.startswith("head.")}
    return head, rest


def first_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first member's weights, as an ImageModel has them, out of an ensemble's."""
    found = {}
    for name, weight in weights.items():
        if name.startswith("heads.0."):
            found["head." + name.removeprefix("heads.0.")] = weight
        elif name.startswith("bodies.0."):
            found[name.removeprefix("bodies.0.")] = weight
    return found


def _merged(members: Sequence[Member]) -> tuple[Member, ...]:
    """Members by their order, those of one name once, with the sum of their weights.

    Raises DataError where there is none, and for weights that are no shares.
    """
    bad = [m.weight for m in members if not (math.isfinite(m.weight) and m.weight > 0)]
    if bad or not members:
        raise DataError(
            "An ensemble needs members with weights",
            got=bad or "no member",
            rule="A weight is a finite number above 0",
        )
    merged: dict[str, Member] = {}
    for place, member in enumerate(members):
        # A member without a name is nobody else.
        key = member.name or f"#{place}"
        earlier = merged.get(key)
        weight = member.weight + (earlier.weight if earlier else 0.0)
        merged[key] = replace(earlier or member, weight=weight)
    return tuple(merged.values())


def shrunk(pixels_BHWC: Tensor, matrix_SL: Tensor) -> Tensor:
    """The pixels at a smaller side: bilinear and antialiased, as decoding squeezes them.

    Two products of matrices, with whole levels after each, as Pillow has them: so every format of
    an export gives the same. A member's own pipeline shrinks the image itself, and this shrinks
    what was shrunk before, which is a little softer. Frozen efficientnet_lite0 with a logistic
    regression on solar cells of 300 px, 150 of them judged: for 224 -> 128 px a probability moves
    by .010 in the mean (most: .09) and 1.3 % of the labels change, for 128 -> 96 px by .020 (.22)
    and 4 %, for 224 -> 96 px by .010 (.13) and 1.3 %; accuracy went from 86.7, 84.0 and 84.0 % to
    86.7, 85.3 and 85.3. A kernel that undoes the first shrinking (least squares) was not reliably
    nearer (128 -> 96: .014, but .28 at most), and has negative weights. So what an ensemble is
    chosen and published by are its own predictions, and not its members'.
    """
    side_px, side = matrix_SL.shape
    across = pixels_BHWC.to(torch.float32).transpose(1, 2)  # B, across, down, C
    across = _whole(matrix_SL @ across.flatten(2)).view(-1, side_px, side, 3)
    down = across.transpose(1, 2)  # B, down, across, C
    return _whole(matrix_SL @ down.flatten(2)).view(-1, side_px, side_px, 3)


def _whole(levels: Tensor) -> Tensor:
    return (levels.clamp(0, 255) + 0.5).floor()


def _shrinking(side: int, side_px: int) -> Tensor | None:
    """matrix_SL for `shrunk`: what each new pixel takes of the old ones in one direction; None
    where nothing is shrunk."""
    if side == side_px:
        return None
    scale = side / side_px
    centre_S1 = (np.arange(side_px)[:, None] + 0.5) * scale
    distance_SL = np.abs(np.arange(side)[None] + 0.5 - centre_S1) / scale
    weight_SL = np.clip(1 - distance_SL, 0, None)
    return torch.from_numpy(weight_SL / weight_SL.sum(1, keepdims=True)).float()
