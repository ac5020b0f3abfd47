"""A trial of one worker: the search's job with some fields changed, trained in the trial's process.

The search puts the images into Ray's object store once, so a trial pays for its epochs and not for
decoding. Tune reuses a trial's process for the next trial: 16 trials of 1 s each took 11 s instead
of 33 s. Trials of several workers are in multi_worker_trial.py.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ray import tune

from raypipe.config import key_of, replace
from raypipe.errors import without_secrets
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.by_clock import ByClock
from raypipe.search.trials.epoch_result import result_of
from raypipe.train import checkpoint
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Engine
from raypipe.train.worker import Data, train_rank


def data_key(job: TrainJob) -> str:
    """Trials with equal keys train on the same arrays."""
    model = job.model
    # Heads of a first answer on another backbone do not have the job's mean, std and options.
    seen_as = model.options, model.mean, model.std
    return key_of(model.name, model.mode, model.pixels, *seen_as)


def folder_name(trial: Any) -> str:
    """The folder of a Tune trial: its number, and a hash of its values.

    A search that was killed before Tune recorded a trial draws the same trial again. Its folder has
    the same name, so the trial continues from its checkpoints. The number comes first because the
    leaderboard sorts equally good trials by name: the earlier one wins.
    """
    number, _, _ = str(trial.experiment_tag).partition("_")
    values = key_of(trial.config)[:6]
    return f"trial-{int(number):03}-{values}"


def job_of(job: dict[str, Any], changes: dict[str, Any]) -> TrainJob:
    """The job of a trial whose dotted fields `changes` differ from `job`.

    Checkpoints are written synchronously: an epoch is reported with a pointer to its checkpoint,
    which must exist by then.
    """
    base = TrainJob.model_validate(job)
    return replace(base, {**changes, "train.checkpoint_async": False})


@without_secrets
def run_trial(
    changes: dict[str, Any],
    job: dict[str, Any],
    data: dict[str, Data],
    trials: str,
    over: str | None = None,
    by_clock: ByClock | None = None,
) -> None:
    """Train one trial; Ray Tune calls this in the trial's process.

    data: the images by `data_key`. trials: the folder of all trials' checkpoints. over: a file;
    when it appears, the trial leaves its epoch, which is not saved. Tune alone would wait ten
    seconds for the epoch's end. by_clock: of trials that train by it.
    """
    import torch

    allow_slow_handover()
    torch.set_num_threads(1)  # trials run side by side, one CPU each
    name = trial_checkpoints.name_of(tune.get_context().get_trial_dir())
    trial_job = job_of(job, changes)
    if by_clock is not None:
        trial_job = by_clock.job_of(name, trial_job)
    rule = trial_job.train.stopping

    # Tune's checkpoint is a pointer to ours. After an exploit it names the donor's.
    given = tune.get_checkpoint()
    pointer = given.path if given else None
    reported = trial_checkpoints.reported_epoch(pointer)
    folder = trial_checkpoints.prepare_folder(
        Path(trials),
        name,
        changes,
        trial_checkpoints.pointed_checkpoint(pointer, Path(trials)),
    )

    def report(_: dict[str, float], state: LoopState, earlier: bool = False) -> None:
        """Report to Tune each epoch of `state` that it does not know yet."""
        nonlocal reported
        # Normally one epoch; after a kill there may be several.
        finished = state.finished(trial_job.train.epochs)
        target = folder / checkpoint.name(state.epoch)
        for epoch, metrics in trial_checkpoints.unreported(state, reported):
            ended = finished and epoch == state.epoch
            result = result_of(metrics, epoch, ended, rule.metric, rule.mode, earlier=earlier)
            with tempfile.TemporaryDirectory() as scratch:
                trial_checkpoints.write_pointer(Path(scratch), target, epoch)
                reported = epoch
                tune.report(result, checkpoint=tune.Checkpoint.from_directory(scratch))

    must_leave = Path(over).exists if over is not None else None

    def save(state: LoopState, engine: Engine) -> None:
        if state.step and must_leave is not None and must_leave():
            return  # nobody goes on from here: the search is over
        saver(state, engine)

    with Saver(folder, trial_job.train, recent=1) as saver:
        resume = newest(folder)
        if resume is not None:
            # Epochs that were trained before a kill and not reported.
            report({}, trial_checkpoints.state_of(resume), earlier=True)
        train_rank(trial_job, data[data_key(trial_job)], resume, save, report, must_leave)


def allow_slow_handover() -> None:
    """Give a trial 60 s to leave its process to the next trial, when Tune pauses or stops it.

    Tune's default is 2 s; later it fails the next trial. On a busy machine that happened.
    """
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")
