"""Batch prediction: a pinned table version -> rows of a predictions Delta table, by Ray Data.

Each row holds the image (id and sha256 of its bytes), label, scores, embedding, how the image
looks, model version and table version (predicted_rows.py). It also holds the `key` of its
prediction: model, hash of the package, table version, and which rows and columns were asked for.

A prediction is committed in parts: some row groups, about PART_ROWS rows. Each part
is committed exactly once. After a kill the same command goes on with the parts that are missing; of
two commands at once, each part is kept of the first that commits it. Each row says how many rows
the whole prediction has, so nobody reads a half one: `read_rows` gives all rows or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from raypipe.serve.predicted_rows import FORMAT, SCHEMA, predicted
from raypipe.serve.shared_package import SharedPackage, share
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.scan import Fragment
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

PART_ROWS = 20_000
"""Rows of a part. They are in the driver's memory together: 100 MB where embeddings have 1,280
numbers. It is no setting: parts of another size would overlap those that a killed run has
committed. A new value needs a new FORMAT."""


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
    key: names the prediction; `read_rows` selects its rows by it. broken: images without a
    prediction, because they do not decode; they are among `images`.
    """

    out: TableVersion
    model: str
    table: TableVersion
    images: int
    labels: dict[str, int] | dict[str, float]
    key: str
    broken: int = 0


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
    summary = _Summary(model.tags.get("raypipe.task", "single_label"))

    # A finished prediction is read, and nothing is planned.
    finished = read_rows(uri, key, ["label", "error"], options)
    if len(finished):
        summary.add(finished)
    else:
        work = _Work(table, version, source, cfg, model, key, uri)
        # A part that an earlier run has committed is read, and the others are predicted.
        for rows in _parts(store, work, progress):
            summary.add(rows)
    out = ImageTable(uri, storage_options=options).pin()
    return PredictResult(
        out, str(model), version, summary.images, summary.labels, key, summary.broken
    )


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
    """The rows of one finished prediction; no rows where it was not made, or not to its end."""
    wanted = list(dict.fromkeys([*columns, "rows"]))
    found = rows_named(uri, {"key": key}, wanted, storage_options)
    if len(found) and found["rows"][0].as_py() != len(found):
        return found.slice(0, 0).select(columns)
    return found.select(columns) if len(found) else found


@dataclass(frozen=True)
class _Work:
    """One prediction: what is predicted with what, and where its rows go."""

    table: ImageTable
    version: TableVersion
    source: TableConfig
    cfg: PredictConfig
    model: ModelVersion
    key: str
    uri: str


class _Summary:
    """Counts labels part by part, so that no more than a part is in memory."""

    def __init__(self, task: str) -> None:
        self._is_number = task in NUMERIC
        self._counts: Counter[str] = Counter()
        self._numbers: list[tuple[float, float, float, int]] = []  # least, sum, most, count
        self.images = 0
        self.broken = 0

    def add(self, rows: pa.Table) -> None:
        """rows: the columns label and error."""
        self.images += len(rows)
        self.broken += len(rows) - rows["error"].null_count
        # Of an image that does not decode there is no label to count.
        labels = rows["label"].filter(pc.is_null(rows["error"]))
        if not len(labels):
            return
        if self._is_number:
            values = labels.cast(pa.float64())
            least, most = pc.min(values).as_py(), pc.max(values).as_py()
            self._numbers.append((least, pc.sum(values).as_py(), most, len(values)))
            return
        for entry in labels.combine_chunks().value_counts().to_pylist():
            self._counts[str(entry["values"])] += entry["counts"]

    @property
    def labels(self) -> dict[str, int] | dict[str, float]:
        if not self._is_number:
            return dict(self._counts)
        if not self._numbers:
            return {}
        least, total, most, count = zip(*self._numbers, strict=True)
        return {"least": min(least), "mean": sum(total) / sum(count), "most": max(most)}


