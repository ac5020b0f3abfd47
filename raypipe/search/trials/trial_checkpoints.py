"""Where a trial's checkpoints lie, and how a clone takes another trial's: weights move by name, and no byte is copied.

What Tune stores with a result is a pointer, a file of 100 bytes that names a checkpoint which the trial's own Saver published.
So Tune's copies cost nothing, a trial of several workers can hand over what it wrote itself, and population based training has
a checkpoint to exploit: without one it does nothing, in silence. Trials write into TRIALS/ID/KEY/epoch-…; the key names what a
trial trains with and whose weights it began from, so each exploit has a folder of its own and a restarted trial finds its own.

A clone's folder begins with hard links to the donor's checkpoint and the donor's best so far (copies, where the file system has
no links). They are made when the exploit is decided: the donor may drop its own at the next epoch.

Each folder also keeps SCHEDULE, the values by epoch that its weights are trained with: the donor's up to the exploit, then the
trial's own. It lies beside the weights and is written with them, so it is true whatever a killed search repeats or forgets.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raypipe.config import key_of
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState

log = logging.getLogger("raypipe")
POINTER = "pointer.json"
SCHEDULE = "schedule.json"
Schedule = tuple[
    dict[str, Any], ...
]  # {"epoch": from, field: value, …}; epochs are counted as finished ones, so the first is 0


def name_of(folder: str | Path) -> str:
    """The trial's name, of the folder that Tune gave it. Where a run of the trial that a kill made Tune forget has left its
    folder, Tune appends `_` and letters; the trial is the same, and goes on from what it had done."""
    return Path(folder).name.partition("_")[0]


def point(folder: Path, target: Path, epoch: int) -> None:
    """Make `folder` a checkpoint of Tune's that names one of ours. `epoch`: the last that Tune has heard of."""
    (folder / POINTER).write_text(json.dumps({"checkpoint": str(target), "epoch": epoch}))


def follow(folder: str | Path | None) -> Path | None:
    """The checkpoint that a checkpoint of Tune's names."""
    return Path(_read(folder)["checkpoint"]) if folder else None


def heard(folder: str | Path | None) -> int:
    """The last epoch that Tune had heard of then. The checkpoint may be further: what a trial did before it was killed and
    Tune forgot is told it epoch by epoch."""
    return int(_read(folder)["epoch"]) if folder else 0


def _read(folder: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / POINTER).read_text()))


def home(trials: Path, trial: str, values: dict[str, Any], pointed: Path | None) -> Path:
    """The checkpoints of the trial that goes on from `pointed` with `values`: its own, or a folder yet to be seeded."""
    mine = trials / trial
    if pointed is not None and pointed.parent.parent == mine:
        return pointed.parent
    return mine / key_of(values, str(pointed))


def settle(trials: Path, trial: str, values: dict[str, Any], pointed: Path | None) -> Path:
    """`home`, and in it, when it is new, what a clone of `pointed` begins with. Doing it again changes nothing."""
    folder = home(trials, trial, values, pointed)
    if not folder.exists():
        _drop_old(folder.parent)
        seeded = pointed is not None and _seed(folder, pointed, values)
        if not seeded:
            folder.mkdir(parents=True, exist_ok=True)
            _write_schedule(folder, ({"epoch": 0, **values},))
    return folder


def schedule_of(folder: Path) -> Schedule:
    """What the weights in a trial's folder are trained with; () where an older version made the folder."""
    file = folder / SCHEDULE
    return tuple(json.loads(file.read_text())) if file.exists() else ()


def _write_schedule(folder: Path, lines: Schedule) -> None:
    partial = folder / f"{SCHEDULE}.partial"
    partial.write_text(json.dumps(lines))
    partial.replace(folder / SCHEDULE)


def _continued(donor: Schedule, epoch: int, values: dict[str, Any]) -> Schedule:
    """The donor's values up to the exploit at `epoch`, and `values` from there on."""
    return (*(line for line in donor if line["epoch"] < epoch), {"epoch": epoch, **values})


def untold(state: LoopState, heard: int) -> Iterator[tuple[int, dict[str, float]]]:
    """(epoch, metrics) of the epochs after `heard`: what a trial saved and was killed before it told."""
    return ((epoch, state.history[epoch - 1]) for epoch in range(heard + 1, state.epoch + 1))


def state_of(verified: Path) -> LoopState:
    return checkpoint.read(verified, verified=True).state


def whole_epochs(folder: Path) -> dict[int, tuple[LoopState, Path]]:
    """The verified checkpoints at the end of an epoch, by epoch."""
    found = sorted(folder.glob("epoch-*")) if folder.exists() else []
    read = [(state_of(p), p) for p in found if checkpoint.verify(p) is None]
    return {state.epoch: (state, path) for state, path in read if state.step == 0}


def _seed(folder: Path, pointed: Path, values: dict[str, Any]) -> bool:
    """All or nothing, by a rename. False where the weights are gone."""
    if problem := checkpoint.verify(pointed):
        log.warning(
            "The weights to begin from are gone (%s: %s): the trial begins anew", pointed, problem
        )
        return False
    state = state_of(pointed)
    best = checkpoint.name(state.best_epoch + 1)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for source in {pointed, pointed.with_name(best)}:
        if source.exists():
            shutil.copytree(source, partial / source.name, copy_function=_link)
    if donor := schedule_of(
        pointed.parent
    ):  # none: an older version's, which mutations.jsonl tells
        _write_schedule(partial, _continued(donor, state.epoch, values))
    partial.rename(folder)
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _drop_old(mine: Path) -> None:
    """Delete what the trial wrote before its last exploit but one: Tune may restore the state before the last."""
    homes = sorted((p for p in mine.glob("*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
    for folder in homes[:-1]:
        shutil.rmtree(folder, ignore_errors=True)
