"""What the trials reported so far: told to whoever listens, and asked when the search's own rule is to end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray import tune

from raypipe.search.leaderboard import Standing
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, metric_in
from raypipe.train.stopping import Mode, Progress, SearchStoppingConfig, improved, of_search

Listener = Callable[
    [int, int, list[Standing]], None
]  # trials ended, trials in all, those that reported from best to worst


class Monitor(tune.Callback):  # type: ignore[misc]
    """Keeps what trials reported so far, tells it to whoever listens, and knows when the search's rule says to stop.

    Tune pickles its callbacks to restore them, and their state apart. Who listens (a terminal) cannot be pickled and may be
    another one after a restore, so it is looked up by the search that runs now.
    """

    listener: Listener = staticmethod(lambda done, total, standings: None)
    current: Monitor | None = None  # the one that Tune uses

    def __init__(
        self, total: int, metric: str, mode: Mode, stopping: SearchStoppingConfig, workers: float
    ) -> None:
        self._total, self._metric, self._mode, self._stopping, self._workers = (
            total,
            metric,
            mode,
            stopping,
            workers,
        )
        self._best: dict[str, float] = {}  # by trial, as the next two
        self._epochs: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._ended: list[str] = []
        self.failures: dict[str, int] = {}  # by the trial's folder
        self._before, self._started = 0.0, time.perf_counter()
        self.stopped: str | None = None

    def setup(self, *args: Any, **info: Any) -> None:
        type(self).current, self._started = self, time.perf_counter()

    def progress(self) -> Progress:
        nan = float("nan")
        return Progress(
            self._metric,
            self._mode,
            [self._best.get(trial, nan) for trial in self._ended],
            seconds=self._before + time.perf_counter() - self._started,
            worker_s=sum(self._seconds.values()) * self._workers,
            unit="trial",
            running=[value for trial, value in self._best.items() if trial not in self._ended],
            epochs=sum(self._epochs.values()),
        )

    def stop(self) -> bool:
        self.stopped = self.stopped or of_search(self._stopping)(self.progress())
        return self.stopped is not None

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        name, value = trial.trial_id, metric_in(result, self._metric)
        if improved(value, self._best.get(name), self._mode):
            self._best[name] = value
        self._epochs[name], self._seconds[name] = (
            result["training_iteration"],
            result["time_total_s"],
        )
        self._tell(trials)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (
            trial.trial_id not in self._ended
        ):  # one that failed may run and end again after a restore
            self._ended.append(trial.trial_id)
        self._tell(trials)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.on_trial_recover(iteration, trials, trial)
        self.on_trial_complete(iteration, trials, trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It failed, and runs again."""
        name = trial_checkpoints.name_of(trial.path)
        self.failures[name] = self.failures.get(name, 0) + 1

    def get_state(self) -> dict[str, Any]:
        told = {
            name: getattr(self, name)
            for name in ("_best", "_epochs", "_seconds", "_ended", "failures", "stopped")
        }
        return told | {"_before": self._before + time.perf_counter() - self._started}

    def set_state(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _started=time.perf_counter())

    def _tell(self, trials: list[Any]) -> None:
        sign = -1 if self._mode == "max" else 1
        told = [self._standing(t) for t in trials if t.trial_id in self._best]
        told.sort(key=lambda standing: sign * standing.best)
        type(self).listener(sum(t.is_finished() for t in trials), self._total, told)

    def _standing(self, trial: Any) -> Standing:
        if trial.is_finished():
            state = (
                "failed"
                if trial.status == trial.ERROR
                else "full"
                if trial.last_result.get(ENDED)
                else "stopped"
            )
        else:
            state = "running" if trial.status == trial.RUNNING else "waiting"
        name = trial.trial_id
        return Standing(
            trial_checkpoints.name_of(trial.path),
            trial.config,
            self._best[name],
            self._epochs[name],
            state,
        )


class Stop(tune.Stopper):  # type: ignore[misc]
    """Asks the search's record. Tune asks before every step of its own, so a budget of time is kept between results too."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return Monitor.current is not None and Monitor.current.stop()
