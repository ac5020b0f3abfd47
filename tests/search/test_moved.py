"""A run's folder that was moved: a search in it is the same, finished or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raypipe.config import replace
from raypipe.errors import DataError
from raypipe.job import Job
from raypipe.train import checkpoint
from tests.searching import search

Searches = Callable[..., Job]


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

    # One bit of its weights: nothing altered is loaded, and the way out is one.
    best = Path(str(again.trials[0].checkpoint))
    weights = next(best.glob("weights-*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DataError, match=r"weights of its model are damaged.*Remove .*result\.json"):
        search(job)
    (after.folder / "result.json").unlink()
    other = search(job)
    assert other.best.checkpoint != str(best)
    assert checkpoint.verify(Path(other.best.checkpoint)) is None
