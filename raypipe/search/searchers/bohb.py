"""BOHB's choice of the next trial (Falkner et al. 2018, "BOHB: Robust and efficient hyperparameter optimization at scale").

Trials that a scheduler pauses or stops early come to no last value, and values after different epochs do not compare: a good
trial after one epoch is worse than a poor one after nine. So the estimator learns from one budget alone: the largest of the
rungs at which more trials have been than a density over the space's fields needs. A third of the trials are drawn at random, as
in the paper, so that a mistaken model cannot keep a search. The estimator is Optuna's multivariate TPE; any scheduler that
compares trials at rungs (asha, pasha) goes with it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from raypipe.search.schedulers.halving import rungs
from raypipe.search.searchers.optuna_search import Suggested, distribution, require
from raypipe.search.settings import SearchJob
from raypipe.search.space.space import Changes, Space, uniform
from raypipe.search.trials.epoch_result import EPOCH, metric_of_result
from raypipe.search.warm_start import Earlier

AT_RANDOM = 1 / 3


class Bohb(Suggested):
    """Suggestions from what trials were worth at one budget. Its state is with Tune's: it needs no journal."""

    def __init__(
        self,
        job: SearchJob,
        trials: list[Changes],
        space: Space,
        earlier: list[Earlier],
        folder: Path,
    ) -> None:
        super().__init__(job, trials, space, earlier, folder)
        self._least = len(self._samplers()) + 3
        self._drawn: dict[str, dict[str, Any]] = {}  # trial -> its values as Optuna knows them
        self._seen: dict[
            str, dict[str, float]
        ] = {  # epochs (a string: it travels as JSON) -> trial -> value
            str(epochs): {}
            for epochs in rungs(
                job.train.epochs, min(job.search.grace, job.train.epochs), job.search.reduction
            )
        }

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"drawn": self._drawn, "seen": self._seen}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._drawn, self._seen = state["drawn"], state["seen"]

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        super().on_trial_result(trial_id, result)
        rung, value = (
            self._seen.get(str(result.get(EPOCH))),
            metric_of_result(result, self._metric_name),
        )
        if rung is not None and trial_id in self._drawn and not math.isnan(value):
            rung[trial_id] = value

    def budget(self) -> int | None:
        """Epochs after which trials are compared to choose the next one; None as long as nowhere there are enough."""
        enough = (int(epochs) for epochs, seen in self._seen.items() if len(seen) >= self._least)
        return max(enough, default=None)

    def _study(self) -> Any:
        optuna, samplers = require(), self._samplers()
        study = optuna.create_study(direction="maximize" if self._better == "max" else "minimize")
        study.add_trials([self._hint(trial) for trial in self._earlier])
        for trial, value in self._seen.get(str(self.budget()), {}).items():
            codes = self._drawn[trial]
            how = {key: distribution(samplers[key]) for key in codes}
            study.add_trial(optuna.create_trial(params=codes, distributions=how, value=value))
        return study

    def _sampler(self, i: int, attempt: int) -> Any:
        seed = int(uniform(self._seed, i, attempt) * 2**32)
        if uniform(self._seed, i, "bohb") < AT_RANDOM:
            return require().samplers.RandomSampler(seed=seed)
        return self._parzen(seed, self._least)

    def _note(self, trial_id: str, asked: Any) -> None:
        self._drawn[trial_id] = dict(asked.params)

    def _tell(self, trial_id: str, value: float | None) -> None:
        """What the study is made of was heard epoch by epoch."""
