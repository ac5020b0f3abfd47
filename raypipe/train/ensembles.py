"""The checkpoint of an ensemble: its members' weights in one folder, and what they are.

It is a checkpoint like any other, so a result can name it, and it needs none of its members'
folders any more. Beside it, ensemble.json says which models its weights are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from raypipe.config import to_json
from raypipe.errors import DataError
from raypipe.files import write_atomic
from raypipe.models import finite
from raypipe.models.ensemble import EnsembleModel, Member
from raypipe.models.zoo import ImageModel
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot

FILE = "ensemble.json"


@dataclass(frozen=True)
class Part:
    """A member with its weights, and the classes that its outputs are of."""

    member: Member
    weights: Mapping[str, Tensor]
    """Of a whole ImageModel; where the backbone is frozen, its head's are enough."""
    classes: tuple[str, ...]


def build(parts: Sequence[Part]) -> EnsembleModel:
    """The ensemble of these parts, the first one first. Parts of one name are one, with the sum of
    their weights.

    Raises DataError for parts that know other classes, or in another order, and for weights that
    are not finite; ConfigError for weights of another model.
    """
    for part in parts:
        if part.classes != parts[0].classes:
            raise DataError(
                "Members of an ensemble know the same classes in the same order",
                got=f"{part.member.name}: {', '.join(part.classes)}",
                rule=f"{parts[0].member.name}: {', '.join(parts[0].classes)}",
                fix="Train them on the same version of the table",
            )
        where = part.member.name or part.member.model.name
        finite.require_weights(part.weights, where, "Leave this member out of the ensemble")
    ensemble = EnsembleModel([part.member for part in parts], len(parts[0].classes) if parts else 0)
    by_name = {part.member.name or f"#{place}": part for place, part in enumerate(parts)}
    whole = [_whole(part, len(part.classes)) for part in by_name.values()]
    ensemble.load_members(whole)
    return ensemble.eval()


def _whole(part: Part, classes: int) -> Mapping[str, Tensor]:
    """The weights of a whole model: those of a head on a frozen backbone, with that backbone."""
    model = part.member.model
    if model.mode != "frozen" or any(name.startswith("head.") for name in part.weights):
        return part.weights
    whole = ImageModel(model, classes)
    whole.head.load_state_dict(dict(part.weights))
    return whole.state_dict()


def write(folder: Path, ensemble: EnsembleModel, state: LoopState) -> Path:
    """Write the ensemble as a checkpoint; `state` is its first member's, or an empty one.

    Returns the folder. The members' own folders may be deleted afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = [member.to_json() for member in ensemble.members]
    # Before the manifest: a folder that counts as complete has it.
    write_atomic(folder / FILE, to_json({"members": members}))
    pieces = {name: Piece.whole(tensor) for name, tensor in ensemble.state_dict().items()}
    return checkpoint.write(folder, Snapshot(pieces), state)


def read(folder: Path) -> tuple[Member, ...]:
    """The members of an ensemble's checkpoint, without their weights; () for any other one."""
    file = folder / FILE
    if not file.exists():
        return ()
    return tuple(Member.from_json(one) for one in json.loads(file.read_text())["members"])
