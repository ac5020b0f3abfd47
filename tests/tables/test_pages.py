"""Row groups read from their pages have pyarrow's values, or are left to it, for any bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import DataError
from raypipe.tables import pages, scan
from raypipe.tables.table import ImageTable, append

VALUES = [bytes([i]) * (i * 37 % 400) for i in range(200)]
PLAIN: dict[str, Any] = {"compression": "NONE", "use_dictionary": False}


def parquet(values: list[bytes | None], nullable: bool = True, **options: Any) -> bytes:
    schema = pa.schema(
        [pa.field("id", pa.int64()), pa.field("image", pa.binary(), nullable=nullable)]
    )
    out = io.BytesIO()
    pq.write_table(
        pa.table([pa.array(range(len(values))), pa.array(values, pa.binary())], schema),
        out,
        **options,
    )
    return out.getvalue()


def walked(source: bytes) -> list[bytes] | None:
    """The values as the pages hold them; None when a row group is declined."""
    file, found = pq.ParquetFile(io.BytesIO(source)), list[bytes]()
    for group in range(file.num_row_groups):
        chunk = pages.chunk(file.metadata, group, "image")
        if chunk is None:
            return None
        data = memoryview(source)[chunk.offset : chunk.offset + chunk.size]
        spans = pages.spans(data, chunk.rows, chunk.nullable)
        if spans is None:
            return None
        found += [bytes(data[start:end]) for start, end in spans]
    return found


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 30},
        {"data_page_size": 500, "write_batch_size": 5},
        {"write_page_checksum": True},
    ],
)
def test_plain_pages_hold_what_pyarrow_reads(options: dict[str, Any], nullable: bool) -> None:
    assert walked(parquet(list(VALUES), nullable, **PLAIN, **options)) == VALUES


@pytest.mark.parametrize(
    "options",
    [
        PLAIN | {"compression": "ZSTD"},
        PLAIN | {"use_dictionary": True},
        PLAIN | {"data_page_version": "2.0"},
        PLAIN | {"column_encoding": {"image": "DELTA_LENGTH_BYTE_ARRAY"}},
    ],
)
def test_other_pages_are_left_to_pyarrow(options: dict[str, Any]) -> None:
    assert walked(parquet(list(VALUES), **options)) is None


def test_nulls_and_names_that_are_not_there_are_left_to_pyarrow() -> None:
    assert walked(parquet([b"a", None, b"c"] * 40, **PLAIN)) is None
    assert pages.chunk(pq.read_metadata(io.BytesIO(parquet([b"a"], **PLAIN))), 0, "picture") is None


def test_what_we_write_ourselves_is_plain(tmp_path: Path) -> None:
    """If deltalake's pages change, reading gets slow without a word; this fails then."""
    append(
        str(tmp_path / "t"),
        pa.table(
            {"image_id": [str(i) for i in range(200)], "image": pa.array(VALUES, pa.binary())}
        ),
        "x",
    )
    (path,) = DeltaTable(str(tmp_path / "t")).file_uris()
    assert walked(Path(path).read_bytes()) == VALUES


def test_a_file_whose_pages_are_damaged_is_named(tmp_path: Path) -> None:
    append(
        str(tmp_path / "t"),
        pa.table({"image_id": ["a"], "image": pa.array([b"x" * 999], pa.binary())}),
        "test",
    )
    table = ImageTable(str(tmp_path / "t"))
    (path,) = map(Path, table.delta().file_uris())
    chunk = pages.chunk(pq.read_metadata(path), 0, "image")
    assert chunk is not None
    stored = bytearray(path.read_bytes())
    stored[chunk.offset : chunk.offset + 8] = b"\xff" * 8
    path.write_bytes(stored)
    with pytest.raises(DataError, match=f"{path.name} cannot be read"):
        scan.rows(table, table.pin(), ["image"])


PAGES = parquet(list(VALUES[:40]), **PLAIN, data_page_size=2000)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_pages_are_declined_or_walked_within_their_bounds(data: st.DataObject) -> None:
    chunk = pages.chunk(pq.read_metadata(io.BytesIO(PAGES)), 0, "image")
    assert chunk is not None
    damaged = bytearray(PAGES[chunk.offset : chunk.offset + chunk.size])
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    spans = pages.spans(memoryview(damaged)[:cut], chunk.rows, chunk.nullable)
    assert spans is None or (
        len(spans) == 40 and all(0 <= start <= end <= cut for start, end in spans)
    )
