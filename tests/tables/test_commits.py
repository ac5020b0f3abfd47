"""What is appended under a name is there once, whoever else appends it at the same moment."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.errors import DataError
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import append
from tests import forked

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])
RACER = """
import sys, time
import pyarrow as pa
from pathlib import Path
from raypipe.tables.commits import rows_once
uri, gate, me = sys.argv[1:]
schema = pa.schema([("key", pa.string()), ("value", pa.int64())])

def make():
    (Path(gate) / me).touch()
    while len(list(Path(gate).iterdir())) < 2:  # both have looked and found nothing
        time.sleep(0.005)
    return pa.table({"key": ["a"] * 3, "value": [int(me)] * 3}, schema=schema)

print(rows_once(uri, schema, {"key": "a"}, make, f"evidence by {me}")["value"].to_pylist())
"""


def rows(key: str, *values: int) -> pa.Table:
    return pa.table({"key": [key] * len(values), "value": list(values)}, schema=SCHEMA)


@pytest.mark.parametrize("exists", [False, True], ids=["first write", "table exists"])
def test_two_processes_that_look_before_either_writes_leave_one_set_of_rows(
    exists: bool, tmp_path: Path
) -> None:
    uri, gate = str(tmp_path / "evidence"), tmp_path / "gate"
    gate.mkdir()
    if exists:
        rows_once(uri, SCHEMA, {"key": "b"}, lambda: rows("b", 7), "evidence")
    both = [forked.start(RACER, uri, gate, me) for me in ("1", "2")]
    said = [racer.communicate(timeout=120)[0] for racer in both]
    assert [racer.returncode for racer in both] == [0, 0]
    kept = rows_named(uri, {"key": "a"})["value"].to_pylist()
    assert kept in ([1] * 3, [2] * 3)
    assert said == [f"{kept}\n"] * 2  # who came second got the first's
    assert rows_named(uri, {"key": "b"})["value"].to_pylist() == [7] * exists


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    uri, made = str(tmp_path / "t"), []

    def make() -> pa.Table:
        made.append(1)
        return rows("a", 1, 2)

    assert rows_once(uri, SCHEMA, {"key": "a"}, make, "x").equals(
        rows_once(uri, SCHEMA, {"key": "a"}, make, "x")
    )
    assert len(made) == 1


def test_a_table_of_something_else_is_left_alone(tmp_path: Path) -> None:
    uri = append(
        str(tmp_path / "images"), pa.table({"image_id": ["1"], "image": [b"x"]}), "ingest"
    ).uri
    with pytest.raises(
        DataError,
        match=r"table of something else: drift keeps its rows.*"
        r"got 'image, image_id'.*another place",
    ):
        rows_once(uri, SCHEMA, {"key": "a"}, lambda: rows("a", 1), "drift check")


def test_an_earlier_format_without_these_columns_has_no_such_rows(tmp_path: Path) -> None:
    uri = append(str(tmp_path / "old"), pa.table({"value": [1]}), "old").uri
    assert not len(rows_named(uri, {"key": "a"}))
    assert rows_once(uri, SCHEMA, {"key": "a"}, lambda: rows("a", 5), "new")[
        "value"
    ].to_pylist() == [5]
    assert rows_named(uri, {"key": "a"})["value"].to_pylist() == [5]
