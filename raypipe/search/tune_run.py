"""What Ray Tune is given for a search, and the trials that its results say.

Tune keeps its own state in `search/KEY/tune/`, from which a killed search goes on (saved_state.py).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from ray import tune

from raypipe.errors import RaypipeError, one_line
from raypipe.failures import find_own
from raypipe.search import leaderboard, trial_files
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger
from raypipe.search.schedulers import mutations
from raypipe.search.schedulers.tune_schedulers import memory
from raypipe.search.trials import saved_state, trial_checkpoints
from raypipe.search.trials.by_clock import ByClock
from raypipe.search.trials.monitor import Held, Monitor, Stop
from raypipe.search.trials.multi_worker_trial import GroupTrial
from raypipe.search.trials.trial import run_trial
from raypipe.search.trials.trial_resources import TrialResources
from raypipe.train import trainer
from raypipe.train.job import TrainJob
from raypipe.train.stopping import is_budget
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")
OVER = "over"  # a file: trials end within their epochs, because search.budget_s is over


def trainable(
    job: TrainJob,
    data: dict[str, Data],
    folder: Path,
    resources: TrialResources,
    within_budget: bool,
    by_clock: ByClock | None = None,
) -> Any:
    """What Tune runs for each trial: a function, or a class for trials of several workers.

    by_clock: of trials that train by it; they have one worker each.
    """
    # Passed through the object store once, and not with every trial.
    given = {
        "job": job.model_dump(mode="json"),
        "data": data,
        "trials": str(folder / "trials"),
    }
    if resources.worker is None:
        over = str(folder / OVER) if within_budget else None
        trainable = tune.with_parameters(run_trial, **given, over=over, by_clock=by_clock)
    else:
        trainable = tune.with_parameters(GroupTrial, **given, worker=resources.worker)
    return tune.with_resources(trainable, resources.trial)


def run_config(
    scheduler: Any, folder: Path, resources: TrialResources, monitor: Monitor
) -> tune.RunConfig:
    """Where Tune writes, what it calls back, and when it stops."""
    # Checkpoints are pointers of 100 bytes, so Tune keeps them all. A function saves one with each
    # report by itself; a class has to be told.
    checkpoints = tune.CheckpointConfig(checkpoint_frequency=1 if resources.worker else 0)
    return tune.RunConfig(
        name="tune",
        storage_path=str(folder),
        callbacks=[monitor, *memory(scheduler)],
        stop=Stop(monitor),
        checkpoint_config=checkpoints,
        failure_config=tune.FailureConfig(max_failures=1),
        verbose=0,
    )


def restored(folder: Path, trainable: Any, scheduler: str) -> Any | None:
    """The tuner of the interrupted search in `folder`; None if there is none, or nothing of it.

    A search that was killed while Tune wrote its state cannot be restored. Its folder is renamed,
    and the trials run again. So do those of HyperBand: it would count trials that have ended, and
    wait for them. Trials that are drawn again go on from their own checkpoints.
    """
    if not tune.Tuner.can_restore(str(folder)):
        return None
    if scheduler == "hyperband":
        aside = _put_aside(folder, "before")
        log.info("search.scheduler=hyperband begins anew; what Tune had saved is in %s", aside)
        return None
    try:
        if not saved_state.unpack(folder):
            return None
        tuner = tune.Tuner.restore(
            str(folder), trainable, resume_unfinished=True, resume_errored=True
        )
    # Tune reads pickles and JSON here: a torn file raises nearly any error.
    except Exception as e:
        log.warning(
            "The interrupted search cannot be restored (%s); it is kept in %s",
            type(e).__name__,
            _put_aside(folder, "torn"),
        )
        return None
    log.info("Continuing the interrupted search in %s", folder)
    return tuner


def _put_aside(folder: Path, why: str) -> Path:
    return folder.rename(folder.with_name(f"{folder.name}-{why}-{time.time_ns()}"))


def ranked(
    results: Any,
    job: TrainJob,
    monitor: Monitor,
    folder: Path,
    first: Sequence[Trial],
    ledger: Ledger,
) -> list[Trial]:
    """The trials from best to worst, from Tune's results and the first answer."""
    started = list(_started(results, folder / "trials"))
    if not started:
        # After a kill, or without an answer, the same command begins its trials. With this state it
        # would begin none: Tune counts a search that was stopped as finished.
        shutil.rmtree(folder / "tune", ignore_errors=True)
    trials = [_trial_of(result, job, monitor, folder) for result in started]
    trials += first
    if monitor.stopped and not trials and ledger.budget_s is not None:
        ledger.lap("trials")
        raise ledger.too_short()
    if monitor.stopped and not trials:
        raise RaypipeError(
            "The search stopped before its first result",
            got=monitor.stopped,
            fix="Raise the limit in search.stopping",
        )
    # The search needs one model at least.
    if all(trial.checkpoint is None for trial in trials):
        if leaderboard.lacks_metric(trials, job.train.stopping.metric):
            raise trainer.never_a_number(job)
        raise nothing_usable(len(trials), folder, [find_own(one.error) for one in started])
    rule = job.train.stopping
    return leaderboard.ranked(trials, rule.metric, rule.mode, job.train.result)


