"""One training run: run(job) -> TrainResult. Training, search and retraining all come through here.

With one worker the loop runs in this process; with more, Ray Train starts that many and each runs the same `train_rank`. The
run's folder is named by everything that determines it, so running the same command again resumes an interrupted run and
returns a finished one.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.cluster.connect import connect
from raypipe.config import metrics_of, require_format, save, to_json
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import Pinned, pin
from raypipe.feed.features import feature_sources
from raypipe.feed.feed import Feed, Source, fetch
from raypipe.models.finite import require_rows, require_weights
from raypipe.models.zoo import ImageModel
from raypipe.registry.package import Reference
from raypipe.train import checkpoint
from raypipe.train.auto import finders
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.launch import check_workers, on_workers
from raypipe.train.loop import LoopState, Report
from raypipe.train.losses import check_weights
from raypipe.train.measure import tensorboard
from raypipe.train.measure.meter import Tell
from raypipe.train.objective import METRICS, judge
from raypipe.train.preemption import on_sigterm
from raypipe.train.stopping import unusable
from raypipe.train.worker import Data, meter_of, train_stages

log = logging.getLogger("raypipe")
FORMAT = (
    2  # of result.json; format 1 (ba74455 and before) has the same fields, and is read as it is
)
TEST = "test.json"  # beside a result: its metrics on the test split


def run(
    job: TrainJob,
    classes: tuple[str, ...] | None = None,
    progress: Report = lambda metrics, state: None,
    steps: Tell = lambda position: None,
) -> TrainResult:
    """Train as `job` says on the pinned version of its table. `progress` hears of each epoch, `steps` once a second.

    SIGTERM makes it save the step it is in and stop; the same command goes on from there. Raises DataError, ClusterError, or
    RaypipeError when a worker died or the run was stopped.
    """
    check_workers(job.train, connect(job.cluster, job.needs_cluster))
    pinned = pin(job.table, job.feed, classes, job.model.task)
    data = cache(lambda: prepare(job, pinned))  # made once, for the finders and for the training
    job = finders.settle(job, pinned, data)
    key = job.training_key(pinned.version)
    folder = job.folder(key)
    finished = folder / "result.json"
    if finished.exists():
        return _result(key, pinned, _usable(finished), 0.0)
    check_start(job)
    save(job, folder / "config.yaml")
    started = time.perf_counter()
    checkpoints = folder / "checkpoints"
    with (
        tensorboard.recorded(folder / "tensorboard", progress)
        if job.train.tensorboard
        else nullcontext(progress) as report
    ):
        state = _train(job, data(), checkpoints, report, steps)
    _require_usable(job, state)
    best = checkpoints / checkpoint.name(state.best_epoch + 1)
    outcome: dict[str, Any] = {
        "history": state.history,
        "best_epoch": state.best_epoch,
        "checkpoint": str(best),
    }
    outcome |= {"stopped": state.stopped, "format": FORMAT}
    if problem := checkpoint.verify(best):
        raise RaypipeError(
            f"The best checkpoint is not whole: {problem}",
            got=str(best),
            rule="All nodes share run.dir",
            fix="Set run.dir",
        )
    partial = finished.with_suffix(".partial")
    partial.write_text(to_json(outcome))
    partial.replace(finished)
    return _result(key, pinned, outcome, time.perf_counter() - started)


def _require_usable(job: TrainJob, state: LoopState) -> None:
    """Raise RaypipeError if no epoch can be the result; say so if the newest cannot."""
    fix = "Lower train.lr, or set train.clip_norm" + (
        ", or train.precision=bf16" if job.train.precision == "fp16" else ""
    )
    if (
        state.best_epoch < 0
        and state.problem is None
        and all(unusable(m) is None for m in state.history)
    ):
        metric, known = job.train.stopping.metric, METRICS[job.model.task]
        rule = "val_r2 needs validation labels that differ" if metric == "val_r2" else ""
        raise RaypipeError(
            f"{metric} was never a number", rule=rule, fix=f"Set train.stopping.metric={known[1]}"
        )
    if state.best_epoch < 0:
        raise RaypipeError(
            "Training diverged: no epoch is usable",
            got=state.problem or f"train.lr={job.train.lr:g}",
            fix=fix,
        )
    if state.problem is not None:
        log.warning(
            "%s. The result is epoch %d. %s.", _sentence(state.problem), state.best_epoch + 1, fix
        )


def _usable(finished: Path) -> dict[str, Any]:
    """A kept result. Raises RaypipeError for weights that are not finite: an older version called such an epoch the best."""
    outcome = dict(json.loads(finished.read_text()))
    require_format(outcome, FORMAT, finished)
    kept = Path(outcome["checkpoint"])
    if not kept.exists():  # the run's folder was moved
        outcome["checkpoint"] = str(finished.parent / "checkpoints" / kept.name)
    outcome["history"] = [metrics_of(line) for line in outcome["history"]]
    if (problem := unusable(outcome["history"][outcome["best_epoch"]])) is not None:
        raise RaypipeError(
            f"This training's kept result is unusable: {problem}",
            got=str(finished),
            rule="An older raypipe called an epoch of NaN the best",
            fix=f"Remove {finished.parent} to train again, or lower train.lr",
        )
    return outcome


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def check_start(job: TrainJob) -> None:
    """Raise ConfigError when the training should start from weights that are not there."""
    where = job.train.start_from
    if where is not None and (problem := checkpoint.verify(Path(where))):
        raise ConfigError(
            f"train.start_from is no whole checkpoint: {problem}",
            got=where,
            fix="Name an epoch's folder",
        )


def _train(
    job: TrainJob, data: Data, checkpoints: Path, progress: Report, steps: Tell
) -> LoopState:
    leave = checkpoints.with_name("leave")  # a file, because workers may be on other nodes
    leave.unlink(missing_ok=True)
    with on_sigterm(leave.touch):
        if job.train.workers == 1:
            with Saver(checkpoints, job.train) as saver:
                meter = meter_of(job, checkpoints.parent, steps)
                state = train_stages(
                    job, data, partial(newest, checkpoints), saver, progress, leave.exists, meter
                )
        else:
            state = on_workers(job, data, checkpoints, leave, progress, steps)
    if not state.finished(job.train.epochs):
        raise RaypipeError(
            "Stopped on request",
            got="SIGTERM",
            rule=f"Epoch {state.epoch + 1}, step {state.step} is saved",
            fix="Run it again",
        )
    return state


def prepare(job: TrainJob, pinned: Pinned, here: bool = False) -> Data:
    """Find the rows, and (frozen) embed or (cache) decode them once, for however many trials and epochs follow; `here`: decode
    in this process."""
    check_weights(job.train.class_weights, pinned.classes)  # before anything is decoded
    sources = _sources(job, pinned, [job.feed.train, job.feed.val], here)
    return Data(
        pinned.classes, job.model.mode == "frozen", sources[job.feed.train], sources[job.feed.val]
    )


def _sources(
    job: TrainJob, pinned: Pinned, splits: list[str], here: bool = False
) -> dict[str, Source]:
    if job.model.mode == "frozen":
        return feature_sources(pinned, splits, job.model, job.feed, str(job.run.path / "features"))
    return feeds.prepare(pinned, splits, job.model.pixels, job.feed, job.run.seed, here)


def assemble(job: TrainJob, result: TrainResult) -> ImageModel:
    """The whole model, from pixels to logits, with the weights of the result's best epoch."""
    weights = checkpoint.read(Path(result.checkpoint)).weights
    require_weights(
        weights, result.checkpoint, "Remove the run's folder and train again with a lower train.lr"
    )
    model = ImageModel(job.model, len(result.classes))
    (model.head if job.model.mode == "frozen" else model).load_state_dict(dict(weights))
    return model.eval()


