"""A table that was deleted and made again has the old address and number; nothing kept is its."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.registry.versions import ModelVersion
from raypipe.serve.batch import target_of
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.train.job import TrainJob


def made(folder: Path) -> TableVersion:
    rows = pa.table({"image_id": ["a", "b"], "image": [b"1", b"2"], "label": ["x", "y"]})
    write_deltalake(str(folder), rows)
    return ImageTable.open(TableConfig(uri=str(folder))).pin()


def test_what_is_kept_under_a_key_is_of_one_table(tmp_path: Path) -> None:
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "table")}})
    model = ModelVersion("screws", 1, "uri", {})

    def key() -> str:
        table, version = ImageTable.open_pinned(job.table)
        return target_of(job.table, table, version, model).key

    first = made(tmp_path / "table")
    keys = [key(), key()]
    again = ImageTable.open(job.table).pin()
    shutil.rmtree(tmp_path / "table")
    other = made(tmp_path / "table")

    assert str(first) == str(other), "the address and the number are the same"
    assert first.identity == again.identity != other.identity
    assert job.training_key(first) == job.training_key(again) != job.training_key(other)
    assert keys[0] == keys[1] != key()
