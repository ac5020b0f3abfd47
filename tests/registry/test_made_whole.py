"""A new SQLite store of MLflow is there whole or not at all."""

# Starts no Ray cluster.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event

from raypipe.config import RunConfig
from raypipe.registry import made_whole, tracking
from raypipe.registry.tracking import RegistryConfig

# Before conftest's quick_stores, which copies a store that was made once, takes its place.
make = made_whole.make


class Killed(BaseException):
    """As an alarm that comes between two steps of a migration."""


def test_a_kill_while_mlflow_makes_its_store_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_whole, "make", make)
    run = RunConfig(dir=str(tmp_path / "run"))
    made: list[str] = []

    def dies(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        made.append(statement)
        if len([one for one in made if "CREATE TABLE" in one]) == 12:
            raise Killed

    event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", dies)
    try:
        with pytest.raises(Killed):
            tracking.open_store(run, RegistryConfig())
    finally:
        event.remove(sqlalchemy.engine.Engine, "before_cursor_execute", dies)
    assert list((run.path / "mlflow").iterdir()) == []
    store = tracking.open_store(run, RegistryConfig())
    assert store.client.search_experiments()[0].experiment_id
    assert [path.name for path in (run.path / "mlflow").glob("*")] == ["mlflow.db"]
