"""BOHB's choice of the next trial.

Falkner et al. 2018, "BOHB: Robust and efficient hyperparameter optimization at scale". A scheduler
pauses or stops trials early. Such trials have no last value, and values after different epochs do
not compare: a good trial after one epoch is worse than a poor one after nine. So the estimator
learns from one budget alone, a number of epochs:

1. Budgets are the rungs at which the scheduler compares trials (asha, pasha).
2. The largest budget with enough trials is taken. A density over the space's fields needs more
   trials than it has fields.
3. A third of the trials are drawn at random, as in the paper, so that a wrong model cannot keep the
   search in one place.

The estimator is Optuna's multivariate TPE.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from raypipe.search.schedulers.halving import rungs
from raypipe.search.searchers.optuna_search import Suggested, require
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Changes, Space, uniform
from raypipe.search.trials.epoch_result import EPOCH, metric_of_result
from raypipe.search.warm_start import Earlier
from raypipe.train.job import TrainJob

AT_RANDOM = 1 / 3  # share of the trials that are drawn at random


class Bohb(Suggested):
    """Suggestions from the trials' values at one budget.

    Its state is saved with Tune's and a study is made for each ask, so it needs no journal.
    """

    def __init__(
        self,
        job: TrainJob,
        cfg: SearchConfig,
        trials: list[Changes],
        space: Space,
        earlier: list[Earlier],
        folder: Path,
        starts: int = 0,
    ) -> None:
        super().__init__(job, cfg, trials, space, earlier, folder, starts)
        epochs = space.most_epochs
        budgets = rungs(epochs, min(cfg.grace, epochs), cfg.reduction)
        self._least = len(self._samplers()) + 3  # trials that a model needs
        self._drawn: dict[str, dict[str, Any]] = {}  # trial -> its codes
        # Budget -> trial -> value. The budget is a string because the state is saved as JSON.
        self._seen: dict[str, dict[str, float]] = {str(budget): {} for budget in budgets}

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"drawn": self._drawn, "seen": self._seen}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._drawn = state["drawn"]
        self._seen = state["seen"]

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        super().on_trial_result(trial_id, result)
        # Only epochs at a rung count, and only trials of this search.
        budget = str(result.get(EPOCH))
        value = metric_of_result(result, self._metric_name)
        if budget not in self._seen or trial_id not in self._drawn or math.isnan(value):
            return
        self._seen[budget][trial_id] = value

    def budget(self) -> int | None:
        """Epochs after which trials are compared; None while no budget has enough trials."""
        enough = []
        for budget, values in self._seen.items():
            if len(values) >= self._least:
                enough.append(int(budget))
        return max(enough, default=None)

    def _study(self) -> Any:
        """A new study, with the values at the present budget."""
        direction = "maximize" if self._better == "max" else "minimize"
        study = require().create_study(direction=direction)
        # Trials of earlier searches count at every budget.
        study.add_trials([self._hint(trial) for trial in self._earlier])
        values = self._seen.get(str(self.budget()), {})
        for trial, value in values.items():
            study.add_trial(self._optuna_trial(self._drawn[trial], value))
        return study

    def _sampler(self, i: int, attempt: int) -> Any:
        seed = int(uniform(self._seed, i, attempt) * 2**32)
        if uniform(self._seed, i, "bohb") < AT_RANDOM:
            return require().samplers.RandomSampler(seed=seed)
        return self._parzen(seed, self._least)

    def _record(self, trial_id: str, drawn: dict[str, Any]) -> None:
        self._drawn[trial_id] = drawn["codes"]

    def _learn(self, trial_id: str, value: float | None) -> None:
        """Nothing: `on_trial_result` records every epoch."""
