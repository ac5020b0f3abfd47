"""`table.sample` takes the same rows whatever files they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.tables import scan, versions
from raypipe.tables.table import Columns, ImageTable, TableConfig
from tests.tables import handmade as by_hand

N = 400


def made(folder: Path, **columns: Any) -> str:
    """Eight files of 50 rows; a column of None is left out."""
    plain: dict[str, Any] = {
        "image_id": [f"{i:04d}" for i in range(N)],
        "label": ["ab"[i % 2] for i in range(N)],
        "n": list(range(N)),
        "image": [b"image %d" % i for i in range(N)],
    }
    rows = pa.table({name: v for name, v in (plain | columns).items() if v is not None})
    for start in range(0, N, 50):
        write_deltalake(str(folder), rows.slice(start, 50), mode="append")
    return str(folder)


def taken(uri: str, share: float, **columns: str) -> list[int]:
    table = ImageTable(uri, Columns(**columns), sample=share)
    return sorted(scan.rows(table, table.pin(), ["n"])["n"].to_pylist())


KINDS: dict[str, dict[str, Any]] = {
    "ids": {},
    "numbers": {"image_id": list(range(N))},
    "some ids": {"image_id": [None if i % 3 else str(i) for i in range(N)]},
    "no ids": {"image_id": None},
    "no images": {"image_id": None, "image": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimized_table_has_the_same_sample(kind: str, tmp_path: Path) -> None:
    """Rows were chosen by their place in a file: each optimize took other ones."""
    uri = made(tmp_path / "t", **KINDS[kind])
    before = taken(uri, 0.25)
    assert 60 < len(before) < 140, "100, within four and a half standard deviations"
    versions.optimize(ImageTable(uri))
    assert taken(uri, 0.25) == before
    versions.optimize(ImageTable(uri), ["label", "n"])
    assert taken(uri, 0.25) == before
    assert set(before) < set(taken(uri, 0.5)) < set(taken(uri, 1.0))


def test_a_copy_and_a_cleaned_table_have_the_same_sample(tmp_path: Path) -> None:
    uri = made(tmp_path / "t")
    before = taken(uri, 0.25)
    table = ImageTable(uri)
    write_deltalake(str(tmp_path / "copy"), scan.rows(table, table.pin(), ["n", "image_id"]))
    assert taken(str(tmp_path / "copy"), 0.25) == before
    gone = {before[0], *range(1, N, 7)}
    by_hand.drop(table, table.pin(), [f"{i:04d}" for i in gone], "clean")
    assert taken(uri, 0.25) == [n for n in before if n not in gone]


def test_a_label_or_a_column_that_comes_later_changes_no_sample(tmp_path: Path) -> None:
    uri = made(tmp_path / "t", image_id=None)
    before = taken(uri, 0.25)
    other = {"label": ["c"] * N, "site": ["north"] * N}
    assert taken(made(tmp_path / "relabelled", image_id=None, **other), 0.25) == before


def test_a_sample_and_a_condition_hold_both(tmp_path: Path) -> None:
    table = ImageTable(made(tmp_path / "t"), sample=0.25)
    found = scan.rows(table, table.pin(), ["n"], {"label": "a"})["n"].to_pylist()
    assert sorted(found) == [n for n in taken(table.uri, 0.25) if n % 2 == 0]


def test_what_is_kept_under_a_sample_of_before_is_not_taken_for_this_one() -> None:
    assert TableConfig(uri="t", sample=0.5).sample_key != 0.5
    assert TableConfig(uri="t").sample_key == 1.0
