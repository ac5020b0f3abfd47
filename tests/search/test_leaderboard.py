"""In which order trials come, which of them are none, and what the order does not say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypipe.search import leaderboard, page
from raypipe.search.leaderboard import Trial, ahead, compared, ranked, trial_of
from raypipe.search.trials import trial_checkpoints
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import FITTED
from raypipe.work import tables

NAN = float("nan")


def trial(name: str, metric: float, *losses: float, failed: bool = False) -> Trial:
    """One with these losses, each at an epoch with that metric."""
    history = tuple({"val_accuracy": metric, "val_loss": loss} for loss in losses)
    return Trial(name, {}, metric, len(losses), False, history, None if failed else "somewhere")


def curve(name: str, *values: float, stopped: str | None = None) -> Trial:
    """One with these accuracies, an epoch each."""
    history = tuple({"val_accuracy": value, "val_loss": 1 - value} for value in values)
    return Trial(name, {}, max(values), len(values), False, history, "somewhere", stopped)


def kept(trials: Path, name: str, *epochs: tuple[float, float, float]) -> SimpleNamespace:
    """What Tune returns of a trial with these epochs (accuracy, loss, a weight), each with its
    checkpoint.
    """
    folder = trials / name / "home"
    history: list[dict[str, float]] = []
    for i, (accuracy, loss, weight) in enumerate(epochs, 1):
        history.append({"val_accuracy": accuracy, "val_loss": loss, "train_loss": 0.5})
        weights = {"w": Piece.whole(torch.tensor([weight]))}
        checkpoint.write(
            folder / checkpoint.name(i),
            Snapshot(weights),
            LoopState(epoch=i, history=list(history)),
        )
    tune = trials.parent / "tune" / name
    tune.mkdir(parents=True)
    trial_checkpoints.write_pointer(tune, folder / checkpoint.name(len(epochs)), len(epochs))
    return SimpleNamespace(
        path=str(tune), checkpoint=SimpleNamespace(path=str(tune)), config={}, error=None
    )


def read(tmp_path: Path, *epochs: tuple[float, float, float]) -> Trial:
    trials = tmp_path / "trials"
    return trial_of(
        kept(trials, "a", *epochs), "val_accuracy", "max", TrainConfig(epochs=len(epochs)), trials
    )


def test_equal_accuracies_are_ranked_by_the_loss_of_the_kept_epoch_and_then_by_name() -> None:
    trials = [
        trial("a", 0.9, 0.5, 0.1),  # the first of equal epochs is the one whose weights were kept
        trial("b", 0.9, 0.3),
        trial("c", 0.9, 0.3),
        trial("d", 0.95, 0.9),
        trial("e", 0.9, NAN),  # it has an accuracy, and weights of NaN
        trial("f", NAN, failed=True),
        trial("g", 0.8, 0.01),
    ]
    order = [t.name for t in ranked(reversed(trials), "val_accuracy", "max")]
    assert order == ["d", "b", "c", "a", "g", "e", "f"]
    assert [t.name for t in ranked(trials, "val_accuracy", "min")] == [
        "g",
        "b",
        "c",
        "a",
        "d",
        "e",
        "f",
    ]


@pytest.mark.parametrize(
    "lost",
    [(0.8, NAN, 1.0), (0.8, math.inf, 1.0), (0.8, 0.1, NAN), (0.8, 0.1, math.inf), (NAN, 0.1, 1.0)],
)
def test_an_epoch_whose_loss_or_weights_are_lost_is_never_the_best(
    tmp_path: Path, lost: tuple[float, float, float]
) -> None:
    """NaN logits have an argmax: the accuracy of such a model is the share of class 0, and looks
    like one.
    """
    found = read(tmp_path / "one", (0.6, 0.5, 1.0), lost)
    assert found.metric == 0.6 and checkpoint.name(1) in str(found.checkpoint)
    nothing = read(tmp_path / "all", lost, lost)
    assert math.isnan(nothing.metric) and nothing.checkpoint is None
    assert next(iter(ranked([nothing, found], "val_accuracy", "max"))) == found


@pytest.mark.parametrize("drawn", [False, True])
def test_the_last_epoch_is_the_result_where_the_job_says_so(tmp_path: Path, drawn: bool) -> None:
    """Whoever trains the winner again, from best.yaml, gets its last epoch, too."""
    epochs = [(0.9, 0.1, 1.0), (0.7, 0.3, 1.0), (0.8, 0.2, NAN)]
    of_tune = kept(tmp_path / "trials", "a", *epochs)
    if drawn:
        of_tune.config = {"train.result": "last"}
    train = TrainConfig(epochs=3, result="best" if drawn else "last")
    found = trial_of(of_tune, "val_accuracy", "max", train, tmp_path / "trials")
    assert found.metric == 0.7 and checkpoint.name(2) in str(found.checkpoint)


def test_a_result_file_is_json_for_every_reader_and_reads_back(tmp_path: Path) -> None:
    trials = [trial("a", 0.9, 0.5), trial("b", NAN, NAN, math.inf, failed=True)]
    leaderboard.write(tmp_path / "result.json", trials, None, 3)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    back, stopped, decoded = leaderboard.read(tmp_path / "result.json")
    # Its checkpoint is where the folder is now.
    moved = replace(trials[0], checkpoint=str(tmp_path / "trials" / "somewhere"))
    assert (
        back[0] == moved
        and math.isnan(back[1].metric)
        and math.isnan(back[1].history[0]["val_loss"])
    )
    assert stopped is None and decoded == 3


def test_a_search_in_a_folder_that_moved_has_its_trials(tmp_path: Path) -> None:
    """Pointers, ended trials and result.json name where the checkpoints were written."""
    old, new = tmp_path / "old", tmp_path / "new"
    ended = kept(old / "trials", "a", (0.7, 0.3, 1.0), (0.9, 0.2, 1.0))
    train = TrainConfig(epochs=2)
    before = trial_of(ended, "val_accuracy", "max", train, old / "trials")
    leaderboard.write(old / "result.json", [before], None, 0)
    old.rename(new)
    ended.checkpoint.path = str(new / "tune" / "a")
    after = trial_of(ended, "val_accuracy", "max", train, new / "trials")
    for found in (after, leaderboard.read(new / "result.json")[0][0]):
        assert found == replace(before, checkpoint=found.checkpoint)
        folder = Path(str(found.checkpoint))
        assert folder.is_relative_to(new) and checkpoint.verify(folder) is None


def test_a_result_of_an_older_version_is_judged_again(tmp_path: Path) -> None:
    """It took the accuracy of weights that were NaN for one, and ranked that trial first."""
    older = {
        "trials": [asdict(trial("nan", 0.8, NAN)), asdict(trial("good", 0.7, 0.5))],
        "stopped": None,
    }
    (tmp_path / "result.json").write_text(json.dumps(older))  # with a bare NaN, as it wrote
    found, _, _ = leaderboard.read(tmp_path / "result.json")
    assert [t.name for t in found] == ["good", "nan"]
    assert found[1].checkpoint is None and math.isnan(found[1].metric)


def test_trials_with_unequal_epochs_are_compared_after_as_many() -> None:
    long, short, poor = curve("long", 0.5, 0.6, 0.8), curve("short", 0.7), curve("poor", 0.1, 0.2)
    trials = ranked([poor, short, long], "val_accuracy", "max")
    assert [t.name for t in trials] == ["long", "short", "poor"]
    assert compared(trials, "val_accuracy", "max") == {
        "long": (1, 0.5),
        "short": (1, 0.7),
        "poor": (1, 0.1),
    }
    (leads,) = ahead(trials, "val_accuracy", "max")
    assert (leads.trial, leads.epochs, leads.metric, leads.first) == ("short", 1, 0.7, 0.5)
    ended = curve("short", 0.7, stopped="its own rule")  # it would have had no more epochs
    assert not ahead([long, ended, poor], "val_accuracy", "max")
    assert compared([long, ended, poor], "val_accuracy", "max")["short"] == (2, 0.7)


def test_where_all_had_as_many_epochs_nothing_is_added() -> None:
    trials = [curve("a", 0.5, 0.6), curve("b", 0.4, 0.5), replace(curve("c", 0.1), checkpoint=None)]
    assert (
        compared(trials, "val_accuracy", "max") == {} and ahead(trials, "val_accuracy", "max") == []
    )


def test_what_a_budget_cut_or_a_failure_lost_was_not_saved() -> None:
    """Ten epochs each: the scheduler ended one after 2, a budget another, and one failed."""
    whole = replace(curve("a", *[0.5] * 10), device_s=100.0)
    early = replace(curve("b", 0.4, 0.4), stopped_early=True, device_s=10.0)
    cut = replace(curve("c", 0.4, 0.4), stopped_early=True, device_s=10.0, cut=True)
    failed = replace(trial("d", NAN, 0.5, failed=True), device_s=5.0)
    own = replace(curve("e", *[0.5] * 5, stopped="no improvement"), device_s=20.0)
    found = leaderboard.spared([whole, early, cut, failed, own], 10, 50)
    # 8 epochs at 5 s, and 5 epochs at 4 s.
    assert found == leaderboard.Spared(13 / 50, 8 * 5.0 + 5 * 4.0)
    assert leaderboard.spared([], 10, 0) == leaderboard.Spared()


def test_the_columns_of_cost_are_those_that_say_something() -> None:
    done = [replace(curve("a", 0.5), seconds=3.0, device_s=3.0)]
    rows = leaderboard.standings(done, "val_accuracy", "max")
    assert "s" in tables.leaderboard("val_accuracy", rows).columns
    assert "device s" not in tables.leaderboard("val_accuracy", rows).columns
    priced = tables.leaderboard("val_accuracy", rows, usd_per_device_s=0.5)
    assert priced.rows[0][priced.columns.index("$")] == "1.5000"
    shared = leaderboard.standings([replace(done[0], device_s=1.5)], "val_accuracy", "max")
    table = tables.leaderboard("val_accuracy", shared)
    assert table.rows[0][table.columns.index("device s")] == 1.5
    # An older result knows neither.
    old = leaderboard.standings([curve("a", 0.5)], "val_accuracy", "max")
    assert not {"s", "device s", "$"} & set(tables.leaderboard("val_accuracy", old).columns)


def test_a_trial_that_drew_its_epochs_is_compared_with_these(tmp_path: Path) -> None:
    """It was shown as stopped early, and as epochs saved, though it had trained to its end."""
    found = kept(tmp_path / "trials", "a", (0.6, 0.5, 1.0), (0.7, 0.4, 1.0))
    found.config = {"train.epochs": 2}
    of_job = TrainConfig(epochs=10)
    whole = trial_of(found, "val_accuracy", "max", of_job, tmp_path / "trials")
    assert not whole.stopped_early and whole.whole(10) == 2
    found.config = {"train.epochs": 8}
    early = trial_of(found, "val_accuracy", "max", of_job, tmp_path / "trials")
    assert early.stopped_early
    assert leaderboard.spared([whole, early], 10, 2 + 8).share == 6 / 10


def test_how_a_trial_ended_is_said_of_each_by_its_name() -> None:
    """One that its own rule ended "ran to the end", and "trial 1" of the page was no trial-001."""
    names = ("trial-007-a", "trial-001-b", "trial-002-c", f"{leaderboard.FIRST}-1", "trial-003-d")
    whole, own, early, head, lost = (curve(name, 0.9, 0.8) for name in names)
    trials = [
        whole,
        replace(own, stopped="no improvement of val_loss for 3 epochs"),
        replace(early, stopped_early=True),
        replace(head, stopped=FITTED),
        replace(lost, checkpoint=None, metric=NAN),
    ]
    standings = leaderboard.standings(trials, "val_accuracy", "max")
    assert [one.state for one in standings] == ["full", "stopped", "stopped", "fitted", "failed"]
    assert [row[1] for row in tables.leaderboard("val_accuracy", standings).rows] == list(names)
    result = SimpleNamespace(
        trials=trials, metric="val_accuracy", mode="max", epochs=8, full_epochs=8
    )
    rows = page.section(result).rows  # type: ignore[arg-type]
    assert [row.trial for row in rows] == list(names)
    assert [row.stopped_early for row in rows] == [False, True, True, False, False]
    assert [row.fitted for row in rows] == [False, False, False, True, False]