def reference(job: TrainJob, model: ImageModel, pinned: Pinned, folder: Path) -> Reference:
    """Features and scores of the validation split: images of the training domain that the weights have not seen, which
    is what later batches are compared with. Training images would look too easy, and every new batch would drift; so it is
    the test split where the weights have seen validation, and what test() says of it is kept in `folder` at once."""
    feed = job.feed
    seen = set(pinned.parts(feed.val)) <= set(pinned.parts(feed.train))
    split = feed.test if seen and pinned.counts[feed.test] else feed.val
    found, labels_N = _predicted(job, model, pinned, split)
    if split == feed.test:
        _keep_test(folder, pinned, found, labels_N)
    return found


def test(job: TrainJob, result: TrainResult, folder: Path) -> dict[str, float]:
    """Metrics of the result on the split feed.test (test_accuracy, …), predicted as the package does; {} where the table has
    no such rows. Kept in `folder`, beside the result: looking again costs nothing."""
    kept = folder / TEST
    if not kept.exists():
        pinned = pin(
            job.table.model_copy(update={"version": result.version.version}),
            job.feed,
            result.classes,
            job.model.task,
        )
        if not pinned.counts[job.feed.test]:
            return {}
        _keep_test(folder, pinned, *_predicted(job, assemble(job, result), pinned, job.feed.test))
    return metrics_of(json.loads(kept.read_text()))


def _keep_test(folder: Path, pinned: Pinned, found: Reference, labels_N: np.ndarray) -> None:
    labels = torch.tensor(labels_N)  # a copy: in the store they are read-only
    metrics = judge(pinned.task, torch.from_numpy(found.scores_NC), labels)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{TEST}.partial"
    partial.write_text(
        to_json({name.replace("val_", "test_"): value for name, value in metrics.items()})
    )
    partial.replace(folder / TEST)


def _predicted(
    job: TrainJob, model: ImageModel, pinned: Pinned, split: str
) -> tuple[Reference, np.ndarray]:
    """Features and scores of a split, and the labels of the images they are of: where one is broken,
    those of the image in its place."""
    source = _sources(job, pinned, [split])[split]
    rows, batches = fetch(source.rows), Feed(source, source, 256, job.run.seed).val()
    frozen = job.model.mode == "frozen"
    predictor = model if frozen else model.for_inference()
    found = []
    for batch in batches:
        if frozen:
            with torch.inference_mode():
                predicted = batch.inputs.numpy(), model.scores(model.head(batch.inputs)).numpy()
        else:
            predicted = predictor.predict(batch.inputs.numpy())
        found.append((batch.samples_B, *predicted))
    samples_N, features_ND, scores_NC = (np.concatenate(part) for part in zip(*found, strict=True))
    ids = tuple(rows.ids.take(samples_N).to_pylist())
    require_rows(scores_NC, "scores", "Train again with a lower train.lr")
    return Reference(features_ND, scores_NC, ids), rows.labels_N[samples_N]


def _result(key: str, pinned: Pinned, outcome: dict[str, Any], seconds: float) -> TrainResult:
    history, best = outcome["history"], outcome["best_epoch"]
    where, stopped = outcome["checkpoint"], outcome["stopped"]
    return TrainResult(
        key,
        pinned.version,
        pinned.classes,
        history[best],
        tuple(history),
        best,
        where,
        seconds,
        stopped,
    )
