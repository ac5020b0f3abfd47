"""Batch prediction: a pinned table version -> rows of a predictions Delta table, by Ray Data.

Each row names image (id and sha256 of its bytes), label, scores, embedding, model version and table version. It carries the
`key` of its prediction: model, the package's hash, table version, and which rows and columns were asked for. One prediction
is one Delta commit. Running it again finds its rows and adds none; a prediction of some rows never stands for one of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from raypipe.config import RunConfig, Section, key_of
from raypipe.errors import DataError
from raypipe.models.tasks import NUMERIC
from raypipe.registry import promote
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.serve.carry import carry
from raypipe.tables import scan
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion, resolve

FORMAT = 2  # of a row; rows of format 1 have neither key nor sha256, and are made again
_ROW = pa.schema(
    [(n, pa.string()) for n in ("image_id", "label")]
    + [(n, pa.list_(pa.float32())) for n in ("scores", "embedding")]
    + [("classes", pa.list_(pa.string()))]
    + [(n, pa.string()) for n in ("model", "table", "sha256", "key")]
    + [("format", pa.int32())]
)


class PredictConfig(Section):
    """Which table to predict (`null`: the job's own) and where predictions go (`null`: beside the run)."""

    table: TableConfig | None = None
    out: str | None = None
    batch_size: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class PredictResult:
    """Where the rows are and what they say: how many images got each label; for numbers, the least, the mean and the most.
    `key` names the prediction: read_rows finds its rows."""

    out: TableVersion
    model: str
    table: TableVersion
    images: int
    labels: dict[str, int] | dict[str, float]
    key: str


def predict(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictResult:
    """Predict every row of the pinned version that `source` asks for (where, sample) with `model` (default: the champion).
    Raises DataError as tables do."""
    table = ImageTable.open(source)
    version = table.pin(source.version)
    model = model or promote.require_champion(store)
    uri, key = place(run, cfg), key_of_prediction(source, version, model)
    options = source.storage_options

    def made() -> pa.Table:
        return _predict(
            table, version, source, promote.fetch(store, model), model, cfg, key, progress
        )

    rows = rows_once(
        uri, _ROW, {"key": key}, made, f"predict {version} with {model}", options, ["label"]
    )
    counts = _said(rows["label"], model.tags.get("raypipe.task", "single_label"))
    return PredictResult(
        ImageTable(uri, storage_options=options).pin(), str(model), version, len(rows), counts, key
    )


def place(run: RunConfig, cfg: PredictConfig) -> str:
    """Where predictions are kept."""
    return resolve(cfg.out or str(run.path / "predictions"))


def key_of_prediction(source: TableConfig, version: TableVersion, model: ModelVersion) -> str:
    """Names a prediction by everything that determines its rows."""
    return key_of(
        "prediction",
        FORMAT,
        str(model),
        model.seal,
        version.identity,
        source.where,
        source.sample,
        source.columns,
    )


def read_rows(
    uri: str, key: str, columns: list[str], storage_options: dict[str, str] | None = None
) -> pa.Table:
    """The rows of one prediction; no rows and no columns where it was not made."""
    return rows_named(uri, {"key": key}, columns, storage_options)


def _said(labels: pa.ChunkedArray, task: str) -> dict[str, int] | dict[str, float]:
    if task in NUMERIC and len(labels):
        numbers = labels.cast(pa.float64())
        return {
            name: find(numbers).as_py()
            for name, find in (("least", pc.min), ("mean", pc.mean), ("most", pc.max))
        }
    return {
        str(v["values"]): v["counts"] for v in labels.combine_chunks().value_counts().to_pylist()
    }


def _predict(
    table: ImageTable,
    version: TableVersion,
    source: TableConfig,
    package: Package,
    model: ModelVersion,
    cfg: PredictConfig,
    key: str,
    progress: Callable[[int, int], None],
) -> pa.Table:
    c = table.columns
    total = len(scan.rows(table, version, [c.id], source.where))
    if not total:
        raise DataError(
            f"{version} has no images to predict",
            got=source.where or None,
            fix="Check the table's version, where and sample",
        )
    carried = carry(package)

    def predicted(batch: dict[str, Any]) -> dict[str, Any]:
        images = list(batch[c.image])
        found = carried.open().predict(images, threads=1)
        return {
            "image_id": batch[c.id],
            "label": np.array(found.labels, dtype=object),
            "scores": found.scores_NC,
            "embedding": found.features_ND,
            "sha256": np.array([hashlib.sha256(data).hexdigest() for data in images], dtype=object),
        }

    stream = scan.dataset(table, version, [c.id, c.image], source.where).map_batches(
        predicted, batch_size=cfg.batch_size
    )
    parts, done = [], 0
    for batch in stream.iter_batches(batch_size=256, batch_format="numpy"):
        parts.append(batch)
        done += len(batch["image_id"])
        progress(done, total)
    columns = {
        name: _column(np.concatenate([p[name] for p in parts]), _ROW.field(name).type)
        for name in parts[0]
    }
    same = {
        "classes": list(package.classes),
        "model": str(model),
        "table": str(version),
        "key": key,
        "format": FORMAT,
    }
    columns |= {
        name: pa.array([value] * done, _ROW.field(name).type) for name, value in same.items()
    }
    return pa.table([columns[name] for name in _ROW.names], schema=_ROW)


def _column(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Rows of vectors without a Python object a number: 100,000 embeddings of 1,280 would be 4 GB."""
    if values.ndim == 1:
        return pa.array(values.tolist(), kind)
    ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(ends, values.astype(np.float32).ravel()).cast(kind)
