"""One training run: plan(job) -> Plan, run(plan) -> TrainResult. Search and retraining use it too.

The plan is made once and handed on, to `publish` and `test` as well: whoever pins again reads the
table's log and footers again, and may find another version.

With one worker the loop runs in this process. With more, Ray Train or Spark (`train.launcher`)
starts them, and each runs the same `train_rank`. The run's folder is named by everything that
determines the result. So the same command resumes an interrupted run, and returns the result of a
finished one.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from raypipe.cluster.recorder import recorded
from raypipe.cluster.usage import FILE as USAGE
from raypipe.config import metrics_of, replace, require_format, save, to_json
from raypipe.errors import RaypipeError
from raypipe.failures import on_sigterm
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import Pinned, pin
from raypipe.feed.features import feature_sources
from raypipe.feed.feed import Source
from raypipe.files import owned, write_atomic
from raypipe.models.ensemble import EnsembleModel
from raypipe.models.finite import require_weights
from raypipe.models.predictor import Predictor
from raypipe.models.zoo import ImageModel
from raypipe.registry.packing import require_packable
from raypipe.train import checkpoint, ensembles, start
from raypipe.train.auto import finders
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.launch import join, on_workers, require_shared_folder
from raypipe.train.loop import LoopState, Report
from raypipe.train.losses import check_weights
from raypipe.train.measure import tensorboard
from raypipe.train.measure.meter import ReportPosition
from raypipe.train.objective import METRICS
from raypipe.train.spark_launch import on_executors
from raypipe.train.stopping import best_of, unusable
from raypipe.train.worker import Data, Prepared, meter_of, train_stages

log = logging.getLogger("raypipe")
LEFT_S = 3600.0  # after it, a file that asks workers to leave has been seen by all
# Of result.json. Format 1 (ba74455 and before) has the same fields and is read in the same way.
FORMAT = 2
DIVERGED = "Training diverged: no epoch is usable"
STOPPED = "Stopped on request"


@dataclass
class Outcome:
    """What result.json holds."""

    history: list[dict[str, float]]
    best_epoch: int
    checkpoint: str
    stopped: str | None
    device_s: float = 0.0  # 0: not known, in results of older versions


@dataclass(frozen=True)
class Plan:
    """One training with all its numbers: what it reads, and the key of its result."""

    job: TrainJob
    """With a number for every `auto`."""

    pinned: Pinned

    key: str
    """Of the result."""

    folder: Path
    """Of the result's files."""

    data: Prepared = field(repr=False, compare=False)
    """What it trains on."""


def plan(job: TrainJob, pinned: Pinned | None = None) -> Plan:
    """Connect to the cluster, pin the table, and find a number for every `auto`.

    pinned: the job's rows, if they are pinned already. Raises DataError, ClusterError or
    RaypipeError as `run` does.
    """
    job = join(job)
    rows = pinned or pin(job.table, job.feed, kind=job.model.task)
    # Before hours of training: the reference is drawn when they are over.
    named = [name for name in (job.registry.domain, job.registry.group) if name]
    rows.table.require(rows.table.at(rows.version), *named)
    if job.train.lr == "auto":
        check_start(job)  # the finder starts from these weights, too
    # Made once, for the finders and for the training.
    data = Prepared(lambda: prepare(job, rows))
    resolved = finders.resolve(job, rows, data)
    key = resolved.training_key(rows.version)
    return Plan(resolved, rows, key, resolved.folder(key), data)


