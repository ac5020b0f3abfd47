"""Files that only a Delta table's log can judge, and hidden files, are not taken for images."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.tables.sources import SourceConfig, candidates, summary

ROWS = pa.table({"image": [b"a", b"b", b"c"], "label": ["x", "y", "x"]})


def listed(kind: str, images: Path, **more: object) -> list[str]:
    cfg = validate(SourceConfig, {"kind": kind, "images": str(images), **more})
    return [candidate.path for part in candidates(cfg).parts for candidate in part.candidates]


@pytest.mark.parametrize("at", ["table", "around", "file", "partition"])
def test_the_files_of_a_delta_table_are_no_parquet_source(at: str, tmp_path: Path) -> None:
    """A row that was deleted came back: its file is still there."""
    table = tmp_path / "data" / "cells"
    write_deltalake(str(table), ROWS, partition_by=["label"])
    DeltaTable(str(table)).delete("label = 'y'")
    file = next(table.rglob("*.parquet"))
    images = {"table": table, "around": tmp_path / "data", "file": file, "partition": file.parent}
    with pytest.raises(DataError, match=r"belongs to a Delta table .*kind=delta .*data/cells"):
        listed("parquet", images[at])
    assert len(listed("delta", table)) == 2


def test_an_empty_delta_table_is_named_too(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path / "t"), ROWS.schema)
    with pytest.raises(DataError, match=r"belongs to a Delta table"):
        listed("parquet", tmp_path / "t")


def test_labels_are_not_read_from_a_delta_tables_file(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"file": ["a.png"], "label": ["x"]}))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"\x89PNG")
    file = next((tmp_path / "t").glob("*.parquet"))
    with pytest.raises(DataError, match=r"belongs to a Delta table"):
        listed("folder", tmp_path / "photos", labels=str(file))
    assert listed("folder", tmp_path / "photos", labels=str(tmp_path / "t")) == ["a.png"]


def test_hidden_files_are_left_out_and_partitions_are_not(tmp_path: Path) -> None:
    """Spark's attempts that failed, and what macOS leaves beside each file."""
    shown = ["0.parquet", "day=1/1.parquet", "_day=2/2.parquet"]
    hidden = ["._0.parquet", "_temporary/0/3.parquet", ".staging/4.parquet", "_5.parquet"]
    for name in shown + hidden:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(ROWS.slice(0, 1), tmp_path / name)
    (tmp_path / "._0.parquet").write_bytes(b"Mac OS X")
    assert sorted(listed("parquet", tmp_path)) == sorted(f"{name}/0/0" for name in shown)


def test_a_hidden_shard_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "a.cls").write_text("x")
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "0.tar", "w") as tar:
        for name in ("a.png", "a.cls"):
            tar.add(tmp_path / name, name)
    for name in ("._0.tar", "._0.tgz"):
        (shards / name).write_bytes(b"Mac OS X")
    assert listed("tar", shards) == ["0.tar/a.png"]
    (shards / "1.tgz").write_bytes(gzip.compress((shards / "0.tar").read_bytes()))
    with pytest.raises(DataError, match=r"1\.tgz"):
        listed("tar", shards)
    # A name proves nothing: this one is whole, and so are its neighbours.
    shutil.copy(shards / "0.tar", shards / "1.tgz")
    assert listed("tar", shards) == ["0.tar/a.png", "1.tgz/a.png"]


def test_an_index_beside_a_shard_is_none_and_every_shard_and_file_is_found(tmp_path: Path) -> None:
    """A compressed shard in a folder below, and `.pq`, were left out without a word."""
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "shards" / "more").mkdir(parents=True)
    with tarfile.open(tmp_path / "shards" / "0.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    (tmp_path / "shards" / "0.tar.idx").write_text("0 1536")
    assert listed("tar", tmp_path / "shards", labelled=False) == ["0.tar/a.png"]
    tarfile.open(tmp_path / "shards" / "more" / "1.tar.gz", "w:gz").close()
    with pytest.raises(DataError, match=r"1\.tar\.gz"):
        listed("tar", tmp_path / "shards", labelled=False)

    # Spark gives a folder the name of a file.
    (tmp_path / "rows" / "train.parquet").mkdir(parents=True)
    names = ["0.pq", "1.PARQUET", "train.parquet/2.parquet"]
    for name in names:
        pq.write_table(ROWS.slice(0, 1), tmp_path / "rows" / name)
    assert listed("parquet", tmp_path / "rows") == [f"{name}/0/0" for name in names]


def test_classes_that_begin_alike_are_shown_apart() -> None:
    names = ["x" * 50 + "1", "x" * 50 + "2", "others"]
    assert summary._label_counts("single_label", names) == dict.fromkeys(
        ["x" * 40, "x" * 50 + "2", "others"], 1
    )
