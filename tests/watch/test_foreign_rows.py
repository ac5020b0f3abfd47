"""Rows that somebody else has put into a table of raypipe's own: one message, and no traceback."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.tables.table import TableVersion, append
from raypipe.watch import calls, cycle, decisions, evidence_row, window_log
from raypipe.watch.decide import Decision
from raypipe.watch.detect import DriftReport
from raypipe.watch.settings import WatchConfig

NOW = datetime(2026, 11, 25, tzinfo=UTC)
WINDOW = {"line": "l", "number": 1, "event": "opened", "window": 1, "name": "n", "table": "t"}
WINDOW |= {"since": None, "version": 3, "state": "s", "images": 9, "at": NOW, "evidence": ""}
WINDOW |= {"predictions": "", "prediction": ""}
EVENT = {"number": 1, "scope": "s", "cycle": "c", "event": "held", "holder": "h", "at": NOW}
EVENT |= {"data": "{}"}


@pytest.mark.parametrize(
    "changes", [{name: None} for name in WINDOW if name not in ("line", "name", "table", "since")]
)
def test_windows(changes: dict[str, Any], tmp_path: Path) -> None:
    uri = str(tmp_path / "windows")
    append(uri, pa.Table.from_pylist([WINDOW], window_log.SCHEMA), "mine")
    assert window_log.Log(uri, "l", None).open is not None
    foreign = pa.Table.from_pylist([WINDOW | {"number": 2} | changes], window_log.SCHEMA)
    append(uri, foreign, "foreign")
    with pytest.raises(DataError, match=r"raypipe did not write.*restore the table"):
        window_log.Log(uri, "l", None)
    assert window_log.Log(uri, "another line", None).entries == ()


@pytest.mark.parametrize(
    "changes",
    [*({name: None} for name in EVENT if name != "scope"), {"data": "{"}, {"data": "[1]"}],
)
def test_retrains(changes: dict[str, Any], tmp_path: Path) -> None:
    uri = str(tmp_path / "retrains")
    append(uri, pa.Table.from_pylist([EVENT], cycle.SCHEMA), "mine")
    assert cycle.Journal(uri, "s", None).held is not None
    append(uri, pa.Table.from_pylist([EVENT | {"number": 2} | changes], cycle.SCHEMA), "foreign")
    with pytest.raises(DataError, match=r"raypipe did not write.*restore the table"):
        cycle.Journal(uri, "s", None)


@pytest.mark.parametrize("name", ["number", "act", "reason", "champion"])
def test_calls(name: str, tmp_path: Path) -> None:
    run, watch, no = RunConfig(dir=str(tmp_path)), WatchConfig(), Decision(False, "no")
    calls.keep(run, watch, "c", "m", "m/1", no)
    row = dict.fromkeys(calls.ROW.names, "x") | {"about": "c", "model": "m", "number": 2}
    row |= {"act": True, "format": 1, name: None}
    place = watch.place(run, "calls")
    append(place, pa.Table.from_pylist([row], calls.ROW), "foreign")
    with pytest.raises(DataError, match=r"raypipe did not write.*restore the table"):
        calls.keep(run, watch, "c", "m", "m/1", no)
    calls.keep(run, watch, "another check", "m", "m/1", no)


@pytest.mark.parametrize(
    "changes",
    [
        *({"slices": text} for text in (None, "{", "null", "[]", '{"slices": 1, "named": 1}')),
        {"slices": '{"slices": [{"slice": "a", "newer": 1}], "named": [{"name": "x"}]}'},
        {"promoted": None},
        {"reason": None},
    ],
)
def test_decisions(changes: dict[str, Any]) -> None:
    """Of a newer raypipe, or damaged: a retrain ended in a traceback each night."""
    parts = ("m/1", "m/2", "t@v1")
    [row] = decisions.as_row("d", parts, (), None, Decision(True, "better")).to_pylist()
    assert decisions.decided(row)[2].act and not decisions.limited(row)["named"]
    with pytest.raises(DataError, match=r"this raypipe did not write.*restore the table"):
        decisions.decided(row | changes)
    if "slices" in changes:
        with pytest.raises(DataError, match="did not write"):
            decisions.limited(row | changes)


def test_columns_of_other_types(tmp_path: Path) -> None:
    for name, schema in (("windows", window_log.SCHEMA), ("retrains", cycle.SCHEMA)):
        append(str(tmp_path / name), pa.table({one: ["x"] for one in schema.names}), "foreign")
    with pytest.raises(DataError, match="number is string"):
        window_log.Log(str(tmp_path / "windows"), "x", None)
    with pytest.raises(DataError, match="number is string"):
        cycle.Journal(str(tmp_path / "retrains"), "x", None)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in ("evidence", "unusual", "notes", "parts", "is_drift")),
        {"evidence": '[{"detector": "mmd", "newer": 1}]'},
        {"unusual": "[1]"},
        {"parts": "{"},
    ],
)
def test_evidence_of_drift(changes: dict[str, Any]) -> None:
    """Of a newer raypipe, or damaged: the check of that window ended in a traceback each night."""
    found = DriftReport((), 0.5, False, 0.01, 30, 40, ((1, 2.0),))
    row = evidence_row.as_row("k", "n", "m/1", TableVersion("t", 1), found)
    assert evidence_row.of_row(row).unusual == found.unusual
    with pytest.raises(DataError, match=r"this raypipe did not write.*restore the table"):
        evidence_row.of_row(row | changes)
