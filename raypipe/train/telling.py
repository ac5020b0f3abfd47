"""Epochs of a training as records of the stream RaypipeTraining_CL (raypipe/monitor/)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.monitor import streams
from raypipe.monitor.monitor import Monitor
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState, Report


def epochs(monitors: Sequence[Monitor], job: TrainJob, key: str, then: Report) -> Report:
    """A `report` that tells the monitors first. key: of the training's result."""

    def told(metrics: dict[str, float], state: LoopState) -> None:
        for monitor in monitors:
            monitor.note(streams.TRAINING, epoch(job, key, metrics, state))
        then(metrics, state)

    return told if monitors else then


def finished(monitors: Sequence[Monitor], job: TrainJob, result: TrainResult) -> None:
    """Tell that a training has its result, be it of an earlier run."""
    for monitor in monitors:
        values = _values(job, result.key, result.metrics)
        values |= {"Kind": "finished", "Epoch": result.best_epoch + 1, "Stopped": result.stopped}
        monitor.note(streams.TRAINING, values | {"Seconds": result.seconds})


def epoch(
    job: TrainJob, key: str, metrics: Mapping[str, float], state: LoopState
) -> dict[str, Any]:
    """The columns of an epoch."""
    values = _values(job, key, metrics)
    values |= {"Kind": "epoch", "Epoch": state.epoch, "Stopped": state.stopped}
    return values | {"Seconds": state.seconds}


def _values(job: TrainJob, key: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    metric = job.train.stopping.metric
    return {
        "RunId": key,
        "Model": job.model.name,
        "Mode": job.model.mode,
        "Epochs": job.train.epochs,
        "Workers": job.train.most_workers,
        "Metric": metric,
        "MetricValue": metrics.get(metric),
        "TrainLoss": metrics.get("train_loss"),
        "ValLoss": metrics.get("val_loss"),
        "ImagesPerSecond": metrics.get("images_per_s"),
        "Metrics": dict(metrics),
    }
