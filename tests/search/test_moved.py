"""A run's folder that was moved: a search in it is the same, finished or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raypipe.config import replace
from raypipe.errors import DataError
from raypipe.job import Job
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from tests.searching import search

Searches = Callable[..., Job]


def flip(file: Path) -> None:
    """One bit of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_refit_in_a_folder_that_was_moved_has_the_same_key(
    searches: Searches, tmp_path: Path
) -> None:
    """It starts from the weights of a trial, whose path was in its key: it was trained again, and
    registered as another version."""

    def key(run: str, start: str, weight: float = 1.0) -> str:
        job = searches(tmp_path / run)
        start_from = tmp_path / start / "search" / "key" / "trials" / "trial-1" / checkpoint.name(1)
        checkpoint.write(
            start_from, Snapshot({"w": Piece.whole(torch.tensor([weight]))}), LoopState(epoch=1)
        )
        again = replace(job, {"train.start_from": str(start_from)})
        return again.training.training_key(TableVersion("table", 1))

    assert key("old", "old") == key("moved", "moved")
    # Of two searches that came to other weights at the same place, each has its own refit.
    assert key("old", "old") != key("moved", "moved", weight=2.0)
    # So is what lies elsewhere: somebody may put other weights there.
    assert key("old", "elsewhere") == key("old", "old")
    assert key("old", "elsewhere", weight=2.0) != key("old", "old")
    # A package, or nothing at all.
    folder = tmp_path / "old" / "package"
    folder.mkdir()
    (folder / checkpoint.MANIFEST).write_text('{"files": {"weights.safetensors": {}}}')
    for start in (folder, tmp_path / "old" / "gone"):
        assert by_path(searches(tmp_path / "old"), start) == str(start)


def by_path(job: Job, start: Path) -> str | None:
    return replace(job, {"train.start_from": str(start)}).training._started_from


@pytest.mark.usefixtures("ray_session")
def test_a_search_is_the_same_in_a_folder_that_was_moved(
    searches: Searches, tmp_path: Path
) -> None:
    settings = {
        "search.space": {"train.lr": "grid(1e-2, 1e-3, 2e-3)"},
        "search.samples": 1,
        "search.keep": 2,
        "search.soup": 2,
    }
    job = searches(tmp_path / "old", **settings)
    before = search(job)
    job.run.path.rename(tmp_path / "moved")
    job = replace(job, {"run.dir": str(tmp_path / "moved")})
    after = search(job)
    found = Path(after.best.checkpoint)
    assert checkpoint.verify(found) is None and found.is_relative_to(tmp_path / "moved")
    assert [t.name for t in after.trials] == [t.name for t in before.trials]
    assert after.members == before.members

    # Its trials had ended, and it was killed before it said so.
    (after.folder / "result.json").unlink()
    again = search(job)
    assert [(t.name, t.metric) for t in again.trials] == [(t.name, t.metric) for t in before.trials]
    assert checkpoint.verify(Path(str(again.trials[0].checkpoint))) is None

    # One bit of what nobody reads after a search: of the optimizers, which a soup has two of.
    best = Path(str(again.trials[0].checkpoint))
    for trial in again.trials[:2]:
        flip(next(Path(str(trial.checkpoint)).glob("optimizer-*")))
    assert search(job).best == again.best
    (after.folder / "result.json").unlink()
    assert search(job).best == again.best

    # One bit of its weights: nothing altered is loaded, and the way out is one.
    flip(next(best.glob("weights-*")))
    with pytest.raises(DataError, match=r"weights of its model are damaged.*Remove .*result\.json"):
        search(job)
    (after.folder / "result.json").unlink()
    other = search(job)
    assert other.best.checkpoint != str(best)
    assert checkpoint.verify(Path(other.best.checkpoint), model_only=True) is None
