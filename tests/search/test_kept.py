"""`search.keep`: the best trials keep their checkpoints, and nothing else depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.search import kept, together, trial_files
from raypipe.search.leaderboard import Trial
from raypipe.search.result import SearchResult
from raypipe.search.trials import trial_checkpoints
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from tests.searching import search

Searches = Callable[..., Job]
RATES = "grid(1e-2, 1e-6, 2e-2, 2e-6, 5e-3, 5e-6)"


def having(result: SearchResult) -> set[str]:
    """The trials that have a whole checkpoint."""
    found = (result.folder / "trials").glob("*/*/epoch-*")
    return {path.parents[1].name for path in found if checkpoint.verify(path) is None}


def left(result: SearchResult) -> set[str]:
    """The trials that have any file of a checkpoint."""
    return {path.parents[2].name for path in (result.folder / "trials").glob("*/*/epoch-*/*")}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("scheduler", "keep", "soup"),
    [("asha", 1, 3), ("none", 2, 1), ("pbt", 1, 1)],
)
def test_the_best_keep_their_checkpoints_and_nobody_else(
    searches: Searches, tmp_path: Path, scheduler: str, keep: int, soup: int
) -> None:
    space = "choice(1e-2, 1e-6, 2e-2, 2e-6)" if scheduler == "pbt" else RATES
    settings = {
        "search.samples": 6 if scheduler == "pbt" else 1,
        "search.space": {"train.lr": space},
        "search.scheduler": scheduler,
        "search.keep": keep,
        "search.soup": soup,
    }
    result = search(searches(tmp_path, **settings))
    most = max(keep, soup)
    best = {trial.name for trial in result.trials[:most]}
    assert having(result) == left(result) == best and len(result.trials) == 6
    assert [trial.kept for trial in result.trials] == [True] * most + [False] * (6 - most)
    for trial in result.trials[:most]:
        assert checkpoint.verify(Path(str(trial.checkpoint))) is None
    # What they did stays.
    assert all(len(trial.history) == trial.epochs >= 1 for trial in result.trials)
    # The result is the same when it is read again, or made again of what Tune knows.
    assert search(searches(tmp_path, **settings)).trials == result.trials
    (result.folder / "result.json").unlink()
    assert search(searches(tmp_path, **settings)).trials == result.trials
    # Another number is no other search, and brings nothing back.
    assert search(searches(tmp_path, **(settings | {"search.keep": 5}))).trials == result.trials


class Ending:
    """Trials that end one after the other, with checkpoints of one weight."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.kept = kept.Kept(job.training, job.search, folder)

    def end(
        self,
        name: str,
        *losses: float,
        weight: float = 0.0,
        saved: bool = True,
        **values: object,
    ) -> None:
        """saved: Tune saves its state afterwards."""
        folder = self.folder / "trials" / name / "key"
        metrics = [{"val_loss": loss, "train_loss": loss} for loss in losses]
        best = losses.index(min(losses))
        for epoch in {best + 1, len(losses)}:
            state = LoopState(epoch=epoch, history=metrics[:epoch], best_epoch=best)
            checkpoint.write(
                folder / checkpoint.name(epoch),
                Snapshot({"w": Piece.whole(torch.tensor([weight]))}),
                state,
            )
        tune = self.folder / "tune" / name
        tune.mkdir(parents=True)
        last = folder / checkpoint.name(len(losses))
        trial_checkpoints.write_pointer(tune, last, len(losses))
        pointer = SimpleNamespace(path=str(tune))
        self.kept.ended(SimpleNamespace(path=str(tune), config=values, checkpoint=pointer))
        if saved:
            self.kept.saved()

    @property
    def having(self) -> list[str]:
        found = (self.folder / "trials").glob("*/key/epoch-*/manifest.json")
        return sorted({path.parents[2].name for path in found})