def run(
    planned: Plan | TrainJob,
    progress: Report = lambda metrics, state: None,
    report_position: ReportPosition = lambda position: None,
    until: float | None = None,
) -> TrainResult:
    """Train on the pinned version of the job's table, or return the result of an earlier run.

    progress: called after each epoch. report_position: called with the position in the epoch, about
    once a second. SIGTERM saves the current step and stops; the same command resumes there. until:
    of time.monotonic; a training with train.anneal_s ends by then, if that is earlier.

    Raises DataError, ClusterError, or RaypipeError when a worker died or the run was stopped.
    """
    if isinstance(planned, TrainJob):
        planned = plan(planned)
    result_file = planned.folder / "result.json"
    if result_file.exists():
        return _stored(planned)
    check_start(planned.job)
    _check_own_code(planned)
    started = time.perf_counter()
    with owned(planned.folder):
        # Another process may have finished the run while this one waited for the folder.
        if result_file.exists():
            return _stored(planned)
        try:
            outcome = _run_into(planned, progress, report_position, until)
        finally:
            # The plan lives on, and decoded images fill the object store.
            planned.data.release()
    return _result(planned, outcome, time.perf_counter() - started)


def _stored(planned: Plan) -> TrainResult:
    log.info("This training is finished already: its result is read from %s", planned.folder)
    return _result(planned, _read_outcome(planned.folder / "result.json"), 0.0)


def _run_into(
    planned: Plan, progress: Report, report_position: ReportPosition, until: float | None = None
) -> Outcome:
    """Train, or resume an interrupted training, and write result.json into the run's folder.

    Raises RaypipeError if it was stopped, or if no epoch is usable; then there is no result.json.
    """
    job, folder = planned.job, planned.folder
    save(job, folder / "config.yaml")
    checkpoints = folder / "checkpoints"
    # TensorBoard's files get what `progress` gets.
    reporting: AbstractContextManager[Report] = nullcontext(progress)
    if job.train.tensorboard:
        reporting = tensorboard.recorded(folder / "tensorboard", progress)
    # The nodes of Spark are not read: the driver's alone would say that nothing was busy.
    every_s = job.cluster.usage_every_s if job.train.launcher == "ray" else None
    usage = recorded(folder / USAGE, every_s)
    with reporting as report, usage:
        data = planned.data()
        job = _ending_by(until, job, checkpoints)
        state = _train(job, data, checkpoints, report, report_position)
    _require_usable(job, state)
    best_epoch, best = _best_whole(job, checkpoints, state)
    outcome = Outcome(
        history=state.history,
        best_epoch=best_epoch,
        checkpoint=str(best),
        stopped=state.stopped,
        device_s=state.worker_s,
    )
    # Written last: while this file is missing, the run counts as unfinished.
    write_atomic(folder / "result.json", to_json(asdict(outcome) | {"format": FORMAT}))
    return outcome


def _ending_by(until: float | None, job: TrainJob, checkpoints: Path) -> TrainJob:
    """The job, whose loop has no more seconds than there are now. Its key stays."""
    if until is None or job.train.anneal_s is None:
        return job
    folder = newest(checkpoints)
    spent_s = checkpoint.read(folder, verified=True).state.seconds if folder else 0.0
    left_s = spent_s + max(0.1, until - time.monotonic())
    return replace(job, {"train.anneal_s": min(job.train.anneal_s, left_s)})


def _best_whole(job: TrainJob, checkpoints: Path, state: LoopState) -> tuple[int, Path]:
    """The best epoch, counted from 0, among those whose weights are whole, and its checkpoint.

    Warns if that is not the best of all: another run of the same command would find no more.
    Raises RaypipeError if no epoch's weights are whole.
    """

    def at(epoch: int) -> Path:
        return checkpoints / checkpoint.name(epoch + 1)

    best = at(state.best_epoch)
    problem = checkpoint.verify(best, model_only=True)
    if problem is None:
        return state.best_epoch, best
    whole = [
        epoch
        for epoch in range(len(state.history))
        if checkpoint.verify(at(epoch), model_only=True) is None
    ]
    rule, last = job.train.stopping, job.train.result == "last"
    place = best_of([state.history[epoch] for epoch in whole], rule, last)
    if place < 0:
        raise RaypipeError(
            "The weights of the best epoch are damaged, and no other epoch's are whole",
            got=f"{best}: {problem}",
            rule="Nothing altered is loaded, and all nodes share run.dir",
            fix=f"Remove {checkpoints}, and run the same command again: it trains again",
        )
    log.warning(
        "The weights of the best epoch (%d) are damaged (%s: %s). The result is epoch %d. To train "
        "again, remove %s and run the same command",
        state.best_epoch + 1,
        best.name,
        problem,
        whole[place] + 1,
        checkpoints.parent,
    )
    return whole[place], at(whole[place])


