"""Which trials continue, and for how long: names -> Ray Tune's schedulers.

`asha` and `pasha` are our own rules (halving.py) behind Tune's interface, so a search runs the same
code that benchmarks/halving.py measures on tables. So is `freeze_thaw` (thaw_scheduler.py), which
needs the space too. `hyperband` and `median` are Tune's.

A scheduler that pauses trials has four problems with Tune:

1. Tune's searchers count paused trials as running. When as many trials are paused as may run at a
   time, the search would end without a message. So a trial that pauses gives its place back
   (`_yield_place`). Tune does not count a trial that continues, so more trials would run than may:
   where somebody has set their number, or where each needs room for a group of workers, a trial
   that continues takes a place (`HalvingScheduler.concurrent`).
2. Tune's HyperBand halves its bracket when all trials of it wait. If it knew two trials at a time,
   none would ever be stopped. So it gets all trials at the start (`drawn_ahead`), and a searcher
   that learns from results has none to learn from.
3. A trial with an unusable epoch has lost its weights (epoch_result.py). Halving stops it, and
   Tune's own rules rank it last.
4. Tune restores a search without its scheduler's state: the first trials after a kill would be
   compared with none. `Memory` is a callback that Tune saves and restores. Paused trials stay
   paused. HyperBand cannot go on from any state: its search begins anew (tune_run.restored).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    HyperBandScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raypipe.search.schedulers.halving import Halving
from raypipe.search.schedulers.rule_scheduler import DECISIONS, RuleScheduler
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.epoch_result import EPOCH, metric_of_result
from raypipe.search.trials.trial_checkpoints import lacks_last
from raypipe.train.settings import TrainConfig


class HalvingScheduler(RuleScheduler):
    """Carries out the verdicts of `rule`. A paused trial keeps its checkpoint and no process.

    concurrent: so many trials may run at a time. None: as many as Tune has room for.
    """

    rule: Halving
    # Here for searches that an older version began: Tune has pickled them without.
    concurrent: int | None = None

    def __init__(self, rule: Halving, metric: str) -> None:
        super().__init__()
        self.rule = rule
        self._metric = metric
        self._placed: set[str] = set()  # trials that paused and have not given their place back

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Restore the status of a trial that Tune adds after a kill."""
        if self.rule.is_paused(trial.trial_id):
            # Tune would start all trials of a restored search again. One without the checkpoint of
            # its last epoch has to: it reports it again, and pauses.
            if not lacks_last(trial):
                trial.set_status(Trial.PAUSED)
                if self.concurrent is not None:
                    self._placed.add(trial.trial_id)
        elif self.rule.is_ended(trial.trial_id):
            # Tune's record of a trial that was stopped while it was paused still says paused.
            trial.set_status(Trial.TERMINATED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        value = metric_of_result(result, self._metric)
        verdict = self.rule.report(trial.trial_id, int(result[EPOCH]), value)
        if verdict == "pause" and self.concurrent is None:
            _yield_place(tune_controller, trial, result)
        elif verdict == "pause":
            # Later: a trial that continues may take the place.
            self._placed.add(trial.trial_id)
        return DECISIONS[verdict]

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self.rule.forget(trial.trial_id)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """A paused trial that may continue, else a new one, else the last one to train in full."""
        trials = {trial.trial_id: trial for trial in tune_controller.get_trials()}
        # Tune may still be saving a trial that the rule calls paused. Then it is not in here.
        paused = {name for name, trial in trials.items() if trial.status == Trial.PAUSED}
        for name in paused.intersection(self.rule.hopeless()):
            tune_controller.stop_trial(trials[name])
        # Trials that continue come before new ones: they are the better ones.
        promotable = [name for name in self.rule.promotable() if name in trials]
        for name in promotable:
            if name in paused and self._has_room(trials):  # else Tune is still saving it
                self._resume(tune_controller, name)
                return trials[name]
        if self.concurrent is not None and not promotable:
            for name in sorted(paused & self._placed):
                self._placed.remove(name)
                _yield_place(tune_controller, trials[name], trials[name].last_result)
        for trial in trials.values():
            if trial.status == Trial.PENDING:
                return trial
        if all(trial.status == Trial.PAUSED or trial.is_finished() for trial in trials.values()):
            return self._last(tune_controller, trials, paused)
        return None

    def _has_room(self, trials: dict[str, Trial]) -> bool:
        """May one more trial run?"""
        active = [t for t in trials.values() if t.status in (Trial.PENDING, Trial.RUNNING)]
        return self.concurrent is None or len(active) < self.concurrent

    def _resume(self, tune_controller: Any, name: str, to_the_end: bool = False) -> None:
        """A paused trial continues."""
        self.rule.resume(name, to_the_end)
        if self.concurrent is not None:
            self._placed.discard(name)
            tune_controller.search_alg.searcher.on_unpause(name)

    def _last(
        self, tune_controller: Any, trials: dict[str, Trial], paused: set[str]
    ) -> Trial | None:
        """Nothing runs: if no trial is to come either, stop all but the one to train in full."""
        if not tune_controller.search_alg.is_finished():
            return None
        last = self.rule.last()
        for name in paused - {last}:
            tune_controller.stop_trial(trials[name])
        if last is None:
            return None
        self._resume(tune_controller, last, to_the_end=True)
        return trials[last]

    def debug_string(self) -> str:
        rule = self.rule
        return f"Halving: rungs {rule.rungs}, cap {rule.cap}"


class Median(MedianStoppingRule):  # type: ignore[misc]
    """Tune's rule. After a kill it knows what trials had reported before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._before: dict[str, list[dict[str, Any]]] = {}  # by Tune's id

    def state(self) -> dict[str, Any]:
        epoch, metric = self._time_attr, self._metric
        return {
            trial.trial_id: [
                {epoch: line[epoch], metric: line[metric]}
                for line in reported
                if epoch in line and metric in line
            ]
            for trial, reported in self._results.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the trials are added afterwards."""
        self._before = copy.deepcopy(state)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        super().on_trial_add(tune_controller, trial)
        if known := self._before.pop(trial.trial_id, None):
            self._results[trial] = known


class Remembers(Protocol):
    """A rule, or a scheduler, that can go on from a state."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Memory(tune.Callback):  # type: ignore[misc]
    """Saves and restores a rule's state with the search."""

    def __init__(self, rule: Remembers) -> None:
        self._rule = rule

    def get_state(self) -> dict[str, Any]:
        return self._rule.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rule.restore(state)


def _yield_place(tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
    """Tell the searcher that a paused trial is complete, with the value that it paused with."""
    tune_controller.search_alg.on_trial_complete(trial.trial_id, result=result)


def _halving(cfg: SearchConfig, train: TrainConfig, total: int, capped: bool) -> HalvingScheduler:
    rule = Halving(
        train.epochs,
        min(cfg.grace, train.epochs),
        cfg.reduction,
        train.stopping.mode,
        cfg.pauses,
        capped,
        total,
    )
    return HalvingScheduler(rule, train.stopping.metric)


def asha(cfg: SearchConfig, train: TrainConfig, total: int) -> TrialScheduler:
    return _halving(cfg, train, total, capped=False)


def pasha(cfg: SearchConfig, train: TrainConfig, total: int) -> TrialScheduler:
    return _halving(cfg, train, total, capped=True)


def hyperband(cfg: SearchConfig, train: TrainConfig, total: int) -> TrialScheduler:
    """Tune's HyperBand. It has brackets of its own and does not use `search.grace`."""
    return HyperBandScheduler(time_attr=EPOCH, max_t=train.epochs, reduction_factor=cfg.reduction)


def median(cfg: SearchConfig, train: TrainConfig, total: int) -> TrialScheduler:
    """Tune's rule: stop a trial whose best is below the median of the others' running means.

    Golovin et al. 2017, "Google Vizier".
    """
    return Median(time_attr=EPOCH, grace_period=min(cfg.grace, train.epochs))


SCHEDULERS: dict[str, Callable[[SearchConfig, TrainConfig, int], TrialScheduler | None]] = {
    "asha": asha,
    "pasha": pasha,
    "hyperband": hyperband,
    "median": median,
    "none": lambda cfg, train, total: None,
}


def scheduler(
    cfg: SearchConfig, train: TrainConfig, total: int, concurrent: int | None = None
) -> TrialScheduler | None:
    """The scheduler of a search of `total` trials; None: every trial runs to its end.

    concurrent: so many trials have room at a time.
    """
    chosen = SCHEDULERS[cfg.scheduler](cfg, train, total)
    # Tune itself counts the CPUs and GPUs of trials of one worker.
    is_bound = cfg.concurrent is not None or train.most_workers > 1
    if is_bound and isinstance(chosen, HalvingScheduler):
        chosen.concurrent = concurrent
    return chosen


def drawn_ahead(cfg: SearchConfig, total: int, concurrent: int) -> int:
    """How many trials the searcher may draw before the first one ends; `concurrent` can run."""
    return total if cfg.scheduler in ("hyperband", "freeze_thaw") else concurrent


def memory(chosen: TrialScheduler | None) -> list[tune.Callback]:
    """The callbacks that save a scheduler's state with the search."""
    if isinstance(chosen, HyperBandScheduler):
        return []  # its `state` is two numbers for people
    # Ours are behind Tune's interface; a population is Tune's scheduler itself.
    rule: Any = getattr(chosen, "rule", chosen)
    return [Memory(rule)] if hasattr(rule, "state") else []
