"""Our default, and its first answer alone, within a time: methods of benchmarks/equal_time.py.

What our default is, `default_of` says, and nobody else: the preset that a user is told to type for
so many seconds. Whatever a preset becomes is measured.

The search and the refit are the product's own (`work/training.py`), in this process, on its own
clock (`search/ledger.py`). They end as `raypipe tune` ends them, with one difference. That command
also judges, packages and registers the model within its budget, and the peers do nothing of the
kind.
So `ours` is no user's default: it is the search of one, with the seconds that a user's registration
takes. Its job judges one image and makes no shifted copies (UNJUDGED), and nothing is kept for the
trials' runs in MLflow (Unregistered), which took 20 of 180 s. The clock still keeps about 8 s for
package and page, which are not used here: `ours` has these less than the peers.
`whole` is what a user has: it keeps time for all that `raypipe tune` does by default.

At 600 s `ours` refits on training and validation images at 224 px, as the preset says. Peers have
a model of training images alone, at 128 px at most if it was fine-tuned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as with_
from pathlib import Path
from typing import Any, get_args

from benchmarks.ledger import Line
from benchmarks.scored import NoModel, Winner
from raypipe.cli.console import Console
from raypipe.config import replace, validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.job import Job
from raypipe.search import feasible, first_answer, leaderboard, together, trial_files
from raypipe.search.budget import Ending, Speed
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.presets import Preset
from raypipe.search.result import SearchResult
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.standing import Standing
from raypipe.train.stopping import Mode, improved
from raypipe.work.training import search_and_refit

UNJUDGED = {"judged_images": 1, "severity_images": 0}  # of the section `registry`


def default_of(budget_s: float) -> dict[str, Any]:
    """`search` as docs/search.md tells a user to set it for so many seconds.

    It is the shortest preset that takes at least as long, cut to the budget: fast for 180 s, and
    `search.preset=good search.budget_s=600`. For more than an hour it is best.
    """
    takes_s: dict[str, float] = {}
    for name in get_args(Preset):
        takes_s[name] = validate(SearchConfig, {"preset": name}).budget_s or 0.0
    enough = [name for name, seconds in takes_s.items() if seconds >= budget_s]
    longest = max(takes_s, key=takes_s.__getitem__)
    preset = min(enough, key=takes_s.__getitem__) if enough else longest
    return {"preset": preset, "budget_s": budget_s}


def settings(asked: Line) -> dict[str, Any]:
    """The sections of the job that this method sets."""
    found: dict[str, Any] = {"search": default_of(asked["budget_s"])}
    if asked["method"] == "ours":
        found["registry"] = UNJUDGED
    return found


class Unregistered(Ledger):
    """The clock of a search whose trials get no runs in MLflow: nothing is kept for them."""

    def ending(
        self, trials: int, speed: Speed | None, refit: bool = False, fewest: bool = False
    ) -> Ending:
        return super().ending(0, speed, refit, fewest)


def search(asked: Line, job: Job) -> tuple[Line, Winner, Pinned]:
    """What the method found within the budget, and the rows it was found on.

    The clock starts here: pinning, reading, features, trials, ensemble and refit count. Raises
    NoModel.
    """
    began = time.monotonic()
    rows = pin(job.table, job.feed, kind=job.model.task)
    curve = Curve(job.train.stopping.mode, began, asked["budget_s"])
    try:
        if asked["method"] == "first":
            told, winner = _first(job, rows, curve, Path(asked["folder"]))
        else:
            clock = Unregistered if asked["method"] == "ours" else Ledger
            told, winner = _ours(job, rows, curve, clock(job.search.budget_s, began))
    except TooShort as e:
        raise NoModel(str(e)) from e
    return curve.told() | told, winner, rows


def _ours(job: Job, rows: Pinned, curve: Curve, ledger: Ledger) -> tuple[Line, Winner]:
    found = search_and_refit(job, _Watched(curve), rows, ledger=ledger)
    told = {
        "model_s": curve.now(),
        "model": kind_of(found),
        "preset": job.search.preset,
        "trials": sum(trial.drawn for trial in found.trials),
        "epochs": found.epochs,
        "budget": ledger.summary(),
    }
    return told, Winner(found.plan.job, found.best)


def kind_of(found: SearchResult) -> str:
    """What the registered model is."""
    made_of = ", ".join(found.members) or found.trials[0].name
    if found.shares:
        made_of = f"ensemble of {made_of}"
    elif found.members:
        made_of = f"soup of {made_of}"
    return f"refit of {made_of}" if found.refitted else made_of


def _first(job: Job, rows: Pinned, curve: Curve, folder: Path) -> tuple[Line, Winner]:
    """The first answer in its own time, but not more than the budget; then its ensemble if the
    preset has one, else its best head.
    """
    training, cfg = feasible.one_worker(job.training), job.search
    rule, place = training.train.stopping, folder / "first"
    seconds = min(first_answer.SECONDS, curve.budget_s)

    def told(trial: Trial) -> None:
        curve.note(trial.metric)

    heads = first_answer.make(training, rows, place, seconds, told)
    ranked = leaderboard.ranked(heads.trials, rule.metric, rule.mode)
    if not ranked or ranked[0].checkpoint is None:
        raise NoModel(f"There is no first answer within {seconds:g} s")
    best, ensemble = ranked[0], None
    if cfg.ensemble > 1:
        joining = together.candidates(training, ranked, cfg, None)
        ensemble = together.make(joining, cfg, rows, heads.data, place)
    if ensemble is not None:
        best = next(trial for trial in ranked if trial.name == ensemble.members[0])
    result = trial_files.training_result("first", rows.version, rows.classes, best)
    name = best.name
    if ensemble is not None:
        result = with_(result, metrics=ensemble.metrics, checkpoint=ensemble.checkpoint)
        name = f"ensemble of {', '.join(ensemble.members)}"
    told_of = {"model_s": curve.now(), "model": name, "preset": cfg.preset, "heads": len(ranked)}
    return told_of, Winner(replace(training, best.changes), result)


class Curve:
    """The best single model's validation metric over time.

    An ensemble is not on it: its members were chosen on the same images. What came after the budget
    is not, either.
    """

    def __init__(self, mode: Mode, began: float, budget_s: float) -> None:
        """began: of `time.monotonic`."""
        self.began, self.budget_s = began, budget_s
        self._mode = mode
        self._points: list[tuple[float, float]] = []

    def now(self) -> float:
        """Seconds since it began."""
        return round(time.monotonic() - self.began, 1)

    def note(self, value: float) -> None:
        known = self._points[-1][1] if self._points else None
        if self.now() <= self.budget_s and improved(value, known, self._mode):
            self._points.append((self.now(), value))

    def told(self) -> Line:
        if not self._points:
            raise NoModel(f"No model was there within {self.budget_s:g} s")
        return {"val": self._points[-1][1], "curve": self._points}


class _Watched(Console):
    """A console of the cell's log, which notes the best trial so far."""

    def __init__(self, curve: Curve) -> None:
        super().__init__(as_json=True, began=curve.began)
        self._curve = curve

    @contextmanager
    def searching(self, metric: str) -> Iterator[Any]:
        def told(done: int, total: int, standings: Sequence[Standing]) -> None:
            if standings:
                self._curve.note(standings[0].best)

        yield told