def never_a_number(job: TrainJob) -> RaypipeError:
    """For a sound training, or several, whose metric had no value."""
    metric, known = job.train.stopping.metric, METRICS[job.model.task]
    rule = "val_r2 needs validation labels that differ" if metric == "val_r2" else ""
    fix = f"Set train.stopping.metric={known[1]}"
    return RaypipeError(f"{metric} was never a number", rule=rule, fix=fix)


def _require_usable(job: TrainJob, state: LoopState) -> None:
    """Raise RaypipeError if no epoch can be the result; warn if the newest cannot."""
    fix = "Lower train.lr, or set train.clip_norm"
    if job.train.precision == "fp16":
        fix += ", or train.precision=bf16"
    no_result = state.best_epoch < 0
    all_finite = all(unusable(metrics) is None for metrics in state.history)
    if no_result and state.problem is None and all_finite:
        # The training is sound, but the metric was NaN in each epoch.
        raise never_a_number(job)
    if no_result:
        raise RaypipeError(
            DIVERGED,
            got=state.problem or f"train.lr={job.train.lr:g}",
            fix=fix,
        )
    # There is a result, but later epochs were lost.
    if state.problem is not None:
        sentence = state.problem[:1].upper() + state.problem[1:]
        log.warning("%s. The result is epoch %d. %s.", sentence, state.best_epoch + 1, fix)


def _read_outcome(result_file: Path) -> Outcome:
    """A stored result.

    Raises RaypipeError if its best epoch is unusable: an older version could call it the best.
    """
    read = dict(json.loads(result_file.read_text()))
    require_format(read, FORMAT, result_file)
    best = Path(read["checkpoint"])
    if not best.exists():
        # The run's folder was moved.
        best = result_file.parent / "checkpoints" / best.name
    history = [metrics_of(epoch) for epoch in read["history"]]
    problem = unusable(history[read["best_epoch"]])
    if problem is not None:
        raise RaypipeError(
            f"This training's kept result is unusable: {problem}",
            got=str(result_file),
            rule="An older raypipe called an epoch of NaN the best",
            fix=f"Remove {result_file.parent} to train again, or lower train.lr",
        )
    device_s = float(read.get("device_s", 0.0))
    return Outcome(history, read["best_epoch"], str(best), read["stopped"], device_s)


def _check_own_code(planned: Plan) -> None:
    """Raise DataError for a `file:` model that no package could hold, before it is trained."""
    job = planned.job
    if not job.model.name.startswith("file:"):
        return
    # Nothing is built for a run that cannot begin.
    if job.train.launcher == "ray" and job.train.workers != 1:
        require_shared_folder(job)
    require_packable(job.model, len(planned.pinned.classes))


def check_start(job: TrainJob) -> None:
    """Raise ConfigError when the weights of `train.start_from` are damaged or another model's."""
    if job.train.start_from is not None:
        start.require(Path(job.train.start_from), job.model)