def _parts(store: Store, work: _Work, progress: Callable[[int, int], None]) -> Iterator[pa.Table]:
    """The columns label and error of each part; a part that is not committed yet is predicted.

    Raises DataError where there is no row.
    """
    groups, schema = _groups(work)
    total = sum(rows for _, rows in groups)
    if not total:
        raise DataError(
            f"{work.version} has no images to predict",
            got=work.source.where or None,
            fix="Check the table's version, where and sample",
        )
    fetched: list[tuple[Package, SharedPackage]] = []

    def make(fragments: list[Fragment], number: int, before: int) -> pa.Table:
        # Fetched once, and only if a part is missing.
        if not fetched:
            package = promote.fetch(store, work.model)
            fetched.append((package, share(package)))
        package, shared = fetched[0]
        stream = _predict(work, fragments, schema, shared)
        same = _same(work, package, number, total)
        return _whole(stream, same, lambda rows: progress(before + rows, total))

    reason = f"predict {work.version} with {work.model}"
    options = work.source.storage_options
    done = 0
    for number, fragments in enumerate(_cut(groups, PART_ROWS)):
        named = {"key": work.key, "part": str(number)}
        made = partial(make, fragments, number, done)
        rows = rows_once(work.uri, SCHEMA, named, made, reason, options, ["label", "error"])
        done += len(rows)
        progress(done, total)
        yield rows


def _groups(work: _Work) -> tuple[list[tuple[Fragment, int]], pa.Schema]:
    """The row groups with rows to predict, how many each has, and the table's schema."""
    # The id is read to count the rows that `where` and deletions leave.
    located = scan.located(work.table, work.version, [work.table.columns.id], work.source.where)
    _, schema = scan.plan(work.table, work.version, work.source.where)
    return [(fragment, len(rows)) for fragment, rows in located], schema


def _cut(groups: list[tuple[Fragment, int]], most: int) -> Iterator[list[Fragment]]:
    """Neighbouring row groups of about `most` rows together: the same at every run."""
    # A row group is never cut: a task reads it whole.
    part: list[Fragment] = []
    rows = 0
    for fragment, count in groups:
        if part and rows + count > most:
            yield part
            part, rows = [], 0
        part.append(fragment)
        rows += count
    if part:
        yield part


def _predict(
    work: _Work, fragments: list[Fragment], schema: pa.Schema, shared: SharedPackage
) -> Iterator[pa.Table]:
    """The columns OF_ROWS of some row groups, in no particular order, on all CPUs."""
    columns = work.table.columns
    wanted = list(dict.fromkeys([columns.id, columns.image]))

    def predict_batch(batch: pa.Table) -> pa.Table:
        # Runs in a worker process of Ray Data.
        return predicted(shared.open(), batch, columns)

    options = work.table.storage_options
    images = scan.distributed(fragments, schema, wanted, work.source.where, options)
    # Ray Data streams: batches arrive while others are still being predicted.
    stream = images.map_batches(
        predict_batch, batch_size=work.cfg.batch_size, batch_format="pyarrow"
    )
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow")


def _same(work: _Work, package: Package, number: int, total: int) -> dict[str, Any]:
    """The columns that are the same in all rows of a part."""
    return {
        "classes": list(package.classes),
        "model": str(work.model),
        "table": str(work.version),
        "key": work.key,
        "format": FORMAT,
        "part": str(number),
        "rows": total,
    }


def _whole(
    stream: Iterator[pa.Table], same: dict[str, Any], progress: Callable[[int], None]
) -> pa.Table:
    """The rows of a part, with the columns that are the same in all of them."""
    batches: list[pa.Table] = []
    done = 0
    for batch in stream:
        batches.append(batch)
        done += len(batch)
        progress(done)
    rows = pa.concat_tables(batches, promote_options="permissive").combine_chunks()
    # The same value in every row takes little space: Parquet writes it once.
    columns = {name: rows[name] for name in rows.column_names}
    for name, value in same.items():
        columns[name] = pa.array([value] * len(rows), SCHEMA.field(name).type)
    return pa.table([columns[name] for name in SCHEMA.names], names=SCHEMA.names).cast(SCHEMA)
