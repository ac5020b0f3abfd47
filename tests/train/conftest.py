"""A table of 60 small photos, and jobs on it that train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import replace, validate
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from raypipe.train.job import TrainJob

Jobs = Callable[..., TrainJob]


@pytest.fixture(scope="session")
def trained_table(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TableConfig:
    table = TableConfig(uri=str(tmp_path_factory.mktemp("train") / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    return table


@pytest.fixture(scope="session")
def three_splits(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TableConfig:
    """The same photos with a test split."""
    table = TableConfig(uri=str(tmp_path_factory.mktemp("three") / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    splits = {"train": 0.4, "val": 0.3, "test": 0.3}
    ingest(table, validate(IngestConfig, {"from": source, "splits": splits}))
    return table


@pytest.fixture
def jobs(trained_table: TableConfig, tmp_path: Path) -> Jobs:
    """`jobs(**{"train.epochs": 3})`: fine-tunes small_cnn on photos in fp32; no early stop."""
    small: dict[str, Any] = {
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {
            "epochs": 4,
            "batch_size": 16,
            "lr": 0.01,
            "precision": "fp32",
            "stopping": {"patience": None},
        },
    }
    job = validate(
        TrainJob,
        {"table": trained_table.model_dump(), "run": {"dir": str(tmp_path / "run")}, **small},
    )
    return lambda **changes: replace(job, changes)
