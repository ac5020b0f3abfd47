"""What the story says of its steps, and which table it begins with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.quickstart.story import _require_own, _searched
from raypipe.registry.versions import ModelVersion
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig


def test_a_loss_is_no_share() -> None:
    """With train.stopping.metric=val_loss the best trial had a loss of "45.3%"."""
    found: Any = SimpleNamespace(
        drawn=4, metric="val_loss", trials=[SimpleNamespace(metric=0.4531)]
    )
    said = _searched(found, ModelVersion("solar", 1, "uri", {}))
    assert said == "4 trials, best val_loss 0.4531, registered as solar/1"


def test_a_table_with_images_of_others_begins_no_story(photos: Path, tmp_path: Path) -> None:
    """`raypipe ingest jobs/configs/solar.yaml` came first: the nights' cells were known by then."""
    table = TableConfig(uri=str(tmp_path / "cells"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    whole = validate(IngestConfig, {"from": source, "name": "mono"})
    day_1 = whole.model_copy(update={"share": (0.0, 0.7)})
    _require_own(table, ingest(table, day_1))
    _require_own(table, ingest(table, day_1))  # a story that was killed and told again
    ingest(table, whole)
    again = ingest(table, day_1)
    with pytest.raises(ConfigError, match=r"Set table\.uri and run\.dir to new folders"):
        _require_own(table, again)
    # Of a story that came further: its later images are its own.
    ImageTable.open(table).tag("mono-raw", 0)
    _require_own(table, again)
