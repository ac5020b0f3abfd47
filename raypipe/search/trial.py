"""One trial: the search's job with some fields changed, trained in the trial's own process.

Data come from the object store, where the search put them once, so a trial costs its epochs and not a decode. Actors are
reused between trials: 16 trials of 1 s took 11 s instead of 33 s.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune

from raypipe.config import key_of, replace
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Engine
from raypipe.train.rank import Data, train_rank


def data_key(job: TrainJob) -> str:
    """Trials with equal keys train on the same arrays."""
    return key_of(job.model.name, job.model.mode, job.model.pixels)


def folder_name(trial: Any) -> str:
    """Of one of Tune's trials: its number and what it tries. A search that was killed before Tune noted a trial draws the same
    one anew, and it finds what it had done. Of equally good trials the first wins: numbers sort."""
    number = int(str(trial.experiment_tag).partition("_")[0])
    return f"trial-{number:03}-{key_of(trial.config)[:6]}"


def run_trial(changes: dict[str, Any], job: dict[str, Any], data: dict[str, Data]) -> None:
    """The function Ray Tune calls: `changes` are dotted fields drawn from the space."""
    import torch

    torch.set_num_threads(1)  # trials run side by side, one CPU each
    patient()
    mine = replace(TrainJob.model_validate(job), changes)

    def save(state: LoopState, engine: Engine) -> None:
        if state.step:  # Tune counts reports: only whole epochs are
            return
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint.write(Path(scratch), engine.snapshot(), state)
            _report(state.history, Path(scratch))

    train_rank(mine, data[data_key(mine)], _resume(), save, lambda metrics, state: None)


def patient() -> None:
    """Tune gives a trial that it pauses or stops 2 s to leave its actor to the next one, and else fails the next one. On a busy
    machine it did."""
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")


def _resume() -> Path | None:
    """The checkpoint to go on from. What Tune knew when the search was killed may be seconds older than the trial's files: of a
    newer one, which may be the last, it is told first."""
    known, folder = tune.get_checkpoint(), Path(str(tune.get_context().get_trial_dir()))
    at = Path(known.path) if known else None
    if at is not None and at.parent != folder:
        return at  # another trial's, which PBT gave to this one
    written = checkpoints(folder)
    newest = max(written, default=0)
    if not newest or (at is not None and newest <= _state(at)["epoch"]):
        return at
    _report(_state(written[newest])["history"], written[newest])
    return written[newest]


def checkpoints(folder: Path) -> dict[int, Path]:
    """Epochs trained -> checkpoint, of the whole ones in a trial's folder."""
    whole = [path for path in sorted(folder.glob("checkpoint_*")) if checkpoint.verify(path) is None]
    return {_state(path)["epoch"]: path for path in whole}


def _state(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "state.json").read_text()))


def _report(history: Sequence[dict[str, float]], path: Path) -> None:
    tune.report(history[-1] | {"epoch": len(history)}, checkpoint=tune.Checkpoint.from_directory(str(path)))
