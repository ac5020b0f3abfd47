"""One trial: the search's job with some fields changed, trained in the trial's own process.

Data come from the object store, where the search put them once, so a trial costs its epochs and not a decode. Actors are
reused between trials: 16 trials of 1 s took 11 s instead of 33 s. Trials of several workers are group.py's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ray import tune

from raypipe.config import key_of, replace
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import told
from raypipe.train import checkpoint
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.worker import Data, train_rank


def data_key(job: TrainJob) -> str:
    """Trials with equal keys train on the same arrays."""
    return key_of(job.model.name, job.model.mode, job.model.pixels)


def folder_name(trial: Any) -> str:
    """Of one of Tune's trials: its number and what it tries. A search that was killed before Tune noted a trial draws the same
    one anew, and it finds what it had done. Of equally good trials the first wins: numbers sort."""
    number = int(str(trial.experiment_tag).partition("_")[0])
    return f"trial-{number:03}-{key_of(trial.config)[:6]}"


def job_of(job: dict[str, Any], changes: dict[str, Any]) -> TrainJob:
    """The trial's job: `changes` are dotted fields. Its checkpoints are there when it says so, so none is written behind."""
    return replace(TrainJob.model_validate(job), {**changes, "train.checkpoint_async": False})


def run_trial(
    changes: dict[str, Any], job: dict[str, Any], data: dict[str, Data], trials: str
) -> None:
    """The function Ray Tune calls. `trials` is the folder of all trials' checkpoints."""
    import torch

    patient()
    torch.set_num_threads(1)  # trials run side by side, one CPU each
    mine, given = job_of(job, changes), tune.get_checkpoint()
    known = given.path if given else None
    folder = trial_checkpoints.settle(
        Path(trials),
        trial_checkpoints.name_of(tune.get_context().get_trial_dir()),
        changes,
        trial_checkpoints.follow(known),
    )
    heard, rule = trial_checkpoints.heard(known), mine.train.stopping

    def report(metrics: dict[str, float], state: LoopState) -> None:
        nonlocal heard
        for epoch, line in trial_checkpoints.untold(state, heard):
            with tempfile.TemporaryDirectory() as scratch:
                trial_checkpoints.point(Path(scratch), folder / checkpoint.name(state.epoch), epoch)
                ended = epoch == state.epoch and state.finished(mine.train.epochs)
                heard = epoch
                said = told(line, epoch, ended, rule.metric, rule.mode)
                tune.report(said, checkpoint=tune.Checkpoint.from_directory(scratch))

    with Saver(folder, mine.train, recent=1) as saver:
        resume = newest(folder)
        if resume is not None:
            report({}, trial_checkpoints.state_of(resume))
        train_rank(mine, data[data_key(mine)], resume, saver, report)


def patient() -> None:
    """Tune gives a trial that it pauses or stops 2 s to leave its actor to the next one, and else fails the next one. On a busy
    machine it did."""
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")
