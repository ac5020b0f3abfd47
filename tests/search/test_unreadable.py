"""Test images that nobody looks at before the search has ended, and that cannot be read then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.cli.console import Console
from raypipe.errors import DataError
from raypipe.registry import promote
from raypipe.registry.store import open_store
from raypipe.search import tuner
from raypipe.tables.table import TableConfig
from raypipe.work import training

from .test_budget_kept import Shown
from .test_refit import cells
from .test_tuner import Searches

__all__ = ["cells"]


def in_two_files(cells: TableConfig, uri: Path, broken: bool = False) -> Path:
    """The same table; its test images are in a file of their own, which is returned."""
    rows = DeltaTable(cells.uri).to_pyarrow_table()
    is_test = pc.equal(rows["split"], "test")
    write_deltalake(str(uri), rows.filter(pc.invert(is_test)))
    tests = rows.filter(is_test)
    if broken:
        kind = tests.schema.field("image").type
        none = pa.array([b"no image"] * len(tests), kind)
        tests = tests.set_column(tests.schema.names.index("image"), "image", none)
    before = set(uri.rglob("*.parquet"))
    write_deltalake(str(uri), tests, mode="append")
    (file,) = set(uri.rglob("*.parquet")) - before
    return file


def failing(run: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as told:
        run()
    text = str(told.value)
    assert "The search has ended, and then this failed: " in text
    assert re.search(r"Its result \(val_loss \d", text)
    assert "run the same command again: it goes on after the search" in text
    return text


@pytest.mark.usefixtures("ray_session")
def test_a_file_that_is_gone_costs_no_search(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = in_two_files(cells, tmp_path / "table")
    aside = file.with_suffix(".aside")
    job = searches(tmp_path / "run", **{"table.uri": str(tmp_path / "table"), "search.samples": 1})

    def heard(standings: Any) -> None:
        if file.exists():
            file.rename(aside)

    text = failing(lambda: training.search_and_register(job, Shown(heard)))
    assert "lacks a file that its log names" in text and "no model is registered" in text
    assert str(next((tmp_path / "run" / "search").iterdir())) in text
    assert promote.champion(open_store(job.run, job.registry)) is None

    aside.rename(file)
    monkeypatch.setattr(tuner, "_search_into", lambda *given: pytest.fail("searched again"))
    result, version, _ = training.search_and_register(job, Console(as_json=True))
    assert str(version).endswith("/1") and result.best.metrics["val_loss"] > 0


@pytest.mark.usefixtures("ray_session")
def test_images_of_which_none_decodes_cost_no_search(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_two_files(cells, tmp_path / "table", broken=True)
    job = searches(tmp_path / "run", **{"table.uri": str(tmp_path / "table"), "search.samples": 1})
    for _ in range(2):
        text = failing(lambda: training.search_and_register(job, Console(as_json=True)))
        assert re.search(r"None of the \d+ images of a split is readable", text)
        monkeypatch.setattr(tuner, "_search_into", lambda *given: pytest.fail("searched again"))
