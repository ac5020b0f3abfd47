"""A small search on 60 photos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import replace, validate
from raypipe.job import Job
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig


@pytest.fixture(scope="session")
def searches(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """`searches(folder, **{"search.samples": 4})` -> a search over small_cnn's rate."""
    table = TableConfig(uri=str(tmp_path_factory.mktemp("search") / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    small: dict[str, Any] = {
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {
            "epochs": 4,
            "batch_size": 16,
            "precision": "fp32",
            "stopping": {"metric": "val_loss"},
        },
        "search": {"samples": 2, "grace": 1, "space": {"train.lr": "grid(1e-6, 1e-2)"}},
    }
    return lambda folder, **changes: replace(
        validate(Job, {"table": table.model_dump(), "run": {"dir": str(folder)}, **small}),
        changes,
    )