def test_while_a_search_runs_the_best_that_ended_keep_theirs(
    searches: Searches, tmp_path: Path
) -> None:
    ending = Ending(tmp_path, searches(tmp_path / "run", **{"search.keep": 2}))
    ending.end("a", 0.5, 0.4)
    ending.end("b", 0.9, 0.8)
    assert ending.having == ["a", "b"]
    ending.end("c", 0.3, 0.7)
    assert ending.having == ["a", "c"]
    # Worse than both, and diverged.
    ending.end("d", 0.6)
    ending.end("e", float("nan"))
    assert ending.having == ["a", "c"]
    line = json.loads((tmp_path / "trials/b/key/ended.json").read_text())
    assert (line["name"], line["metric"], line["kept"], len(line["history"])) == (
        "b",
        0.8,
        False,
        2,
    )


def test_nothing_is_deleted_before_tune_has_saved_that_a_trial_ended(
    searches: Searches, tmp_path: Path
) -> None:
    """Else a kill would make Tune train it again, from its first epoch."""
    ending = Ending(tmp_path, searches(tmp_path / "run", **{"search.keep": 1}))
    ending.end("a", 0.5, saved=False)
    ending.end("b", 0.1, saved=False)
    assert ending.having == ["a", "b"] and not list(tmp_path.glob("trials/*/*/ended.json"))
    ending.kept.saved()
    assert ending.having == ["b"]


def test_weights_that_nobody_can_use_cost_no_other_trial_its_own(
    searches: Searches, tmp_path: Path
) -> None:
    """A metric can be finite where a weight is not."""
    ending = Ending(tmp_path, searches(tmp_path / "run", **{"search.keep": 1}))
    ending.end("a", 0.5)
    ending.end("b", 0.1, weight=float("nan"))
    assert ending.having == ["a"]
    ending.end("c", 0.4)
    assert ending.having == ["c"]


def test_a_soup_may_still_average_other_backbones(searches: Searches, tmp_path: Path) -> None:
    settings = {"search.keep": 1, "search.soup": 2}
    ending = Ending(tmp_path, searches(tmp_path / "run", **settings))
    for name, loss, side in (("a", 0.1, 32), ("b", 0.2, 32), ("c", 0.3, 32), ("d", 0.9, 64)):
        ending.end(name, loss, **{"model.side_px": side})
    assert ending.having == ["a", "b", "d"]


def test_an_ensemble_has_a_choice_whatever_is_kept(searches: Searches, tmp_path: Path) -> None:
    """Twice as many as it has members, and the best of another side; `search.keep` adds none."""
    sides = {"a": 32, "b": 32, "c": 32, "d": 32, "e": 32, "f": 64, "g": 64}
    chosen = ["a", "b", "c", "d", "f"]
    for keep in (1, 6):
        folder = tmp_path / str(keep)
        job = searches(tmp_path / "run", **{"search.keep": keep, "search.ensemble": 2})
        ending = Ending(folder, job)
        for place, (name, side) in enumerate(sides.items()):
            values = {"model.side_px": side, "train.lr": 0.01 * (place + 1)}
            ending.end(name, 0.1 * (place + 1), **values)
        assert set(ending.having) >= set(chosen) and len(ending.having) == max(5, keep)
        trials = [
            Trial(name, {"model.side_px": side, "train.lr": 0.01 * place}, 0.1, 1, False, (), "x")
            for place, (name, side) in enumerate(sides.items(), 1)
        ]
        head = Trial("first-answer-1", {"model.side_px": 64}, 0.9, 1, False, (), "x")
        trials.append(head)
        joining = together.candidates(job.training, trials, job.search, "average")
        # Where time ends the choice, heads were asked before the best of another side.
        assert [one.name for one in joining] == ["soup", *chosen[:-1], head.name, chosen[-1]]
        result = Ending(tmp_path / f"of {keep}", job).kept.result(trials)
        assert {one.name for one in result if one.kept} >= {*chosen, head.name}


