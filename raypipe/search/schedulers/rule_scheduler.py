"""What our schedulers under Ray Tune share.

A rule that knows no Tune decides, and they carry it out.
"""

from __future__ import annotations

from typing import Any, Protocol

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from raypipe.search.schedulers.halving import Verdict

DECISIONS: dict[Verdict, str] = {
    "go on": TrialScheduler.CONTINUE,
    "pause": TrialScheduler.PAUSE,
    "stop": TrialScheduler.STOP,
}


class Rule(Protocol):
    """A pure rule, as Halving and FreezeThaw are."""

    def end(self, trial: str) -> None:
        """The trial never continues."""


class RuleScheduler(FIFOScheduler):
    """Tells `rule` which trials ended. A paused trial keeps its checkpoint and no process."""

    rule: Rule

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Tune would pass metric and mode here; the constructor has them already."""
        return True

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self.rule.end(trial.trial_id)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self.rule.end(trial.trial_id)