def _train(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    progress: Report,
    report_position: ReportPosition,
) -> LoopState:
    """Train here or on workers. Raises RaypipeError when SIGTERM stopped it."""
    # A file asks to leave, because workers may be on other nodes.
    # With a name of its own: workers of an interrupted training may still have to see theirs.
    leave = checkpoints.with_name(f"leave-{uuid.uuid4().hex[:8]}")
    for old in checkpoints.parent.glob("leave*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > LEFT_S:
                old.unlink()
    with on_sigterm(leave.touch):
        if job.train.launcher != "ray":
            state = on_executors(job, data, checkpoints, leave, progress, report_position)
        elif job.train.workers == 1:
            with Saver(checkpoints, job.train) as saver:
                meter = meter_of(job, checkpoints.parent, report_position)
                resume = partial(newest, checkpoints)
                state = train_stages(job, data, resume, saver, progress, leave.exists, meter)
        else:
            state = on_workers(job, data, checkpoints, leave, progress, report_position)
    is_finished = state.finished(job.train.epochs)
    # A head that is fitted at once has no step at which it could look.
    if not is_finished or (job.train.solver != "steps" and leave.exists()):
        at = f"Epoch {state.epoch + 1}, step {state.step}"
        saved = "What was fitted" if is_finished else at
        raise RaypipeError(STOPPED, got="SIGTERM", rule=f"{saved} is saved", fix="Run it again")
    return state


def prepare(job: TrainJob, pinned: Pinned, here: bool = False) -> Data:
    """Find the rows, and embed (frozen) or decode (cache) them once for all trials and epochs.

    here: decode in this process.
    """
    # Checked before anything is decoded.
    check_weights(job.train.class_weights, pinned.classes)
    feed = job.feed
    found = sources(job, pinned, [feed.train, feed.val], here)
    return Data(
        classes=pinned.classes,
        features=job.model.mode == "frozen",
        train=found[feed.train],
        val=found[feed.val],
    )


def sources(
    job: TrainJob,
    pinned: Pinned,
    splits: list[str],
    here: bool = False,
    most: int | None = None,
) -> dict[str, Source]:
    """What the feed reads of each split: features of a frozen backbone, or images.

    most: of each split; None: all.
    """
    if job.model.mode == "frozen":
        store = str(job.run.path / "features")
        return feature_sources(pinned, splits, job.model, job.feed, store, most)
    feed = job.feed
    if job.train.launcher != "ray":
        # Ray's object store is not where the workers are, if this process has one.
        feed = feed.model_copy(update={"carrier": "threads"})
    return feeds.prepare(pinned, splits, job.model.pixels, feed, job.run.seed, here, most)


def assemble(job: TrainJob, result: TrainResult) -> Predictor:
    """The whole model, from pixels to logits, with the weights of the result's best epoch.

    Of a folder that `ensembles.write` wrote it is the ensemble.
    """
    folder = Path(result.checkpoint)
    weights = checkpoint.read_model(folder).weights
    require_weights(
        weights, result.checkpoint, "Remove the run's folder and train again with a lower train.lr"
    )
    members = ensembles.read(folder)
    if members:
        ensemble = EnsembleModel(members, len(result.classes))
        ensemble.load_state_dict(dict(weights))
        return ensemble.eval()
    model = ImageModel(job.model, len(result.classes))
    trained = model.head if job.model.mode == "frozen" else model
    trained.load_state_dict(dict(weights))
    return model.eval()


def seen_by(model: Predictor, job: TrainJob) -> TrainJob:
    """The job whose sources are what this model takes: an ensemble takes pixels, whatever its first
    member was trained on.
    """
    if isinstance(model, ImageModel):
        return job
    takes = {"mode": "finetune", "frozen_blocks": 0, "side_px": model.side_px}
    # Not validated again: no training follows.
    return job.model_copy(update={"model": job.model.model_copy(update=takes)})


def _result(planned: Plan, outcome: Outcome, seconds: float) -> TrainResult:
    return TrainResult(
        key=planned.key,
        version=planned.pinned.version,
        classes=planned.pinned.classes,
        metrics=outcome.history[outcome.best_epoch],
        history=tuple(outcome.history),
        best_epoch=outcome.best_epoch,
        checkpoint=outcome.checkpoint,
        seconds=seconds,
        stopped=outcome.stopped,
        device_s=outcome.device_s,
    )
