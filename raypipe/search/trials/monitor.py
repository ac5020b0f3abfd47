"""What all trials reported so far: shown to the user, and read by the rule that stops the search.

1. Tune calls `Monitor` (a callback) whenever a trial reports, ends or fails.
2. After each of these calls, Monitor passes the standings to its listener: the terminal's display.
3. Tune asks `Stop` before each of its own steps whether to stop, so a time budget is kept even if
   no trial reports. `Stop` asks its Monitor.
4. Tune pickles its callbacks to restore them after a kill, and saves their state separately. A
   listener cannot be pickled. So a pickled Monitor has none, and a restored search puts a new
   Monitor in its place (`put_into`), which then gets the old one's state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from ray import tune

from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, metric_of_result
from raypipe.search.trials.standing import Standing
from raypipe.train.stopping import Mode, Progress, SearchStoppingConfig, improved, of_search

# Called with: trials that ended, trials in total, and the trials that reported, best first.
Listener = Callable[[int, int, list[Standing]], None]

_SAVED = ("_best", "_epochs", "_seconds", "_ended", "failures", "stopped")


def _nobody(done: int, total: int, standings: list[Standing]) -> None:
    """The listener of a search that nobody watches."""


class Monitor(tune.Callback):  # type: ignore[misc]
    """Records what trials report, passes it to `listener`, and knows whether the search must stop.

    workers: how many workers (GPUs, or shares of one) a trial takes; a budget in GPU-hours counts
    them.
    """

    def __init__(
        self,
        total: int,
        metric: str,
        mode: Mode,
        stopping: SearchStoppingConfig,
        workers: float,
        listener: Listener = _nobody,
    ) -> None:
        self._listener = listener
        self._total = total
        self._metric = metric
        self._mode = mode
        self._stopping = stopping
        self._workers = workers

        # By trial id.
        self._best: dict[str, float] = {}
        self._epochs: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._ended: list[str] = []  # in the order in which they ended

        self.failures: dict[str, int] = {}  # by the name of the trial's folder
        self.stopped: str | None = None  # why the search's rule stopped it

        self._before = 0.0  # seconds of the search before it was restored
        self._started = time.perf_counter()

    def put_into(self, run_config: tune.RunConfig) -> None:
        """Take the place of the Monitor that a restored search was pickled with."""
        callbacks = run_config.callbacks or []
        run_config.callbacks = [self if isinstance(c, Monitor) else c for c in callbacks]
        run_config.stop = Stop(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listener": _nobody}

    def setup(self, *args: Any, **info: Any) -> None:
        self._started = time.perf_counter()

    def progress(self) -> Progress:
        """What the stopping rules look at."""
        # A trial that ended without a usable epoch counts as NaN.
        ended = [self._best.get(trial, math.nan) for trial in self._ended]
        running = [value for trial, value in self._best.items() if trial not in self._ended]
        return Progress(
            self._metric,
            self._mode,
            ended,
            seconds=self._elapsed(),
            worker_s=sum(self._seconds.values()) * self._workers,
            unit="trial",
            running=running,
            epochs=sum(self._epochs.values()),
        )

    def stop(self) -> bool:
        """True from the first time on that the search's rule gives a reason to stop."""
        if not self.stopped:
            rule = of_search(self._stopping)
            self.stopped = rule(self.progress())
        return self.stopped is not None

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        name = trial.trial_id
        value = metric_of_result(result, self._metric)
        if improved(value, self._best.get(name), self._mode):
            self._best[name] = value
        self._epochs[name] = result["training_iteration"]
        self._seconds[name] = result["time_total_s"]
        self._notify(trials)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # A trial that failed may run again after a restore, and end a second time.
        if trial.trial_id not in self._ended:
            self._ended.append(trial.trial_id)
        self._notify(trials)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial failed for the last time."""
        self.on_trial_recover(iteration, trials, trial)
        self.on_trial_complete(iteration, trials, trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial failed, and Tune runs it again."""
        name = trial_checkpoints.name_of(trial.path)
        failures = self.failures.get(name, 0)
        self.failures[name] = failures + 1

    def get_state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _SAVED}
        return state | {"_before": self._elapsed()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _started=time.perf_counter())

    def _elapsed(self) -> float:
        """Seconds that the search has run, also before it was restored."""
        return self._before + time.perf_counter() - self._started

    def _notify(self, trials: list[Any]) -> None:
        """Pass the trials that have a usable epoch to the listener, best first."""
        standings = [self._standing(t) for t in trials if t.trial_id in self._best]
        sign = -1 if self._mode == "max" else 1
        standings.sort(key=lambda standing: sign * standing.best)
        done = sum(t.is_finished() for t in trials)
        self._listener(done, self._total, standings)

    def _standing(self, trial: Any) -> Standing:
        return Standing(
            trial_checkpoints.name_of(trial.path),
            trial.config,
            self._best[trial.trial_id],
            self._epochs[trial.trial_id],
            _state(trial),
        )


def _state(trial: Any) -> str:
    """One word for a Tune trial's state, as `Standing.state` defines it."""
    if not trial.is_finished():
        return "running" if trial.status == trial.RUNNING else "waiting"
    if trial.status == trial.ERROR:
        return "failed"
    return "full" if trial.last_result.get(ENDED) else "stopped"


class Stop(tune.Stopper):  # type: ignore[misc]
    """Stops all trials when the Monitor says so; never a single trial."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._monitor.stop()
