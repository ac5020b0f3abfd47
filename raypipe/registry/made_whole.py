"""A new SQLite store of MLflow, made under another name: whoever is killed leaves no half of one.

MLflow makes a store in some dozens of steps, which take seconds. After a kill between two of them
it refuses to open what is there ("table … already exists"). A kill may be Ctrl-C, or the end of
search.budget_s.

SQLite would wait for the disk after each step, which takes seconds where the disk is busy. The
unfinished file has no use after a power cut, so only the finished one is flushed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raypipe.registry.tracking import file_of, for_mlflow, in_file

_MAKING = ".making-"
_LEFT_S = 3600.0  # making takes seconds


def make_whole(uri: str) -> None:
    """Make the store in a file, if that file is missing. Other addresses are left alone."""
    file = file_of(uri)
    if file is None or "?" in uri:
        return
    _sweep(file.parent)
    if file.exists() or not file.parent.is_dir():
        return
    # NFS keeps a file that is open, as MLflow's connection has it, under another name: the folder
    # then stays until it is swept.
    with tempfile.TemporaryDirectory(
        prefix=_MAKING, dir=file.parent, ignore_cleanup_errors=True
    ) as folder:
        beside = Path(folder) / file.name
        make(beside)
        _flush(beside)
        _put(beside, file)


def _sweep(parent: Path) -> None:
    """Remove what processes left that were killed, or could not; not what another one is making."""
    for folder in parent.glob(f"{_MAKING}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)


def make(file: Path) -> None:
    """Let MLflow make a store in `file`, whose content may not be on the disk yet."""
    import mlflow

    with _unsynced(file):
        # The first question makes the tables.
        mlflow.MlflowClient(for_mlflow(in_file(file))).get_experiment_by_name("Default")


@contextmanager
def _unsynced(file: Path) -> Iterator[None]:
    """Connections to `file` that begin within the block never wait for the disk."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def connected(connection: Any, record: Any) -> None:
        if not isinstance(connection, sqlite3.Connection):
            return
        of = [Path(name) for _, _, name in connection.execute("PRAGMA database_list")]
        if file.resolve() in [one.resolve() for one in of]:
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", connected)
    try:
        yield
    finally:
        event.remove(Engine, "connect", connected)


def _flush(file: Path) -> None:
    with file.open("rb") as made:
        os.fsync(made.fileno())


def _put(made: Path, file: Path) -> None:
    """Give the store its name, unless another process has made one meanwhile."""
    try:
        os.link(made, file)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not file.exists():
            made.replace(file)
