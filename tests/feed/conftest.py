"""A table of 60 labelled photos and 5 without a label."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.config import validate
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig


@pytest.fixture(scope="session")
def half_labelled(
    photos: Path, textured: object, tmp_path_factory: pytest.TempPathFactory
) -> TableConfig:
    root = tmp_path_factory.mktemp("feed")
    table, splits = TableConfig(uri=str(root / "table")), {"train": 0.6, "val": 0.4}
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": splits}))
    (root / "more").mkdir()
    for seed in range(5):
        (root / "more" / f"{seed}.png").write_bytes(textured(seed, side_px=32))  # type: ignore[operator]
    unlabelled = {"images": str(root / "more"), "labelled": False}
    ingest(
        table,
        validate(IngestConfig, {"from": unlabelled, "name": "more", "splits": {"train": 1.0}}),
    )
    return table
