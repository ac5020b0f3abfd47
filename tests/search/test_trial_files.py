"""Trials on disk: which epoch a trial offers, and what result.json says of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypipe.search import leaderboard, trial_files
from raypipe.search.leaderboard import Trial, ranked
from raypipe.search.trial_files import trial_of
from raypipe.search.trials import trial_checkpoints
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.settings import TrainConfig
from tests.search.test_leaderboard import NAN, trial


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
    notes = ["No ensemble: there was no time to choose one"]
    trial_files.write(tmp_path / "result.json", trials, None, 3, notes)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    back, stopped, decoded, said = trial_files.read(tmp_path / "result.json")
    # Its checkpoint is where the folder is now.
    moved = replace(trials[0], checkpoint=str(tmp_path / "trials" / "somewhere"))
    assert (
        back[0] == moved
        and math.isnan(back[1].metric)
        and math.isnan(back[1].history[0]["val_loss"])
    )
    assert stopped is None and decoded == 3 and list(said) == notes


def test_a_search_in_a_folder_that_moved_has_its_trials(tmp_path: Path) -> None:
    """Pointers, ended trials and result.json name where the checkpoints were written."""
    old, new = tmp_path / "old", tmp_path / "new"
    ended = kept(old / "trials", "a", (0.7, 0.3, 1.0), (0.9, 0.2, 1.0))
    train = TrainConfig(epochs=2)
    before = trial_of(ended, "val_accuracy", "max", train, old / "trials")
    trial_files.write(old / "result.json", [before], None, 0)
    old.rename(new)
    ended.checkpoint.path = str(new / "tune" / "a")
    after = trial_of(ended, "val_accuracy", "max", train, new / "trials")
    for found in (after, trial_files.read(new / "result.json")[0][0]):
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
    found, _, _, notes = trial_files.read(tmp_path / "result.json")
    assert notes == ()
    assert [t.name for t in found] == ["good", "nan"]
    assert found[1].checkpoint is None and math.isnan(found[1].metric)


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
