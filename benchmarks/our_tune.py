"""Our default, and its first answer alone, within a time: methods of benchmarks/equal_time.py.

What our default is, `default_of` says, and nobody else: the preset that a user is told to type for
so many seconds. Whatever a preset becomes is measured.

The search and the refit are the product's own (`work/verbs.py`), in this process, on its own clock
(`search/ledger.py`). They end as `raypipe tune` ends them, with one difference. `raypipe tune` also
judges, packages and registers the model within its budget, and the peers do nothing of the kind.
So `ours` is asked for the least of it (UNJUDGED): the clock keeps seconds for package and page only
(about 8 s, and .07 s a trial), which are not used here. `ours` has these less than the peers.
`whole` keeps time for all that `raypipe tune` does by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as with_
from pathlib import Path
from typing import Any, get_args

from benchmarks.ledger import Line
from raypipe.cli.console import Console
from raypipe.config import replace, validate
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import Pinned, pin
from raypipe.job import Job
from raypipe.search import first_answer, leaderboard, together, tuner
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.ledger import Ledger
from raypipe.search.presets import Preset
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.standing import Standing
from raypipe.train import unseen
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.stopping import Mode, improved
from raypipe.train.trainer import Plan, prepare
from raypipe.train.worker import Prepared
from raypipe.work.verbs import search_and_refit

UNJUDGED = {"judged_images": 1, "severity_images": 0}  # of the section `registry`
Found = tuple[Line, Callable[[], float]]


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


def search(asked: Line, job: Job) -> Found:
    """What the method found within the budget, and a function that scores the model on test.

    The clock starts here: pinning, reading, features, trials, ensemble and refit count.
    """
    began = time.monotonic()
    rows = pin(job.table, job.feed, kind=job.model.task)
    curve = Curve(job.train.stopping.mode, began, asked["budget_s"])
    run = _first if asked["method"] == "first" else _ours
    told, plan, result = run(job, rows, curve, Path(asked["folder"]))
    metric = job.train.stopping.metric
    return curve.told() | told, lambda: tested(plan, result, metric)


def _ours(job: Job, rows: Pinned, curve: Curve, folder: Path) -> tuple[Line, Plan, TrainResult]:
    ledger = Ledger(job.search.budget_s, curve.began)
    found = search_and_refit(job, _Watched(curve), rows, ledger=ledger)
    told = {
        "model_s": curve.now(),
        "model": kind_of(found),
        "preset": job.search.preset,
        "trials": sum(trial.drawn for trial in found.trials),
        "epochs": found.epochs,
        "budget": ledger.summary(),
    }
    return told, found.plan, found.best


def kind_of(found: SearchResult) -> str:
    """What the registered model is."""
    made_of = ", ".join(found.members) or found.trials[0].name
    if found.shares:
        made_of = f"ensemble of {made_of}"
    elif found.members:
        made_of = f"soup of {made_of}"
    return f"refit of {made_of}" if found.refitted else made_of


def _first(job: Job, rows: Pinned, curve: Curve, folder: Path) -> tuple[Line, Plan, TrainResult]:
    """The first answer in its own time, but not more than the budget; then its ensemble if the
    preset has one, else its best head.
    """
    training, cfg = tuner.one_worker(job.training), job.search
    rule, place = training.train.stopping, folder / "first"
    seconds = min(first_answer.SECONDS, curve.budget_s)

    def told(trial: Trial) -> None:
        curve.note(trial.metric)

    heads = first_answer.make(training, rows, place, seconds, told)
    ranked = leaderboard.ranked(heads.trials, rule.metric, rule.mode)
    if not ranked or ranked[0].checkpoint is None:
        raise RaypipeError("There is no first answer", got=f"{seconds:g} s")
    best, ensemble = ranked[0], None
    if cfg.ensemble > 1:
        joining = together.candidates(training, ranked, cfg, None)
        ensemble = together.make(joining, cfg, rows, heads.data, place)
    if ensemble is not None:
        best = next(trial for trial in ranked if trial.name == ensemble.members[0])
    result = leaderboard.training_result("first", rows.version, rows.classes, best)
    name = best.name
    if ensemble is not None:
        result = with_(result, metrics=ensemble.metrics, checkpoint=ensemble.checkpoint)
        name = f"ensemble of {', '.join(ensemble.members)}"
    told_of = {"model_s": curve.now(), "model": name, "preset": cfg.preset, "heads": len(ranked)}
    return told_of, _plan(replace(training, best.changes), rows, place), result


def _plan(job: TrainJob, rows: Pinned, folder: Path) -> Plan:
    return Plan(job, rows, "first", folder, Prepared(lambda: prepare(job, rows)))


def tested(plan: Plan, result: TrainResult, metric: str) -> float:
    """The score on all images of the test split, predicted as the package predicts them."""
    job = replace(plan.job, {"registry.judged_images": None})
    return unseen.test(with_(plan, job=job), result)[metric.replace("val_", "test_")]


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
            raise RaypipeError("No model was there within the budget", got=f"{self.budget_s:g} s")
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
