"""Weights of the best trials, averaged where validation says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.config import replace
from raypipe.config import validate as validate_job
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.search import page, several, soup, together, tuner
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger
from raypipe.search.trials.trial import data_key
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.trainer import assemble, prepare
from raypipe.train.worker import validate
from tests.searching import search


def trial(folder: Path, name: str, weight: float) -> Trial:
    weights = {"w": Piece.whole(torch.full((2,), weight)), "steps": Piece.whole(torch.tensor([7]))}
    at = checkpoint.write(folder / name, Snapshot(weights), LoopState(epoch=1, history=[{}]))
    return Trial(name, {}, 0.0, 1, False, (), str(at))


def loss(weights: Mapping[str, Tensor]) -> dict[str, float]:
    return {"val_loss": float((weights["w"] - 1.0).abs().sum())}


def test_a_trial_joins_where_the_mean_is_as_good(tmp_path: Path) -> None:
    """Best at 1: of 0.8, 1.4 and 9 the mean of the first two is nearer than either; one that failed
    has no weights.
    """
    failed = Trial("failed", {}, float("nan"), 0, False, (), None)
    trials = [
        trial(tmp_path, name, w) for name, w in (("a", 0.8), ("b", 1.4), ("c", 9.0), ("d", 0.8))
    ]
    found = soup.make([*trials, failed], loss, "val_loss", "min", tmp_path)
    assert found is not None and found.members == ("a", "b", "d")
    assert found == soup.read(tmp_path) and checkpoint.verify(Path(found.checkpoint)) is None
    weights = checkpoint.read(Path(found.checkpoint)).weights
    assert torch.allclose(weights["w"], torch.full((2,), (0.8 + 1.4 + 0.8) / 3)) and weights[
        "steps"
    ].tolist() == [7]
    assert found.metrics == loss(weights)
    assert checkpoint.averaged(Path(found.checkpoint)) == 3, "the card says so"
    assert checkpoint.averaged(Path(str(trials[0].checkpoint))) == 1


def test_a_soup_in_a_folder_that_moved_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    trials = [trial(folder, name, w) for name, w in (("a", 0.8), ("b", 1.4))]
    assert soup.make(trials, loss, "val_loss", "min", folder)
    found = soup.read(folder.rename(tmp_path / "new"))
    assert found is not None and checkpoint.verify(Path(found.checkpoint)) is None


def test_a_soup_of_a_killed_run_is_forgotten(tmp_path: Path) -> None:
    trials = [trial(tmp_path, name, w) for name, w in (("a", 0.8), ("b", 1.4))]
    soup.forget(tmp_path)
    assert soup.make(trials, loss, "val_loss", "min", tmp_path)
    soup.forget(tmp_path)
    assert soup.read(tmp_path) is None
    # An ensemble's, too.
    (tmp_path / together.FILE).write_text("{}")
    together.forget(tmp_path)
    together.forget(tmp_path)
    assert together.read(tmp_path) is None


def test_the_best_alone_is_no_soup(tmp_path: Path) -> None:
    trials = [trial(tmp_path, name, w) for name, w in (("a", 1.1), ("b", 9.0))]
    assert (
        soup.make(trials, loss, "val_loss", "min", tmp_path) is None and soup.read(tmp_path) is None
    )


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("is_better", [True, False])
def test_a_search_registers_the_mean_when_it_is_better(
    is_better: bool,
    searches: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the same start at nearly the same rate: close enough to be averaged.

    Which of both is better is close, too. So the other one is judged ten worse than it is.
    """
    judged: list[dict[str, float]] = []

    def judge(*given: Any) -> dict[str, float]:
        metrics = validate(*given)
        judged.append(metrics)
        # The best trial alone is judged first.
        is_mean = len(judged) == 2
        return metrics if is_mean == is_better else metrics | {"val_loss": metrics["val_loss"] + 10}

    monkeypatch.setattr(several, "validate", judge)
    space = {"train.lr": "grid(0.01, 0.0101, 1e-6)", "model.side_px": "choice(32)"}
    job = searches(
        tmp_path,
        **{
            "search.samples": 1,
            "search.scheduler": "none",
            "search.soup": 2,
            "search.space": space,
        },
    )
    found = search(job)
    best, other, *_ = found.trials
    assert len(judged) == 2
    assert found.members == ((best.name, other.name) if is_better else ())
    assert (found.best.checkpoint != best.checkpoint) == is_better
    # Whoever asked for a mean is told that it was tried.
    none = (
        "No soup: no mean of those that were tried was better on validation than the best one alone"
    )
    assert found.notes == (() if is_better else (none,))
    registered = judged[1 if is_better else 0]["val_loss"]
    assert found.best.metrics["val_loss"] == pytest.approx(registered, rel=1e-4)
    data = prepare(found.job, pin(job.table, job.feed))
    again = validate(found.job, data, assemble(found.job, found.best).state_dict())
    assert again["val_loss"] == pytest.approx(found.best.metrics["val_loss"], rel=1e-4)
    assert search(job).best == found.best


