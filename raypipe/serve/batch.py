"""Batch prediction: a pinned table version -> rows of a predictions Delta table, by Ray Data.

Each row holds the image (id and sha256 of its bytes), label, scores, embedding, model version and
table version. It also holds the `key` of its prediction: model, hash of the package, table version,
and which rows and columns were asked for. One prediction is one Delta commit. A second run of the
same prediction reads its rows and adds none; a prediction of some rows has another key than one of
all rows.
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
from raypipe.serve.shared_package import share
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

FORMAT = 2  # of a row. Rows of format 1 have neither key nor sha256, and are made again.

_ROW = pa.schema(
    [
        ("image_id", pa.string()),
        ("label", pa.string()),
        ("scores", pa.list_(pa.float32())),
        ("embedding", pa.list_(pa.float32())),
        ("classes", pa.list_(pa.string())),
        ("model", pa.string()),
        ("table", pa.string()),
        ("sha256", pa.string()),
        ("key", pa.string()),
        ("format", pa.int32()),
    ]
)


class PredictConfig(Section):
    """What to predict, and where predictions go."""

    table: TableConfig | None = None
    """The table to predict. null: the job's own table."""

    out: str | None = None
    """The address of the predictions table. null: `predictions` in the run's folder."""

    batch_size: int = Field(default=64, ge=1)
    """Images that one task predicts at a time. It bounds the memory of a task."""


@dataclass(frozen=True)
class PredictResult:
    """Where the rows are, and a summary of their labels.

    labels: the number of images by label; for numeric tasks, the least, the mean and the most.
    key: names the prediction; `read_rows` selects its rows by it.
    """

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
    """Predict every row of the pinned version that `source` selects (where, sample).

    model: default is the champion. progress: called with (images done, all images). Raises
    DataError as tables do, and where there is no row to predict.
    """
    table = ImageTable.open(source)
    version = table.pin(source.version)
    model = model or promote.require_champion(store)
    uri = place(run, cfg)
    key = key_of_prediction(source, version, model)
    options = source.storage_options

    def make_rows() -> pa.Table:
        package = promote.fetch(store, model)
        return _predict(table, version, source, package, model, cfg, key, progress)

    # Predicts only if no earlier run has committed rows with this key.
    reason = f"predict {version} with {model}"
    rows = rows_once(uri, _ROW, {"key": key}, make_rows, reason, options, ["label"])
    labels = _summary(rows["label"], model.tags.get("raypipe.task", "single_label"))
    out = ImageTable(uri, storage_options=options).pin()
    return PredictResult(out, str(model), version, len(rows), labels, key)


def place(run: RunConfig, cfg: PredictConfig) -> str:
    """The address of the predictions table."""
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
        source.sample_key,
        source.columns,
    )


def read_rows(
    uri: str, key: str, columns: list[str], storage_options: dict[str, str] | None = None
) -> pa.Table:
    """The rows of one prediction; no rows and no columns where it was not made."""
    return rows_named(uri, {"key": key}, columns, storage_options)


def _summary(labels: pa.ChunkedArray, task: str) -> dict[str, int] | dict[str, float]:
    """The `labels` of a PredictResult."""
    if task in NUMERIC and len(labels):
        numbers = labels.cast(pa.float64())
        return {
            "least": pc.min(numbers).as_py(),
            "mean": pc.mean(numbers).as_py(),
            "most": pc.max(numbers).as_py(),
        }
    counts = {}
    for entry in labels.combine_chunks().value_counts().to_pylist():
        counts[str(entry["values"])] = entry["counts"]
    return counts


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
    """The prediction's rows, in no particular order, all in this process's memory.

    Runs on all CPUs of the cluster. Raises DataError where there is no row, and BadImage for the
    first image that does not decode: then the whole prediction fails.
    """
    columns = table.columns
    total = len(scan.rows(table, version, [columns.id], source.where))
    if not total:
        raise DataError(
            f"{version} has no images to predict",
            got=source.where or None,
            fix="Check the table's version, where and sample",
        )
    shared = share(package)

    def predict_batch(batch: dict[str, Any]) -> dict[str, Any]:
        # Runs in a worker process of Ray Data.
        images = list(batch[columns.image])
        predictions = shared.open().predict(images, threads=1)
        hashes = [hashlib.sha256(data).hexdigest() for data in images]
        return {
            "image_id": batch[columns.id],
            "label": np.array(predictions.labels, dtype=object),
            "scores": predictions.scores_NC,
            "embedding": predictions.features_ND,
            "sha256": np.array(hashes, dtype=object),
        }

    # Ray Data streams: batches arrive while others are still being predicted.
    images = scan.dataset(table, version, [columns.id, columns.image], source.where)
    stream = images.map_batches(predict_batch, batch_size=cfg.batch_size)
    batches: list[dict[str, np.ndarray]] = []
    done = 0
    for batch in stream.iter_batches(batch_size=256, batch_format="numpy"):
        batches.append(batch)
        done += len(batch["image_id"])
        progress(done, total)

    # Columns that differ from row to row, and those that are the same in all rows.
    arrays: dict[str, pa.Array] = {}
    for name in batches[0]:
        values = np.concatenate([batch[name] for batch in batches])
        arrays[name] = _column(values, _ROW.field(name).type)
    same = {
        "classes": list(package.classes),
        "model": str(model),
        "table": str(version),
        "key": key,
        "format": FORMAT,
    }
    for name, value in same.items():
        arrays[name] = pa.array([value] * done, _ROW.field(name).type)
    return pa.table([arrays[name] for name in _ROW.names], schema=_ROW)


def _column(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """An Arrow column. Vectors (values of two dimensions) become lists.

    They are not converted number by number: 100,000 embeddings of 1,280 numbers would take 4 GB as
    Python objects.
    """
    if values.ndim == 1:
        # Ray makes NaN of the nulls of a block in which all ids are null.
        items = values.tolist()
        if pa.types.is_string(kind):
            items = [item if isinstance(item, str) else None for item in items]
        return pa.array(items, kind)
    rows, width = values.shape
    ends = np.arange(rows + 1, dtype=np.int32) * width
    numbers = values.astype(np.float32).ravel()
    return pa.ListArray.from_arrays(ends, numbers).cast(kind)
