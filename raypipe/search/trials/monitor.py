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
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import tune

from raypipe.models.zoo import ModelConfig
from raypipe.search import budget, networks
from raypipe.search.budget import Speed
from raypipe.search.ledger import Ledger
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, WORKERS, metric_of_result
from raypipe.search.trials.standing import Reached, Standing
from raypipe.train.stopping import (
    BudgetConfig,
    Mode,
    Progress,
    SearchStoppingConfig,
    budgets,
    improved,
    of_search,
)

# Called with: trials that ended, trials in total, and the trials that reported, best first.
Listener = Callable[[int, int, list[Standing]], None]

# Called with Tune's trial when it has ended without an error.
Ended = Callable[[Any], None]

# Fields of a trial's model that decide how long its network predicts.
_DECIDES_WORK = ("name", "mode", "side_px")

_SAVED = (
    "_best",
    "_epochs",
    "_ended",
    "held",
    "ended_before",
    "failures",
    "stopped",
    "reached",
    "speed",
)


@dataclass(frozen=True)
class Held:
    """What a trial held of the cluster, also before it was paused or restored."""

    seconds: float = 0.0
    device_s: float = 0.0
    """Seconds times devices: GPUs, or shares of one, or without any CPU workers."""

    def __add__(self, other: Held) -> Held:
        return Held(self.seconds + other.seconds, self.device_s + other.device_s)


def _nobody(done: int, total: int, standings: list[Standing]) -> None:
    """The listener of a search that nobody watches."""


def _nothing(trial: Any) -> None:
    """Nothing is to be done when a trial ends."""


