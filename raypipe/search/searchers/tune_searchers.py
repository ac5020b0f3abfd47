"""What the next trial tries, given to Ray Tune.

The trials of a random search or a grid are known before it starts: draw.py makes them of the seed. Tune asks for them one by
one, no more than run at a time. tpe, gp (bayes.py) and bohb draw from what earlier trials came to, and fall back on these.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.tune.search import ConcurrencyLimiter, Searcher

from raypipe.errors import ConfigError
from raypipe.search.settings import SearchJob
from raypipe.search.space.space import DATA, Changes, Space
from raypipe.search.trials.epoch_result import metric_of_result
from raypipe.search.warm_start import Earlier
from raypipe.train.stopping import improved


def plan(job: SearchJob, space: Space, earlier: list[Earlier]) -> list[Changes]:
    """Every trial of a random search. A grid is run whole `samples` times; the first one's start is the best earlier trial, or
    search.start.

    Raises ConfigError when the job refuses what the space draws.
    """
    cells, seed, total = space.cells, job.run.seed, job.search.samples * len(space.cells)
    trials = [space.trial(seed, i, cells[i % len(cells)]) for i in range(total)]
    start = earlier[0].keyed if earlier else space.keyed(job.search.start or {})
    if start:
        with suppress(ConfigError):  # the job may refuse what another's trial was
            trials[0] = space.trial(seed, 0, start | cells[0])
    return trials


def candidates(job: SearchJob, space: Space, trials: list[Changes]) -> list[Changes]:
    """Trials that between them need every array that one of the search may need."""
    return trials if job.search.searcher == "random" else [*trials, *space.variants(DATA)]


def searcher(
    job: SearchJob,
    space: Space,
    trials: list[Changes],
    earlier: list[Earlier],
    folder: Path,
    concurrent: int,
) -> Any:
    """Inside the limiter because Tune asks it how many trials may wait; Draws itself does the limiting."""
    if job.search.searcher == "random":
        return ConcurrencyLimiter(Draws(job, trials), concurrent)
    from raypipe.search.searchers.bohb import Bohb
    from raypipe.search.searchers.optuna_search import Suggested

    kind = Bohb if job.search.searcher == "bohb" else Suggested
    return ConcurrencyLimiter(kind(job, trials, space, earlier, folder), concurrent)


class Draws(Searcher):  # type: ignore[misc]
    """Hands out the planned trials in their order.

    Tune pickles it when the search starts and saves its state, as JSON, whenever it saves that of the trials.
    """

    def __init__(self, job: SearchJob, trials: list[Changes]) -> None:
        super().__init__()
        self._metric_name, self._better = job.train.stopping.metric, job.train.stopping.mode
        self._trials, self._concurrent = trials, 1
        self._next = 0
        self._live: list[str] = []
        self._best: dict[str, float] = {}  # of running trials, by their ids

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        self._concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> Any:
        if self._next >= len(self._trials):
            return Searcher.FINISHED
        if len(self._live) >= self._concurrent:
            return None
        changes = self._draw(self._next, trial_id)
        self._next += 1
        self._live.append(trial_id)
        return changes

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        value = metric_of_result(result, self._metric_name)
        if improved(value, self._best.get(trial_id), self._better):
            self._best[trial_id] = value

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Of a trial that failed, and of one that never gave a number, `_tell` hears None."""
        self.on_trial_result(trial_id, result or {})
        if trial_id in self._live:
            self._live.remove(trial_id)
        value = self._best.pop(trial_id, None)
        self._tell(trial_id, None if error else value)

    def get_state(self) -> dict[str, Any]:
        return {"next": self._next, "live": self._live, "best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next, self._live, self._best = state["next"], state["live"], state["best"]

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_text(json.dumps(self.get_state()))

    def restore(self, checkpoint_path: str) -> None:
        self.set_state(json.loads(Path(checkpoint_path).read_text()))

    def _draw(self, i: int, trial_id: str) -> Changes:
        return self._trials[i]

    def _tell(self, trial_id: str, value: float | None) -> None:
        """The best value of a trial that ended: nothing that draws at random could use."""
