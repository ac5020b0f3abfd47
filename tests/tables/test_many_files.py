"""Tables of many files: what is done for each file is short, and gives what the long way gives."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import DataError
from raypipe.tables import log, scan, snapshot
from raypipe.tables.table import ImageTable, TableConfig

ROOTS = ["/data/t", "file:///data/t", "file:///data/a%20b", "s3://bucket/t", "s3://bucket/t/"]
WORDS = st.text(st.sampled_from("ab1_-.=%/ :é?#~"), min_size=1, max_size=12)


@given(st.sampled_from(ROOTS), WORDS)
def test_a_path_that_is_not_parsed_is_the_one_that_parsing_gives(root: str, path: str) -> None:
    try:
        parsed = log.place(root, path)
    except (DataError, ValueError):
        parsed = None
    if parsed is None:
        with pytest.raises((DataError, ValueError)):
            log.Places(root)(path)
    else:
        assert log.Places(root)(path) == parsed


def test_names_that_engines_give_files_are_not_parsed() -> None:
    for path in ("part-00000-a1b2c3d4-c000.snappy.parquet", "split=train/part-1.parquet"):
        assert log.PLAIN.fullmatch(path)
    for path in ("/abs/a.parquet", "a%20b.parquet", "s3://b/a.parquet", "../a", "a//b", "a/./b"):
        assert not log.PLAIN.fullmatch(path)


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Twelve files of three schemas in two partitions; the last one without two of its rows."""
    uri = str(tmp_path / "table")
    for n in range(12):
        columns = {
            "image_id": [f"{n}-{i}" for i in range(5)],
            "image": [b"x"] * 5,
            "split": ["train" if n % 2 else "val"] * 5,
        }
        if n >= 4:
            columns["label"] = ["a"] * 5
        if n >= 8:
            columns["source"] = ["s"] * 5
        how = {"mode": "append", "schema_mode": "merge", "partition_by": ["split"]}
        write_deltalake(uri, pa.table(columns), **how)
    DeltaTable(uri).delete("image_id = '11-0' or image_id = '11-3'")
    return ImageTable.open(TableConfig(uri=uri))


@pytest.mark.parametrize("kept", [64 * 2**20, 2000, 0])
def test_rows_are_the_same_however_many_footers_are_kept(
    table: ImageTable, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "KEPT", kept)
    monkeypatch.setattr(snapshot, "AT_ONCE", 2)
    monkeypatch.setattr(snapshot, "WAVE", 5)
    pinned = table.pin(None)
    fragments, _ = scan.plan(table, pinned)
    with_footer = [group for group in fragments if group.footer is not None]
    assert len(fragments) == 12
    assert len(with_footer) == {64 * 2**20: 12, 0: 0}.get(kept, len(with_footer))
    assert kept != 2000 or 0 < len(with_footer) < 12

    rows = scan.rows(table, pinned, ["image_id", "split", "label", "source"]).to_pylist()
    assert len(rows) == 58 and len({row["image_id"] for row in rows}) == 58
    for row in rows:
        n = int(row["image_id"].partition("-")[0])
        assert row["split"] == ("train" if n % 2 else "val")
        assert row["label"] == ("a" if n >= 4 else None)
        assert row["source"] == ("s" if n >= 8 else None)
    train = scan.rows(table, pinned, ["image_id"], {"split": "train"})
    assert len(train) == 28


def test_files_of_one_schema_share_it(table: ImageTable) -> None:
    held = table.snapshot(table.pin(None))
    held.files(table.uri, {}, "image", None)
    by_path = held._footers[table.uri, "image"]
    schemas = {id(footer.schema) for footer in by_path.values()}
    # Three, and that of the file which the delete wrote.
    assert len(schemas) == 4


def test_a_vector_is_found_below_a_prefix_with_an_umlaut() -> None:
    """Masks are kept by decoded names, and the address was not decoded: deleted rows came back."""
    root, path = log.Places("s3://b/Pr%C3%BCfung/t")("a.parquet")
    assert log._mask_key(root, path) == "s3://b/Pr\u00fcfung/t/a.parquet"
