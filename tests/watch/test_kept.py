"""Evidence and decisions come back from their tables as they were, once, and those of an earlier
format are not misread.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa

from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import TableVersion, append
from raypipe.watch import check, decisions, evidence_row
from raypipe.watch.comparison import compare
from raypipe.watch.decide import Decision
from raypipe.watch.detect import DriftReport, Evidence

FOUND = DriftReport(
    (Evidence("mmd", "embedding", 0.5, 0.01, 0.05, True, "exact", 'x: "odd"'),),
    0.01,
    True,
    0.05,
    30,
    40,
    ((3, 2.5), (1, 2.0)),
    "exact",
    ("exact for mmd", "looks left out: an older raypipe"),
)


def test_evidence_comes_back_as_it_was_and_is_there_once(tmp_path: Path) -> None:
    uri, version = str(tmp_path / "drift"), TableVersion("/night", 4)

    def keep(key: str) -> DriftReport:
        row = evidence_row.as_row(key, "night", "cells/3", version, FOUND)
        rows = rows_once(
            uri,
            evidence_row.ROW,
            {"key": key},
            lambda: pa.Table.from_pylist([row], evidence_row.ROW),
            "drift check night",
        )
        return evidence_row.of_row(rows.to_pylist()[0])

    assert keep("a") == keep("a") == keep("b") == FOUND
    kept = rows_named(uri, {"name": "night"}).to_pylist()
    assert [r["key"] for r in kept] == ["a", "b"] and {r["format"] for r in kept} == {check.FORMAT}


def test_a_decision_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = ([True, False, True] * 10, [True, True, True] * 10)
    slices = tuple(compare(name, *rows, is_new=name == "new") for name in ("old", "new"))
    union = compare("all", *rows, is_new=False)
    decision = Decision(True, "Promoted")
    made = decisions.as_row("k", ("cells/1", "cells/2", "/t@v3"), slices, union, decision)
    kept = rows_once(
        str(tmp_path / "decisions"), decisions.ROW, {"key": "k"}, lambda: made, "gate cells/2"
    ).to_pylist()
    assert len(kept) == 1 and kept[0]["format"] == decisions.FORMAT
    assert decisions.decided(kept[0]) == (slices, union, decision)
    assert "NaN" not in kept[0]["slices"]


def test_evidence_of_format_1_stays_and_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    names = [n for n in evidence_row.ROW.names if n != "format"]
    old = evidence_row.as_row("other key", "night", "cells/3", TableVersion("/night", 4), FOUND)
    schema = pa.schema([evidence_row.ROW.field(n) for n in names])
    uri = append(
        str(tmp_path / "drift"),
        pa.Table.from_pylist([{n: old[n] for n in names}], schema),
        "drift check",
    ).uri
    row = evidence_row.as_row("key", "night", "cells/3", TableVersion("/night", 4), FOUND)
    rows_once(
        uri,
        evidence_row.ROW,
        {"key": "key"},
        lambda: pa.Table.from_pylist([row], evidence_row.ROW),
        "drift check night",
    )
    kept = rows_named(uri, {"name": "night"}).to_pylist()
    assert sorted((r["key"], r["format"]) for r in kept) == [("key", 2), ("other key", None)]
    assert json.loads(kept[0]["evidence"]) == json.loads(old["evidence"])


def test_an_error_that_is_no_number_comes_back_as_one() -> None:
    """As None it ended each later retrain of the model with a TypeError."""
    one = compare("all", [2.0] * 50, [1.0] * 49 + [math.nan], False, unit=1.0)
    parts = ("m/1", "m/2", TableVersion("/t", 1))
    row = decisions.as_row("k", parts, (one,), one, Decision(False, "no"))
    (back,), union, _ = decisions.decided(row.to_pylist()[0])
    assert math.isnan(back.challenger) and back.unit == 1.0
    assert union is not None and math.isnan(union.challenger) and "nan" in back.change