def _started(results: Any, trials: Path) -> Iterator[Any]:
    """The results of trials that trained or failed. trials: the folder of their checkpoints."""
    for i in range(len(results)):
        try:
            result = results[i]
        except ValueError:
            # Tune has no folder of a trial that had not started when the search stopped.
            continue
        if result.checkpoint is not None or result.error is not None:
            yield result
        elif _has_own_checkpoint(result, trials):
            # Tune stores its pointer after the report; a search may be stopped in between.
            yield result


def _has_own_checkpoint(result: Any, trials: Path) -> bool:
    """Has a trial finished an epoch, whatever Tune knows of it?"""
    name = trial_checkpoints.name_of(result.path)
    folder = trial_checkpoints.folder_of(trials, name, dict(result.config or {}), None)
    return bool(trial_checkpoints.epoch_checkpoints(folder))


def _trial_of(result: Any, job: TrainJob, monitor: Monitor, folder: Path) -> Trial:
    """The leaderboard's trial of one of Tune's results."""
    rule = job.train.stopping
    trial = trial_files.trial_of(result, rule.metric, rule.mode, job.train, folder / "trials")
    failures = monitor.failures.get(trial.name, 0)
    # A search that an older version began has no record of it.
    held = monitor.held.get(trial.name, Held(trial.seconds))
    # Older versions kept no schedule beside the weights.
    schedule = trial.schedule or mutations.schedules(folder).get(trial.name, ())
    return with_(
        trial,
        failures=failures,
        schedule=schedule,
        seconds=held.seconds,
        device_s=held.device_s,
        cut=_is_cut(trial, monitor),
    )


def _is_cut(trial: Trial, monitor: Monitor) -> bool:
    """Did a budget end this trial, its own or the search's?"""
    # The scheduler had paused it, or it was running.
    is_open = trial.stopped_early and trial.name not in monitor.ended_before
    return is_budget(trial.stopped) or (is_open and is_budget(monitor.stopped))


def nothing_usable(
    trials: int, folder: Path, errors: Sequence[RaypipeError | None] = ()
) -> RaypipeError:
    """errors: of each trial, where it is one of ours; None where it is not, or there is none."""
    said = [error for error in errors if error is not None]
    # As with images of which none can be read: no other rate would help.
    if said and len(said) == len(errors) and len({one.what for one in said}) == 1:
        return said[0]
    why = ""
    if said:
        alike, times = Counter(one.what for one in said).most_common(1)[0]
        why = f"{times} of them: {one_line(next(one for one in said if one.what == alike))}"
    return RaypipeError(
        f"Every one of {trials} trials failed or diverged",
        got=str(folder),
        rule=why,
        fix="The trials' error.txt files there say why; without one, lower train.lr",
    )


@contextmanager
def failures_in_a_line() -> Iterator[None]:
    """What fails with a message of ours is logged by Tune with this message, not with a traceback.

    error.txt in the trial's folder has the traceback.
    """
    logger = logging.getLogger("ray.tune.execution.tune_controller")
    logger.addFilter(_in_a_line)
    try:
        yield
    finally:
        logger.removeFilter(_in_a_line)


def _in_a_line(record: logging.LogRecord) -> bool:
    own = find_own(record.exc_info[1]) if record.exc_info else None
    if own is not None:
        record.msg, record.args = f"{record.getMessage()}: {one_line(own)}", ()
        record.exc_info = record.exc_text = None
    return True
