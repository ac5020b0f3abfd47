"""Which trials continue, and for how long: names -> Ray Tune's schedulers.

`asha` and `pasha` are our own rules (halving.py) behind Tune's interface, so a search runs the same
code that benchmarks/halving.py measures on tables. So is `freeze_thaw` (thaw_scheduler.py), which
needs the space too. `hyperband` and `median` are Tune's.

A scheduler that pauses trials has four problems with Tune:

1. Tune's searchers count paused trials as running. When as many trials are paused as may run at a
   time, the search would end without a message. So a trial that pauses gives its place back
   (`_yield_place`).
2. Tune's HyperBand halves its bracket when all trials of it wait. If it knew two trials at a time,
   none would ever be stopped. So it gets all trials at the start (`drawn_ahead`), and a searcher
   that learns from results has none to learn from.
3. A trial with an unusable epoch has lost its weights (epoch_result.py). Halving stops it, and
   Tune's own rules rank it last.
4. Tune restores a search without its scheduler's state: the first trials after a kill would be
   compared with none. `Memory` is a callback that Tune saves and restores. Paused trials stay
   paused.
"""

from __future__ import annotations

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
    """Carries out the verdicts of `rule`. A paused trial keeps its checkpoint and no process."""

    rule: Halving

    def __init__(self, rule: Halving, metric: str) -> None:
        super().__init__()
        self.rule = rule
        self._metric = metric

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Restore the status of a trial that Tune adds after a kill."""
        if self.rule.is_paused(trial.trial_id):
            # Tune would start all trials of a restored search again. One without the checkpoint of
            # its last epoch has to: it reports it again, and pauses.
            if not lacks_last(trial):
                trial.set_status(Trial.PAUSED)
        elif self.rule.is_ended(trial.trial_id):
            # Tune's record of a trial that was stopped while it was paused still says paused.
            trial.set_status(Trial.TERMINATED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        value = metric_of_result(result, self._metric)
        verdict = self.rule.report(trial.trial_id, int(result[EPOCH]), value)
        if verdict == "pause":
            _yield_place(tune_controller, trial, result)
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
        for name in self.rule.promotable():
            if name in paused:  # else Tune is still saving it
                self.rule.resume(name)
                return trials[name]
        for trial in trials.values():
            if trial.status == Trial.PENDING:
                return trial
        if all(trial.status == Trial.PAUSED or trial.is_finished() for trial in trials.values()):
            return self._last(tune_controller, trials, paused)
        return None

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
        self.rule.resume(last, to_the_end=True)
        return trials[last]

    def debug_string(self) -> str:
        rule = self.rule
        return f"Halving: rungs {rule.rungs}, cap {rule.cap}"


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
    grace = min(cfg.grace, train.epochs)
    return MedianStoppingRule(time_attr=EPOCH, grace_period=grace)


SCHEDULERS: dict[str, Callable[[SearchConfig, TrainConfig, int], TrialScheduler | None]] = {
    "asha": asha,
    "pasha": pasha,
    "hyperband": hyperband,
    "median": median,
    "none": lambda cfg, train, total: None,
}


def scheduler(cfg: SearchConfig, train: TrainConfig, total: int) -> TrialScheduler | None:
    """The scheduler of a search of `total` trials; None: every trial runs to its end."""
    make = SCHEDULERS[cfg.scheduler]
    return make(cfg, train, total)


def drawn_ahead(cfg: SearchConfig, total: int, concurrent: int) -> int:
    """How many trials the searcher may draw before the first one ends; `concurrent` can run."""
    return total if cfg.scheduler in ("hyperband", "freeze_thaw") else concurrent


def memory(chosen: TrialScheduler | None) -> list[tune.Callback]:
    """The callbacks that save a scheduler's state with the search."""
    # Ours are behind Tune's interface; a population is Tune's scheduler itself.
    rule: Any = getattr(chosen, "rule", chosen)
    return [Memory(rule)] if hasattr(rule, "state") else []
