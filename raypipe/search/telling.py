"""Reports of trials as records of the stream RaypipeTraining_CL (raypipe/monitor/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypipe.monitor import streams
from raypipe.monitor.monitor import Monitor
from raypipe.search.trials.standing import Standing
from raypipe.train.job import TrainJob

Listener = Callable[[int, int, Sequence[Standing]], None]


def standings(monitors: Sequence[Monitor], job: TrainJob, then: Listener) -> Listener:
    """A listener that tells the monitors of each trial that has a new epoch or a new state."""
    known: dict[str, tuple[int, str]] = {}

    def told(done: int, total: int, now: Sequence[Standing]) -> None:
        for standing in now:
            news = (standing.epochs, standing.state)
            if known.get(standing.name) == news:
                continue
            known[standing.name] = news
            changes = standing.changes
            # A head that is fitted at once has no further epochs.
            whole = standing.epochs if standing.state == "fitted" else job.train.epochs
            for monitor in monitors:
                monitor.note(
                    streams.TRAINING,
                    {
                        "Kind": "trial",
                        "Trial": standing.name,
                        "Model": changes.get("model.name", job.model.name),
                        "Mode": changes.get("model.mode", job.model.mode),
                        "Epoch": standing.epochs,
                        "Epochs": changes.get("train.epochs", whole),
                        "Metric": job.train.stopping.metric,
                        "MetricValue": standing.best,
                        "Seconds": standing.seconds,
                        "Stopped": None if standing.state == "running" else standing.state,
                        "Metrics": dict(changes),
                    },
                )
        then(done, total, now)

    return told if monitors else then
