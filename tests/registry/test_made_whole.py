"""A new SQLite store of MLflow is there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event

from raypipe.config import RunConfig
from raypipe.registry import made_whole
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig

# Before conftest's quick_stores, which copies a store that was made once, takes its place.
make = made_whole.make


class Killed(BaseException):
    """As an alarm that comes between two steps of a migration."""


@pytest.mark.parametrize("named", ["", "sqlite:///{}/new/a%20b/mlflow.db"])
def test_a_kill_while_mlflow_makes_its_store_leaves_none(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one was left where registry.uri named a folder that did not exist."""
    monkeypatch.setattr(made_whole, "make", make)
    run = RunConfig(dir=str(tmp_path / "run"))
    cfg = RegistryConfig(uri=named.format(tmp_path) or None)
    folder = tmp_path / "new" / "a b" if named else run.path / "mlflow"
    made: list[str] = []

    def dies(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        made.append(statement)
        if len([one for one in made if "CREATE TABLE" in one]) == 12:
            raise Killed

    event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", dies)
    try:
        with pytest.raises(Killed):
            open_store(run, cfg)
    finally:
        event.remove(sqlalchemy.engine.Engine, "before_cursor_execute", dies)
    assert list(folder.iterdir()) == []
    store = open_store(run, cfg)
    assert store.client.search_experiments()[0].experiment_id
    assert [path.name for path in folder.glob("*")] == ["mlflow.db"]


def test_only_the_file_in_the_making_is_not_waited_for(tmp_path: Path) -> None:
    def waits(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA synchronous=FULL")

    def synchronous(name: str) -> int:
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / name}")
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
        engine.dispose()
        return int(found)

    # After conftest's listener, which lets no connection wait, and before that of `_unsynced`.
    event.listen(sqlalchemy.engine.Engine, "connect", waits)
    try:
        with made_whole._unsynced(tmp_path / "made.db"):
            assert (synchronous("made.db"), synchronous("other.db")) == (0, 2)
        assert synchronous("made.db") == 2
    finally:
        event.remove(sqlalchemy.engine.Engine, "connect", waits)


def test_a_store_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mlflow.db"
    flushed: list[tuple[int, bool]] = []
    monkeypatch.setattr(made_whole, "make", lambda beside: beside.write_bytes(b"a store"))
    monkeypatch.setattr(
        os, "fsync", lambda of: flushed.append((os.fstat(of).st_ino, file.exists()))
    )
    made_whole.make_whole(f"sqlite:///{file}")
    assert flushed == [(file.stat().st_ino, False)]


def test_a_folder_that_cannot_be_removed_costs_no_store_and_is_swept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which keeps an open file under another name; and what a SIGKILL leaves."""
    file = tmp_path / "mlflow.db"
    monkeypatch.setattr(made_whole, "make", lambda beside: beside.write_bytes(b"a store"))
    with monkeypatch.context() as nfs:

        def refused(path: Any, **given: Any) -> None:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

        nfs.setattr(os, "rmdir", refused)
        made_whole.make_whole(f"sqlite:///{file}")
    (left,) = tmp_path.glob(".making-*")
    assert file.read_bytes() == b"a store"
    made_whole.make_whole(f"sqlite:///{file}")
    assert left.exists(), "another process may be at work there"
    os.utime(left, (0, 0))
    made_whole.make_whole(f"sqlite:///{file}")
    assert not left.exists() and file.exists()
