"""A search that was interrupted, of a table that has changed since: the log names its version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from raypipe.config import replace
from raypipe.files import owned
from raypipe.job import Job
from raypipe.search import finished, left, tuner
from raypipe.tables.table import TableVersion
from tests.searching import search


@pytest.mark.usefixtures("ray_session", "heard")
def test_a_commit_after_a_kill_is_said_and_the_way_back_is_one(
    searches: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = searches(tmp_path / "run")
    shutil.copytree(shared.table.uri, tmp_path / "table")
    job = replace(shared, {"table.uri": str(tmp_path / "table")})

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "plan", killed)

    def folders(job: Job) -> set[Path]:
        with pytest.raises(KeyboardInterrupt):
            search(job)
        return set(job.run.path.glob("search/*"))

    (first,) = folders(job)
    number = DeltaTable(job.table.uri).version()
    # No row changes, as in an OPTIMIZE.
    DeltaTable(job.table.uri).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 30 days"}
    )
    assert len(folders(job)) == 2
    assert f"table.version={number} goes on" in caplog.text and str(first) in caplog.text
    caplog.clear()
    back = replace(job, {"table.version": number})
    assert len(folders(back)) == 2 and "goes on" not in caplog.text


def test_only_an_unfinished_search_that_differs_in_the_version_alone_is_named(
    tmp_path: Path,
) -> None:
    def key_at(version: TableVersion) -> str:
        return f"key-{version.version}"

    def unfinished(config: str = "the same") -> str:
        return left.unfinished(tmp_path / "key-9", config, key_at, TableVersion("table", 9))

    assert unfinished() == ""
    for name in ("key-9", "key-4", "odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("the same")
    assert "table.version=4 goes on" in unfinished() and "odd" not in unfinished()
    assert unfinished("other settings") == ""
    # One that runs is not interrupted, and a damaged one costs nobody else anything.
    with owned(tmp_path / "key-4"):
        assert unfinished() == ""
    (tmp_path / "odd" / "config.yaml").write_bytes(b"\xff")
    assert "table.version=4 goes on" in unfinished()
    # Its trials have ended; a refit may be left, and its model is not registered.
    (tmp_path / "key-4" / "result.json").touch()
    assert "table.version=4 goes on" in unfinished()
    (tmp_path / "key-4" / finished.BEST).touch()
    assert unfinished() == ""