@pytest.mark.usefixtures("ray_session")
def test_a_soup_is_within_the_budget(
    searches: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean may take minutes to judge: validation is predicted for each."""

    class Late(Ledger):
        """Its trials take nearly all of the time."""

        def left_now_s(self) -> float | None:
            return 0.5 if self.phase("trials").spent_s else super().left_now_s()

    job = searches(tmp_path, **{"search.soup": 2, "search.budget_s": 120})
    ledger = Late(120)
    monkeypatch.setattr(several, "validate", lambda *given: time.sleep(60))
    found = tuner.search(job.training, job.search, ledger=ledger)
    assert found.members == () and ledger.notes == ["No soup: there was no time to judge one"]
    # A rerun, as after a kill while the model was registered, said nothing; nor did the page.
    again = Ledger(120)
    found = tuner.search(job.training, job.search, ledger=again)
    assert again.notes == ledger.notes
    facts: Any = page._facts(found, "photos/1", {}, None, again.notes)  # type: ignore[arg-type]
    assert dict(facts)["Not made"] == "Soup: there was no time to judge one"


def test_heads_of_another_kind_are_not_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights have other shapes: the finished search failed there, at each rerun."""
    settings = {"model.mode": "frozen", "train.solver": "closed", "search.soup": 3}
    job = replace(validate_job(Job, {"table": {"uri": "unused"}}), settings)
    kinds = {"best": {"model.head": "kernel"}, "line": {"model.head": "linear"}}
    kinds |= {"small": {"model.head": "kernel", "model.landmarks": 9}, "twin": kinds["best"]}
    trials = [
        Trial(name, changes, 0.0, 1, False, (), "somewhere", kept=True)
        for name, changes in kinds.items()
    ]
    taken: list[str] = []
    monkeypatch.setattr(soup, "make", lambda alike, *more: taken.extend(t.name for t in alike))
    best = replace(job.training, trials[0].changes)
    rows: Any = SimpleNamespace(counts={"val": 9})
    data: Any = {data_key(best): None}
    several.soup_of_best(job.training, 3, trials, rows, data, tmp_path, Ledger(None))
    assert taken == ["best", "twin"]


def test_a_mean_that_is_no_better_is_no_soup(tmp_path: Path) -> None:
    """Of a handful of images a mean had as many right with a larger loss, and was registered."""

    def judged(weights: Mapping[str, Tensor]) -> dict[str, float]:
        return {"val_accuracy": 0.9, **loss(weights)}

    worse = [trial(tmp_path, name, weight) for name, weight in (("a", 1.1), ("b", 1.5))]
    assert soup.make(worse, judged, "val_accuracy", "max", tmp_path) is None
    same = [trial(tmp_path, name, 1.1) for name in ("c", "d")]
    assert soup.make(same, judged, "val_accuracy", "max", tmp_path) is None
    better = [trial(tmp_path, name, weight) for name, weight in (("e", 1.1), ("f", 0.9))]
    found = soup.make(better, judged, "val_accuracy", "max", tmp_path)
    assert found is not None and found.members == ("e", "f")