def test_copies_take_no_place_among_the_candidates_of_an_ensemble(
    searches: Searches, tmp_path: Path
) -> None:
    """Trials of equal values have equal weights: a search of two combinations asked one of them."""
    rates = {"a": 0.01, "b": 0.01, "c": 0.01, "d": 0.02, "e": 0.03, "f": 0.04, "g": 0.05}
    job = searches(tmp_path / "run", **{"search.keep": 1, "search.ensemble": 2})
    ending = Ending(tmp_path, job)
    for place, (name, rate) in enumerate(rates.items()):
        ending.end(name, 0.1 * (place + 1), **{"train.lr": rate})
    assert ending.having == ["a", "d", "e", "f"]
    trials = [
        Trial(name, {"train.lr": rate}, 0.1, 1, False, (), "x") for name, rate in rates.items()
    ]
    joining = together.candidates(job.training, trials, job.search, None)
    assert [one.name for one in joining] == ["a", "d", "e", "f"]
    kept_of = kept.Kept(job.training, job.search, tmp_path).result(trials)
    assert [one.name for one in kept_of if one.kept] == ["a", "d", "e", "f"]


def test_a_trial_whose_end_was_forgotten_trains_again(searches: Searches, tmp_path: Path) -> None:
    ending = Ending(tmp_path, searches(tmp_path / "run", **{"search.keep": 1}))
    ending.end("a", 0.1)
    ending.end("b", 0.2)
    trials, pointed = tmp_path / "trials", tmp_path / "trials/b/key" / checkpoint.name(1)
    assert (trials / "b/key/ended.json").exists()
    folder = trial_checkpoints.prepare_folder(trials, "b", {}, pointed)
    assert folder == trials / "b/key" and not list(folder.iterdir())


def test_the_first_of_the_leaderboard_has_weights(searches: Searches, tmp_path: Path) -> None:
    """The best trial's weights are damaged, and those of the second went long ago."""
    job = searches(tmp_path / "run", **{"search.keep": 1})
    trials = [
        Trial("b", {}, 0.2, 1, False, (), "b/epoch", kept=False),
        Trial("c", {}, 0.3, 1, False, (), "c/epoch"),
        Trial("a", {}, float("nan"), 1, False, (), None),
    ]
    found = kept.Kept(job.training, job.search, tmp_path).result(trials)
    assert [trial.name for trial in found] == ["c", "b", "a"]


def test_a_search_whose_last_weights_are_damaged_says_so(
    searches: Searches, tmp_path: Path
) -> None:
    job = searches(tmp_path / "run", **{"search.keep": 1})
    trials = [
        Trial("b", {}, 0.2, 1, False, (), "b/epoch", kept=False),
        Trial("a", {}, float("nan"), 1, False, (), None),
    ]
    with pytest.raises(RaypipeError, match="No trial of 2 has weights that can be read"):
        kept.Kept(job.training, job.search, tmp_path).result(trials)


def test_a_result_of_an_older_version_keeps_all(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    trial_files.write(file, [Trial("a", {}, 0.1, 1, False, (), "x")], None, 0)
    read = json.loads(file.read_text())
    read["format"] = 2
    del read["trials"][0]["kept"]
    file.write_text(json.dumps(read))
    assert trial_files.read(file)[0][0].kept


def test_what_is_deleted_is_told_by_numbers_and_not_by_names(tmp_path: Path) -> None:
    """By name epoch 10000 comes before 9999, which stayed on the disk."""
    at = {epoch: tmp_path / checkpoint.name(epoch) for epoch in (9_999, 10_001, 10_002)}
    for epoch, folder in at.items():
        pieces = {"w": Piece.whole(torch.ones(1))}
        checkpoint.write(folder, Snapshot(pieces), LoopState(epoch=epoch))
    trial = Trial("trial-001", {}, 0.5, 10_001, False, ({"val_accuracy": 0.5},), None)
    kept._forget(trial, tmp_path)
    assert [epoch for epoch, folder in at.items() if folder.exists()] == [10_002]
