"""Batch prediction: a pinned table version -> rows of a predictions Delta table, by Ray Data.

Each row names image, label, scores, embedding, model version and table version. One prediction of one version by one model is
one Delta commit: running it again finds its rows and adds none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from raypipe.config import RunConfig, Section
from raypipe.models.tasks import NUMERIC
from raypipe.registry import promote
from raypipe.registry.package import Package, load_once
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion, append, resolve

log = logging.getLogger("raypipe")


class PredictConfig(Section):
    """Which table to predict (`null`: the job's own) and where predictions go (`null`: beside the run)."""

    table: TableConfig | None = None
    out: str | None = None
    batch_size: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class PredictResult:
    """Where the rows are and what they say: how many images got each label; for numbers, the least, the mean and the most."""

    out: TableVersion
    model: str
    table: TableVersion
    images: int
    labels: dict[str, int] | dict[str, float]


def predict(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictResult:
    """Predict every row of the pinned version with `model` (default: the champion). Raises DataError as tables do."""
    table = ImageTable.open(source)
    version = table.pin(source.version)
    model = model or promote.require_champion(store)
    uri = resolve(cfg.out or str(Path(run.path) / "predictions"))
    done = rows_of(uri, model, version, ["label"], source.storage_options)
    if not len(done):
        rows = _predict(table, version, source, promote.fetch(store, model), model, cfg, progress)
        append(uri, rows, f"predict {version} with {model}", source.storage_options)
        done = rows.select(["label"])
    counts = _said(done["label"], model.tags.get("raypipe.task", "single_label"))
    predictions = ImageTable(uri, storage_options=source.storage_options)
    return PredictResult(predictions.pin(), str(model), version, len(done), counts)


def _said(labels: pa.ChunkedArray, task: str) -> dict[str, int] | dict[str, float]:
    if task in NUMERIC and len(labels):
        numbers = labels.cast(pa.float64())
        return {name: find(numbers).as_py() for name, find in (("least", pc.min), ("mean", pc.mean), ("most", pc.max))}
    return {str(v["values"]): v["counts"] for v in labels.combine_chunks().value_counts().to_pylist()}


def rows_of(
    uri: str,
    model: ModelVersion,
    version: TableVersion,
    columns: list[str],
    storage_options: dict[str, str] | None = None,
) -> pa.Table:
    """The rows that this model predicted for this version; empty when it has not."""
    if not ImageTable.exists(uri, storage_options):
        return pa.table({name: pa.array([], pa.string()) for name in columns})
    table = ImageTable(resolve(uri), storage_options=storage_options)
    return scan.rows(table, table.pin(), columns, {"model": str(model), "table": str(version)})


def _predict(
    table: ImageTable,
    version: TableVersion,
    source: TableConfig,
    package: Package,
    model: ModelVersion,
    cfg: PredictConfig,
    progress: Callable[[int, int], None],
) -> pa.Table:
    c = table.columns
    total = len(scan.rows(table, version, [c.id], source.where))
    folder = str(package.folder)

    def predicted(batch: dict[str, Any]) -> dict[str, Any]:
        found = load_once(folder).predict(list(batch[c.image]), threads=1)
        labels = np.array(found.labels, dtype=object)
        return {"image_id": batch[c.id], "label": labels, "scores": found.scores_NC, "embedding": found.features_ND}

    stream = scan.dataset(table, version, [c.id, c.image], source.where).map_batches(predicted, batch_size=cfg.batch_size)
    parts, done = [], 0
    for batch in stream.iter_batches(batch_size=256, batch_format="numpy"):
        parts.append(batch)
        done += len(batch["image_id"])
        progress(done, total)
    merged = {k: np.concatenate([p[k] for p in parts]) for k in ("image_id", "label", "scores", "embedding")} if parts else {}
    if not parts:
        return pa.table({"image_id": pa.array([], pa.string()), "label": pa.array([], pa.string())})
    return pa.table(
        {
            "image_id": pa.array(merged["image_id"].tolist(), pa.string()),
            "label": pa.array(merged["label"].tolist(), pa.string()),
            "scores": pa.array(list(merged["scores"]), pa.list_(pa.float32())),
            "embedding": pa.array(list(merged["embedding"]), pa.list_(pa.float32())),
            "classes": pa.array([list(package.classes)] * total, pa.list_(pa.string())),
            "model": pa.array([str(model)] * total, pa.string()),
            "table": pa.array([str(version)] * total, pa.string()),
        }
    )
