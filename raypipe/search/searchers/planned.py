"""Tune's searcher for trials that are known before the search starts: a grid or a random search.

Tune asks for them one by one, and never has more of them than may run at a time.

Where all trials begin together and train by the clock, nobody follows one that ends well. One that
failed or diverged leaves its CPU before the time is over: the next of the spare trials takes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from raypipe.search.space.space import Changes
from raypipe.search.trials.epoch_result import UNUSABLE, metric_of_result
from raypipe.train.job import TrainJob
from raypipe.train.stopping import improved


class Planned(Searcher):  # type: ignore[misc]
    """Returns the planned trials in their order.

    Tune pickles it when the search starts. Whenever Tune saves the trials' state, it saves the
    searcher's too, as JSON.
    """

    # Here for searches that an older version began: Tune has pickled them without.
    _spare = 0
    _lost = 0  # trials that failed or diverged
    _result = "best"  # which epoch trials offer that do not draw train.result

    def __init__(self, job: TrainJob, trials: list[Changes], spare: int = 0) -> None:
        """spare: so many of the last trials begin only for one that failed or diverged each."""
        super().__init__()
        self._spare = spare
        rule = job.train.stopping
        self._metric_name = rule.metric
        self._better = rule.mode
        self._result = job.train.result
        self._trials = trials
        self._concurrent = 1
        self._next = 0  # the number of the next trial
        self._live: list[str] = []  # ids of the trials that run or wait
        self._best: dict[str, float] = {}  # id -> metric of what it offers, of live trials

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        self._concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> Any:
        """The next trial's values; None: not now; FINISHED: there is none left."""
        begin = len(self._trials) - max(0, self._spare - self._lost)
        if self._next >= begin:
            # Once the search is finished, Tune gives a paused trial's process to no other trial.
            return None if self._live else Searcher.FINISHED
        if len(self._live) >= self._concurrent:
            return None
        changes = self._draw(self._next, trial_id)
        self._next += 1
        self._live.append(trial_id)
        return changes

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        value = metric_of_result(result, self._metric_name)
        # Tune has flattened the result. A last epoch replaces what was better before it.
        offers = result.get("config/train.result", self._result)
        before = None if offers == "last" else self._best.get(trial_id)
        if improved(value, before, self._better):
            self._best[trial_id] = value

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """The trial ended, or it paused and gives its place to another one."""
        self.on_trial_result(trial_id, result or {})
        if error or (result or {}).get(UNUSABLE):
            self._lost += 1
        if trial_id in self._live:
            self._live.remove(trial_id)
        value = self._best.pop(trial_id, None)
        self._learn(trial_id, None if error else value)

    def on_unpause(self, trial_id: str) -> None:
        """A trial that had given its place back continues: it has one again."""
        if trial_id not in self._live:
            self._live.append(trial_id)

    def get_state(self) -> dict[str, Any]:
        state = {"next": self._next, "live": self._live, "best": self._best}
        return state | ({"lost": self._lost} if self._spare else {})

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._live = state["live"]
        self._best = state["best"]
        self._lost = state.get("lost", 0)

    def save(self, checkpoint_path: str) -> None:
        state = json.dumps(self.get_state())
        Path(checkpoint_path).write_text(state)

    def restore(self, checkpoint_path: str) -> None:
        text = Path(checkpoint_path).read_text()
        self.set_state(json.loads(text))

    def _draw(self, i: int, trial_id: str) -> Changes:
        """The values of trial i."""
        return self._trials[i]

    def _learn(self, trial_id: str, value: float | None) -> None:
        """Use the value that a trial ended with, of the epoch that it offers; None if it failed or
        never had a number.

        A random search learns nothing from it.
        """
