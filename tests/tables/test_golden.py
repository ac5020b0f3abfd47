"""54 tables written by Spark, read by the command line: rows as expected, or exit code 2.

The tables are in a folder beside the project, where it is available, and are not copied. Its README
names origin and licence.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "delta-golden"
ARCHIVES = sorted(FOLDER.glob("*.tar.zst")) if FOLDER.is_dir() else []
NAMES = [a.name.removesuffix(".tar.zst") for a in ARCHIVES]
pytestmark = pytest.mark.skipif(not ARCHIVES, reason="no golden tables beside the project")

# Nine tables come without expected rows. An invalid log must be refused; the others have rows or
# none.
REFUSED = {
    "data-reader-absolute-paths-escaped-chars": "metadata",
    "deltalog-commit-info": "metaData",
    "deltalog-state-reconstruction-from-checkpoint-missing-metadata": "metadata",
    "deltalog-state-reconstruction-without-metadata": "metadata",
    "no-delta-log-folder": "No Delta table here",
} | dict.fromkeys(  # logs alone: the archives do not hold the files that they name
    [
        "canonicalized-paths-special-a",
        "checkpoint",
        "delete-re-add-same-file-different-transactions",
        "log-replay-special-characters-b",
    ],
    "lacks a file that its log names",
)
# The log says "2021-09-08 11:11:11" without a zone, and the expected rows were read in California's
# zone. The project they are from skips this table: "Golden data needs to have
# 2021-09-08T11:11:11+00:00 as expected value for as_timestamp col"
# (delta-kernel-rs, kernel/tests/golden_tables.rs). So this is expected here.
CORRECTED = {
    "data-reader-partition-values": (
        "as_timestamp",
        datetime(2021, 9, 8, 11, 11, 11, tzinfo=timezone.utc),
    )
}


MANY = 10_000


def unpacked(name: str, target: Path) -> Path:
    with (
        pa.input_stream(FOLDER / f"{name}.tar.zst", compression="zstd") as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        archive.extractall(target, filter="data")
    return target / name


def comparable(value: Any) -> Any:
    """Hashable and equal for equal values: NaN too, and lists of pairs (maps) in any order."""
    if isinstance(value, float):
        return "NaN" if value != value else value
    if isinstance(value, dict):
        return tuple((k, comparable(v)) for k, v in value.items())
    if isinstance(value, list):
        pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
        return frozenset(map(comparable, value)) if pairs else tuple(map(comparable, value))
    return tuple(map(comparable, value)) if isinstance(value, tuple) else value


def bag(table: pa.Table) -> Counter[Any]:
    """The rows in any order, by column name; timestamps in UTC microseconds."""
    columns = {}
    for name in sorted(table.schema.names):
        values = table[name]
        if pa.types.is_timestamp(values.type):
            zone = "UTC" if values.type.tz else None
            values = values.cast(pa.timestamp("us", zone), safe=False)
        columns[name] = [comparable(v) for v in values.to_pylist()]
    return Counter(zip(*columns.values(), strict=True)) if columns else Counter({(): len(table)})


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Have both the same rows, in any order?"""
    names = sorted(other.schema.names)
    types = [other.schema.field(name).type for name in names]
    # Sorting a large table is quicker than to make Python's values of all cells. Floats have NaN,
    # and nested types no order.
    is_plain = not any(pa.types.is_nested(kind) or pa.types.is_floating(kind) for kind in types)
    if len(other) > MANY and is_plain and [one.schema.field(n).type for n in names] == types:
        order = [(name, "ascending") for name in names]
        one_sorted, other_sorted = one.sort_by(order), other.sort_by(order)
        if all(one_sorted[name].equals(other_sorted[name]) for name in names):
            return True
    return bag(one) == bag(other)


def kinds(table: pa.Table) -> dict[str, str]:
    plain = {f.name: str(f.type) for f in table.schema}
    return {
        n: "timestamp" + ("z" if "tz" in t else "") if t.startswith("timestamp") else t
        for n, t in plain.items()
    }


def check(name: str, tmp_path: Path, export: Callable[..., tuple[int, str, str]]) -> None:
    table, out = unpacked(name, tmp_path), tmp_path / "out.parquet"
    code, _, err = export("table", "export", table / "delta", out)
    if name in REFUSED:
        assert code == 2 and REFUSED[name] in err and "Traceback" not in err and not out.exists()
        return
    assert code == 0, err
    got = pq.read_table(out)
    if not (table / "expected").is_dir():
        return
    expected = pa.concat_tables(
        [pq.read_table(f) for f in sorted((table / "expected").rglob("*.parquet"))]
    )
    assert set(got.schema.names) == set(expected.schema.names)
    if name in CORRECTED:
        column, value = CORRECTED[name]
        right = pa.array(
            [value if old else None for old in expected[column].to_pylist()],
            pa.timestamp("us", "UTC"),
        )
        expected = expected.set_column(expected.schema.get_field_index(column), column, right)
    assert same_rows(got, expected)
    ours, theirs = kinds(got), kinds(expected)
    for column in ours:  # the oracle's files know neither a zone nor, for all-null columns, a type
        assert (
            ours[column].removesuffix("z") == theirs[column].removesuffix("z")
            or "null" in theirs[column]
        ), column


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_table_comes_out_as_expected(name: str, tmp_path: Path, cli: Any) -> None:
    check(name, tmp_path, cli)


@pytest.mark.parametrize("name", NAMES)
def test_it_does_through_two_worker_processes_too(
    name: str, tmp_path: Path, cli: Any, ray_session: str
) -> None:
    check(name, tmp_path, lambda *arguments: cli(*arguments, "--workers", 2))
