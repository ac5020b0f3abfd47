"""Which trials go on, and for how long: names -> Tune schedulers.

`asha` and `pasha` are our own rules (halving.py) behind Tune's interface: what benchmarks/halving.py proves on tables is what a
search runs. `hyperband` and `median` are Tune's. A scheduler that pauses trials has two things to mind:

- Tune's searchers count paused trials as running. Without a word to them, as many paused trials as may run at a time end a
  search in silence, so a trial that pauses gives its place back (`_yield_place`). Tune's HyperBand halves whatever its bracket
  holds when all of that wait: two at a time, nobody would ever be stopped. So it gets all trials at the start (`drawn_ahead`),
  and a searcher that learns from results has none to learn from.
- A trial whose epoch was unusable has lost its weights (told.py): halving stops it, Tune's own rules rank it last.
- Tune restores a search without its scheduler's memory: the first trials after a kill would be compared with none. `memory` is
  a callback that Tune saves and restores; paused trials stay paused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raypipe.search.schedulers.halving import Halving, Verdict
from raypipe.search.settings import SearchJob
from raypipe.search.trials.epoch_result import EPOCH, metric_of_result

_DECISIONS: dict[Verdict, str] = {
    "go on": TrialScheduler.CONTINUE,
    "pause": TrialScheduler.PAUSE,
    "stop": TrialScheduler.STOP,
}


class HalvingScheduler(FIFOScheduler):
    """Carries out what `rule` says. A paused trial keeps its checkpoint and no actor."""

    def __init__(self, rule: Halving, metric: str) -> None:
        super().__init__()
        self.rule, self._metric = rule, metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return True  # it knows both

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if self.rule.is_paused(
            trial.trial_id
        ):  # Tune would start all trials of a restored search again
            trial.set_status(Trial.PAUSED)
        elif self.rule.is_ended(
            trial.trial_id
        ):  # its record of a trial that was stopped while it waited still says waiting
            trial.set_status(Trial.TERMINATED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        verdict = self.rule.report(
            trial.trial_id, int(result[EPOCH]), metric_of_result(result, self._metric)
        )
        if verdict == "pause":
            _yield_place(tune_controller, trial, result)
        return _DECISIONS[verdict]

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self.rule.end(trial.trial_id)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self.rule.end(trial.trial_id)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self.rule.forget(trial.trial_id)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """A paused trial that may go on, else a new one, else (nothing runs, none is to come) the one to train in full."""
        trials = {trial.trial_id: trial for trial in tune_controller.get_trials()}
        paused = {name for name, trial in trials.items() if trial.status == Trial.PAUSED}
        for name in paused.intersection(self.rule.hopeless()):
            tune_controller.stop_trial(trials[name])
        for name in self.rule.promotable():
            if name in paused:  # Tune may still be saving it
                self.rule.resume(name)
                return trials[name]
        if any(trial.status == Trial.PENDING for trial in trials.values()):
            return next(trial for trial in trials.values() if trial.status == Trial.PENDING)
        if all(trial.status == Trial.PAUSED or trial.is_finished() for trial in trials.values()):
            return self._end(tune_controller, trials, paused)
        return None

    def _end(
        self, tune_controller: Any, trials: dict[str, Trial], paused: set[str]
    ) -> Trial | None:
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
        return f"Halving: rungs {self.rule.rungs}, cap {self.rule.cap}"


class Memory(tune.Callback):  # type: ignore[misc]
    """What a rule has seen, saved and restored with the search."""

    def __init__(self, rule: Halving) -> None:
        self._rule = rule

    def get_state(self) -> dict[str, Any]:
        return self._rule.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rule.restore(state)


def _yield_place(tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
    """To the searcher the trial is complete, with the value that it paused with."""
    tune_controller.search_alg.on_trial_complete(trial.trial_id, result=result)


def _halving(job: SearchJob, total: int, capped: bool) -> HalvingScheduler:
    cfg, train = job.search, job.train
    grace = min(cfg.grace, train.epochs)
    rule = Halving(
        train.epochs, grace, cfg.reduction, train.stopping.mode, cfg.pauses, capped, total
    )
    return HalvingScheduler(rule, train.stopping.metric)


def asha(job: SearchJob, total: int) -> TrialScheduler:
    return _halving(job, total, capped=False)


def pasha(job: SearchJob, total: int) -> TrialScheduler:
    return _halving(job, total, capped=True)


def hyperband(job: SearchJob, total: int) -> TrialScheduler:
    """Brackets of its own: `search.grace` says nothing to it."""
    return HyperBandScheduler(
        time_attr=EPOCH, max_t=job.train.epochs, reduction_factor=job.search.reduction
    )


def median(job: SearchJob, total: int) -> TrialScheduler:
    """Stops a trial whose best is below the median of the others' running means (Golovin et al. 2017, "Google Vizier")."""
    return MedianStoppingRule(time_attr=EPOCH, grace_period=min(job.search.grace, job.train.epochs))


SCHEDULERS: dict[str, Callable[[SearchJob, int], TrialScheduler | None]] = {
    "asha": asha,
    "pasha": pasha,
    "hyperband": hyperband,
    "median": median,
    "none": lambda job, total: None,
}


def scheduler(job: SearchJob, total: int) -> TrialScheduler | None:
    """Of a search of `total` trials."""
    return SCHEDULERS[job.search.scheduler](job, total)


def drawn_ahead(job: SearchJob, total: int, at_once: int) -> int:
    """How many trials the searcher may draw before the first of them ends; `at_once` can run."""
    return total if job.search.scheduler == "hyperband" else at_once


def memory(chosen: TrialScheduler | None) -> list[tune.Callback]:
    """The callbacks that a search needs for its scheduler to remember."""
    return [Memory(chosen.rule)] if isinstance(chosen, HalvingScheduler) else []