class Monitor(tune.Callback):  # type: ignore[misc]
    """Records what trials report, passes it to `listener`, and knows whether the search must stop.

    devices: how many devices (GPUs, or shares of one) a worker of a trial takes; a budget in
    GPU-hours counts them. most_money: search.limits.money, which is never passed: the search stops
    before the epochs that run would pass it. heads_s: device seconds of a first answer's heads,
    which most_money pays, too: they are trials on the leaderboard. workers: of a trial, until one
    has said how many it has. first: the best of these heads; None: there is none. result: which
    epoch trials offer that do not draw train.result.
    """

    def __init__(
        self,
        total: int,
        metric: str,
        mode: Mode,
        stopping: SearchStoppingConfig,
        devices: float,
        listener: Listener = _nobody,
        ended: Ended = _nothing,
        most_money: float | None = None,
        ledger: Ledger | None = None,
        model: ModelConfig | None = None,
        heads_s: float = 0.0,
        workers: int = 1,
        first: float | None = None,
        result: Literal["best", "last"] = "best",
    ) -> None:
        """ledger: the clock of search.budget_s. model: the job's, for what trials do not draw."""
        self._listener = listener
        self._ledger = ledger
        self._model = model or ModelConfig()
        self._tell_end = ended
        self._total = total
        self._metric = metric
        self._mode = mode
        self._stopping = stopping
        self._most_money = most_money
        self._heads_s = heads_s
        self._first = first
        self._result = result
        self._devices = devices

        # By trial id.
        self._best: dict[str, float] = {}  # with train.result=last, the last one
        self._epochs: dict[str, int] = {}
        self._ended: list[str] = []  # in the order in which they ended
        # What a report would else work out again for each of a thousand trials.
        self._has_ended: set[str] = set()
        self._shown: dict[str, Standing] = {}
        # By trial: device seconds of its last epoch, and when the next one began.
        self._epoch_s: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._folders: dict[str, str] = {}  # their names, of all that began
        self._workers = float(workers)

        # By the name of the trial's folder, which is the same after a restore.
        self.held: dict[str, Held] = {}
        self.ended_before: set[str] = set()  # the rule stopped the search, if it did
        self.failures: dict[str, int] = {}
        self.stopped: str | None = None  # why the search's rule stopped it
        self.reached: list[Reached] = []  # each time that the best of all became better

        self.speed: Speed | None = None  # of the leading trial
        self._before = 0.0  # seconds of the search before it was restored
        self._started = time.perf_counter()

    def put_into(self, run_config: tune.RunConfig) -> None:
        """Take the place of the Monitor that a restored search was pickled with."""
        callbacks = run_config.callbacks or []
        run_config.callbacks = [self if isinstance(c, Monitor) else c for c in callbacks]
        run_config.stop = Stop(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listener": _nobody, "_tell_end": _nothing, "_ledger": None}

    def setup(self, *args: Any, **info: Any) -> None:
        self._started = time.perf_counter()

    def progress(self) -> Progress:
        """What the stopping rules look at."""
        # A trial that ended without a usable epoch counts as NaN.
        ended = [self._best.get(trial, math.nan) for trial in self._ended]
        running = [value for trial, value in self._best.items() if trial not in self._has_ended]
        return Progress(
            self._metric,
            self._mode,
            ended,
            seconds=self.elapsed(),
            worker_s=sum(held.device_s for held in self.held.values()),
            unit="trial",
            running=running,
            epochs=sum(self._epochs.values()),
            first=self._first,
        )

    def stop(self) -> bool:
        """True from the first time on that the search's rule gives a reason to stop."""
        if not self.stopped:
            rule = of_search(self._stopping)
            self.stopped = rule(self.progress())
        if not self.stopped and self._most_money is not None:
            self.stopped = self._over_money(self._most_money)
        if not self.stopped and self._ledger is not None:
            self.stopped = self._ledger.is_over(len(self._epochs), self.speed)
        return self.stopped is not None

    def _over_money(self, most: float) -> str | None:
        """Why search.limits.money stops the search: it is spent, or would be when the epochs that
        run have ended.
        """
        now, slowest_s = time.perf_counter(), max(self._epoch_s.values(), default=0.0)
        ahead_s = self._heads_s
        for trial, began in self._since.items():
            # As long as the trial's last epoch, but not less than it has taken already.
            taken_s = (now - began) * self._devices * self._workers
            ahead_s += max(taken_s, self._epoch_s.get(trial, slowest_s))
        limit = BudgetConfig(money=most, price_per_hour=self._stopping.price_per_hour)
        return budgets(limit)(replace(self.progress(), ahead_worker_s=ahead_s))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Which trials run, and since when they train their epochs."""
        # Tune tells of no trial that the search's end has cut.
        if self.stopped is not None:
            for trial in trials:
                if trial.status != trial.RUNNING:
                    self._pay_unfinished(trial)
        running = [trial for trial in trials if trial.status == trial.RUNNING]
        now = time.perf_counter()
        self._since = {t.trial_id: self._since.get(t.trial_id, now) for t in running}
        for trial in running:
            self._folder_of(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        name = trial.trial_id
        value = metric_of_result(result, self._metric)
        offers_last = self._offers_last(trial)
        before = None if offers_last else self._best.get(name)
        if improved(value, before, self._mode):
            self._best[name] = value
            leads = max if self._mode == "max" else min
            if value == leads(self._best.values()):
                self._measure(trial, result)
        self._epochs[name] = result["training_iteration"]
        if not offers_last:
            self._reach(trial, value)
        # Not Tune's total: a clone's has its donor's time.
        seconds = float(result["time_this_iter_s"])
        self._workers = float(result.get(WORKERS, 1.0))
        self._epoch_s[name] = self._hold(trial, seconds)
        self._since[name] = time.perf_counter()
        self._notify(trials)

    def _offers_last(self, trial: Any) -> bool:
        """Is the trial's model that of its last epoch? Then nobody gets what an earlier one was."""
        return bool(trial.config.get("train.result", self._result) == "last")

    def _reach(self, trial: Any, value: float) -> None:
        """Note it if the trial's model, of this value, is better than all before it."""
        if improved(value, self.reached[-1].value if self.reached else None, self._mode):
            of_trial = trial_checkpoints.name_of(trial.path)
            epoch = self._epochs[trial.trial_id]
            self.reached.append(Reached(self.elapsed(), value, of_trial, epoch))

    def _hold(self, trial: Any, seconds: float) -> float:
        """The trial held its devices for so many seconds. Returns the device seconds."""
        folder, more = self._folder_of(trial), self._held_for(seconds)
        self.held[folder] = self.held.get(folder, Held()) + more
        return more.device_s

    def _held_for(self, seconds: float) -> Held:
        """What a trial holds in so many seconds."""
        return Held(seconds, seconds * self._workers * self._devices)

    def _folder_of(self, trial: Any) -> str:
        """The name of the trial's folder. Asked ten times a second, it is made once."""
        name = self._folders.get(trial.trial_id)
        if name is None:
            name = self._folders[trial.trial_id] = trial_checkpoints.name_of(trial.path)
        return name

    def _measure(self, trial: Any, result: dict[str, Any]) -> None:
        """Note the speed of the trial that leads: a refit would be a training of it."""
        changes = trial.config
        side_px = changes.get("model.side_px") or self._model.pixels
        is_frozen = changes.get("model.mode", self._model.mode) == "frozen"
        name = trial_checkpoints.name_of(trial.path)
        epochs = result["training_iteration"]
        more = self._ledger is not None and self._ledger.forecast.has_more_threads
        found = budget.speed_of(name, side_px, is_frozen, result, epochs, more)
        if found is not None and self._ledger is not None:
            named = {f"model.{field}": field for field in _DECIDES_WORK}
            drawn = {field: changes[name] for name, field in named.items() if name in changes}
            model = self._model.model_copy(update=drawn)
            found = networks.on_cpus(found, model, self._ledger.forecast.network_per_s)
        self.speed = found or self.speed

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # A trial that ended before its first epoch is no trial without an improvement.
        if trial.trial_id in self._epochs:
            if self._offers_last(trial):
                self._reach(trial, self._best.get(trial.trial_id, math.nan))
            self._count_end(trials, trial)
        self._tell_end(trial)

    def _count_end(self, trials: list[Any], trial: Any) -> None:
        # A trial that failed may run again after a restore, and end a second time.
        if trial.trial_id not in self._has_ended:
            self._ended.append(trial.trial_id)
            self._has_ended.add(trial.trial_id)
        if self.stopped is None:
            self.ended_before.add(trial_checkpoints.name_of(trial.path))
        self._notify(trials)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial failed for the last time."""
        self.on_trial_recover(iteration, trials, trial)
        self._count_end(trials, trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial failed, and Tune runs it again."""
        name = trial_checkpoints.name_of(trial.path)
        failures = self.failures.get(name, 0)
        self.failures[name] = failures + 1
        self._pay_unfinished(trial)

    def _pay_unfinished(self, trial: Any) -> None:
        """The epoch that it did not end is paid, too."""
        began = self._since.pop(trial.trial_id, None)
        if began is not None:
            self._hold(trial, time.perf_counter() - began)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Name the folders of trials that never began: Tune's results ask for them, and raise."""
        for trial in trials:
            if not trial.storage.trial_dir_name:
                trial.init_local_path()
        # Trials that the search's rule has cut are at their last epochs; Tune tells of no end.
        # After Ctrl-C they go on when the search does.
        if self.stopped is not None:
            self._reach_by_cut(trials)

    def _reach_by_cut(self, trials: list[Any]) -> None:
        """Note the best of the trials that had not ended: they end together."""
        sign = -1 if self._mode == "max" else 1
        values = {name: self._best[name] for name in self._best if name not in self._has_ended}
        cut = [t for t in trials if t.trial_id in values and self._offers_last(t)]
        for trial in sorted(cut, key=lambda t: sign * values[t.trial_id])[:1]:
            self._reach(trial, values[trial.trial_id])

    def get_state(self) -> dict[str, Any]:
        """What a restored search goes on with.

        A kill cuts the epochs that run, and they are paid all the same: so the state has them as
        far as they have come. Tune saves it about once a second; what comes after the last time is
        lost.
        """
        state = {name: getattr(self, name) for name in _SAVED}
        state["held"] = self._held_by_now()
        # A search that had no answer when its time was over may try again: time counts anew.
        if self._ledger is not None and not self._best:
            state["stopped"] = None
        return state | {"_before": self.elapsed()}

    def _held_by_now(self) -> dict[str, Held]:
        """`held`, with what trials that run have taken of their epochs."""
        now, found = time.perf_counter(), dict(self.held)
        for trial_id, began in self._since.items():
            folder = self._folders[trial_id]
            found[folder] = found.get(folder, Held()) + self._held_for(now - began)
        return found

    def set_state(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _started=time.perf_counter())
        self._has_ended = set(self._ended)

    def elapsed(self) -> float:
        """Seconds that the search has run, also before it was restored."""
        return self._before + time.perf_counter() - self._started

    def _notify(self, trials: list[Any]) -> None:
        """Pass the trials that have a usable epoch to the listener, best first."""
        standings = [self._standing(t) for t in trials if t.trial_id in self._best]
        sign = -1 if self._mode == "max" else 1
        standings.sort(key=lambda standing: sign * standing.best)
        # At its end a search stops hundreds of trials that never began: they are finished, too.
        ended = [t for t in trials if t.is_finished() and t.trial_id in self._has_ended]
        # One that diverged may have a follower.
        self._listener(len(ended), max(self._total, len(trials)), standings)

    def _standing(self, trial: Any) -> Standing:
        """The trial's line, made again only if it changed."""
        trial_id = trial.trial_id
        shown = self._shown.get(trial_id)
        name = shown.name if shown else trial_checkpoints.name_of(trial.path)
        held = self.held.get(name, Held())
        now = (
            self._best[trial_id],
            self._epochs[trial_id],
            _state(trial),
            held.seconds,
            held.device_s,
        )
        # After an exploit of PBT, the trial has another config.
        if shown is None or shown.changes is not trial.config or now != _numbers(shown):
            best, epochs, state, seconds, device_s = now
            shown = Standing(
                name, trial.config, best, epochs, state, seconds=seconds, device_s=device_s
            )
            self._shown[trial_id] = shown
        return shown


def _numbers(shown: Standing) -> tuple[float, int, str, float, float]:
    """What a report may change."""
    return shown.best, shown.epochs, shown.state, shown.seconds, shown.device_s


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
