"""Which heads a search fits before its first trial, and on which features (first_answer.py).

A reading is one pass of a frozen backbone over the images: it costs nearly all of the time, and all
heads of its backbone and resolution share it, because the last layer's features are part of those
of all stages. Readings are taken from the cheapest on, as many as fit.

Pure: it knows no image, no clock and no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.models.backbones import BACKBONES, is_installed
from raypipe.models.providers import has_weights
from raypipe.models.zoo import ModelConfig
from raypipe.train.settings import SolverName, TrainConfig

SMALL_PX, SMALLEST_PX = 128, 32
"""The smaller one of two resolutions, and the least. The other one is the backbone's own. Where
images are smaller, theirs is taken: of digits of 32 px, 99.6 % were right at 32 px, and 98.5 % at
128 or 224 px."""

HEADS_SHARE = 0.25
"""Of the seconds, what fitting heads may take; readings have the rest."""

WORK = {"efficientnet_lite0": 1.0, "efficientnet_lite1": 1.6, "efficientnet_lite2": 2.2}
"""Of an image at the backbone's own side, compared with efficientnet_lite0: their FLOPs."""

STAGES = "_stages"


def is_known(name: str) -> bool:
    """Is the work of this backbone known?"""
    return name.removesuffix(STAGES) in WORK


@dataclass(frozen=True)
class Reading:
    """One pass over the images. work: an image's, of efficientnet_lite0 at 224 px."""

    backbone: str
    side_px: int
    work: float

    @property
    def name(self) -> str:
        return f"{self.backbone}, {self.side_px} px"

    @property
    def staged(self) -> bool:
        """Does it have features of all stages?"""
        return self.backbone.endswith(STAGES)


def readings(model: ModelConfig, images_px: int | None = None) -> list[Reading]:
    """What may be read for a job of this model, from the least work on.

    images_px: the side of a usual image, as it is stored; None: not known.

    A backbone of a provider, which somebody has named, is read alone; otherwise those that are
    installed. A side that somebody has set is the only one.
    """
    own = model.name not in BACKBONES
    if own and not (has_weights(model.name) and model.pretrained):
        return []
    names = [model.name] if own else [f"{name}{STAGES}" for name in WORK if is_installed(name)]
    found = []
    for name in names:
        own_px = BACKBONES[name].side_px if name in BACKBONES else model.pixels
        small_px = min(SMALL_PX, max(SMALLEST_PX, images_px or SMALL_PX))
        sides = [model.side_px] if model.side_px else [small_px, own_px]
        for side_px in dict.fromkeys(sides):
            found.append(Reading(name, side_px, _work(name, side_px, own_px)))
    return sorted(found, key=lambda one: (one.work, one.name))


def work(model: ModelConfig) -> float:
    """Of one view of an image, as Reading.work."""
    own = BACKBONES.get(model.name)
    return _work(model.name, model.pixels, own.side_px if own else model.pixels)


def _work(name: str, side_px: int, own_px: int) -> float:
    return WORK.get(name.removesuffix(STAGES), 1.0) * (side_px / own_px) ** 2


def fitting(
    among: Sequence[Reading], images: int, works_per_s: float, seconds: float | None
) -> list[Reading]:
    """The readings that fit, from the least work on. works_per_s: images of work 1 a second.

    Without a limit all of them do.
    """
    if seconds is None:
        return list(among)
    left_s = seconds * (1 - HEADS_SHARE)
    found = []
    for reading in among:
        takes_s = images * reading.work / works_per_s
        if takes_s > left_s:
            break
        left_s -= takes_s
        found.append(reading)
    return found


def heads(reading: Reading, model: ModelConfig, train: TrainConfig) -> Iterator[dict[str, Any]]:
    """The changes of a job that make it each of the heads of a reading, the most promising first.

    Of a linear map of the last layer alone there is none: on three tasks it was worse than one of
    all stages, and L-BFGS took five times as long as ridge regression, which was as good.
    """
    contenders = [(reading.backbone, "kernel"), (reading.backbone, "linear")]
    if reading.staged:
        contenders.append((reading.backbone.removesuffix(STAGES), "kernel"))
    for name, kind in contenders:
        yield _changes(name, reading.side_px, kind, _solver(model, train), model, train)


def _solver(model: ModelConfig, train: TrainConfig) -> SolverName:
    """Ridge regression, unless the job sets what it cannot honour."""
    weighs_tags = model.task == "multi_label" and train.class_weights is not None
    return "lbfgs" if train.focal_gamma or weighs_tags else "closed"


def _changes(
    name: str,
    side_px: int,
    head: str,
    solver: SolverName,
    model: ModelConfig,
    train: TrainConfig,
) -> dict[str, Any]:
    """Dotted fields. Those that frozen features would refuse are set back, where they are set."""
    changes: dict[str, Any] = {
        "model.name": name,
        "model.mode": "frozen",
        "model.side_px": side_px,
        "model.head": head,
        "train.solver": solver,
    }
    neutral: Mapping[str, Any] = {
        "model.pretrained": True,
        "model.frozen_blocks": 0,
        "model.views": 1,
        "train.start_from": None,
    }
    if name != model.name:
        # They belong to the backbone that was named.
        neutral = {**neutral, "model.options": {}, "model.mean": None, "model.std": None}
    sections = {"model": model, "train": train}
    for field, value in neutral.items():
        section, _, of_section = field.partition(".")
        if getattr(sections[section], of_section) != value:
            changes[field] = value
    # Trials draw what nobody found for the job. A head takes no steps of any size.
    for field in ("lr", "batch_size"):
        if getattr(train, field) == "auto":
            changes[f"train.{field}"] = TrainConfig.model_fields[field].default
    return changes
