"""How good is a registered model on a labelled table, and where is it worse?

Each image is read and decoded once. It gives a row: its scores, its label, the columns that slices
are made of, and how it looks (images/measure.py). The metrics and slices are made of these rows, so
nothing is predicted twice. Of the most confident mistakes the pixels are kept, as the model saw
them.

Letters in names: N images, C classes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from PIL import Image
from pydantic import Field

from raypipe.config import Section
from raypipe.errors import ConfigError, DataError, nearest
from raypipe.images import measure
from raypipe.images.measure import LOOKS
from raypipe.models import metrics
from raypipe.models.quality import Quality, quality
from raypipe.models.slices import Sliced, sliced
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import Attempt, Package
from raypipe.serve.shared_package import share
from raypipe.tables import label_column, scan
from raypipe.tables.table import Columns, ImageTable, TableConfig, TableVersion

_TEXT = "text:"  # before the name of a column of slices


class EvaluateConfig(Section):
    """Which model is evaluated on which table, and how its slices are made."""

    model: str | None = None
    """The registered version: a number, an alias, or models:/NAME@ALIAS with the NAME of the job's
    own model; another NAME is not looked for. null: the champion."""

    table: TableConfig | None = None
    """The labelled table. null: the job's own table, its test split alone."""

    slices: list[str] | None = None
    """Columns whose values make slices; numbers are cut at their quartiles. null: the column of
    sources, where there is one. brightness, contrast and sharpness of the images come with them."""

    group: str | None = None
    """A column whose equal values belong together, as images of one part do: intervals count
    groups, and not images. null: every image counts."""

    least_images: int = Field(default=20, ge=2)
    """Slices with fewer images are left out: their metric says little."""

    mistakes: int = Field(default=24, ge=0, le=200)
    """How many of the most confident mistakes the report shows."""


@dataclass(frozen=True)
class Mistake:
    """One image on which the model is wrong, and its score of what it predicted."""

    image_id: str
    label: str
    predicted: str
    score: float
    """The score of the prediction; for numbers the absolute error."""

    png: bytes
    """The image as the model saw it."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one model on one version of a table."""

    model: str
    table: TableVersion
    quality: Quality
    """Of the labelled images that decode."""

    skipped: dict[str, int]
    """Images that are not judged, by the reason."""

    sliced: Sliced
    grouped_by: str | None
    mistakes: tuple[Mistake, ...]

    @property
    def task(self) -> Task:
        return self.quality.task


def evaluate(
    package: Package,
    name: str,
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    cfg: EvaluateConfig,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Judge `package` on the labelled rows of a pinned version.

    name: the model's, for the result. progress: called with (rows done, all rows). Raises
    ConfigError for a column that the table lacks, DataError where no labelled image decodes or a
    label is none of the model's.
    """
    columns = _slice_columns(table, version, cfg)
    rows, skipped = _rows(package, table, version, where, columns, cfg, progress)
    if not len(rows):
        raise DataError(
            f"{version} has no image to evaluate on",
            got=in_words(skipped) or where or None,
            rule="An evaluation needs images that decode, with labels",
            fix="Check evaluate.table, its where, and its label column",
        )
    # All images together: metrics and slices look at them from several sides.
    task = package.task
    scores_NC = np.stack(rows["scores"].to_numpy())
    targets_NC = _targets(task, rows["label"].to_pylist())

    # What the slices compare: right or wrong, or the absolute error.
    is_number = task.kind in NUMERIC
    if is_number:
        outcome_N = np.abs(scores_NC[:, 0].astype(np.float64) - targets_NC[:, 0])
    else:
        predicted_NC, true_NC = metrics.decided(task, scores_NC), targets_NC >= 0.5
        outcome_N = (predicted_NC == true_NC).all(1).astype(np.float64)
    # What slices are made of: columns of the table, and how the images look.
    by_name = {column: _values(rows[_TEXT + column]) for column in columns}
    by_name |= {look: rows[look].to_numpy() for look in LOOKS}
    # A column of groups makes slices only if it is named as one.
    group_N = _values(rows[_TEXT + cfg.group]) if cfg.group else None
    if cfg.group and cfg.group not in (cfg.slices or ()):
        by_name.pop(cfg.group)
    found = sliced(
        outcome_N,
        by_name,
        higher_is_better=not is_number,
        group_N=group_N,
        least=cfg.least_images,
        seed=seed,
    )
    return Evaluation(
        model=name,
        table=version,
        quality=quality(task, scores_NC, targets_NC, metrics.overall(task, scores_NC, targets_NC)),
        skipped=skipped,
        sliced=found,
        grouped_by=cfg.group,
        mistakes=_mistakes(task, rows, scores_NC, targets_NC, cfg.mistakes),
    )


def in_words(skipped: dict[str, int]) -> str:
    """How many images are not judged, and why; "" where all are."""
    return ", ".join(f"{count:,} {why}" for why, count in skipped.items())


def _slice_columns(table: ImageTable, version: TableVersion, cfg: EvaluateConfig) -> list[str]:
    """The columns that are read for slices and groups."""
    known = [field.name for field in table.at(version).schema().fields]
    wanted = list(cfg.slices or ())
    if cfg.slices is None and table.columns.source in known:
        wanted.append(table.columns.source)
    if cfg.group:
        wanted.append(cfg.group)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{version} has no column {name!r}", fix=nearest(name, known))
        if name in (table.columns.image, *LOOKS):
            raise ConfigError(
                f"The column {name!r} makes no slices",
                rule=f"The image is no value, and {', '.join(LOOKS)} are measured",
                fix="Leave it out of evaluate.slices",
            )
    return list(dict.fromkeys(wanted))


def _rows(
    package: Package,
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    columns: list[str],
    cfg: EvaluateConfig,
    progress: Callable[[int, int], None],
) -> tuple[pa.Table, dict[str, int]]:
    """(a row for each judged image, how many images are not judged, by reason).

    Columns: id, label (text), scores, png (null where it is not kept), how it looks, and
    `text:COLUMN` for each of `columns`.
    """
    names = table.columns
    wanted = list(dict.fromkeys([names.id, names.label, names.image, *columns]))
    total = _check_labels(package.task, table, version, where)
    shared = share(package)

    def judge_batch(batch: pa.Table) -> pa.Table:
        # Runs in a worker process of Ray Data.
        return _judged(shared.open(), batch, names, columns, cfg.mistakes)

    # Ray Data reads and predicts on all CPUs; blocks arrive as they are done.
    dataset = scan.dataset(table, version, wanted, where)
    stream = dataset.map_batches(judge_batch, batch_size=64, batch_format="pyarrow")
    parts: list[pa.Table] = []
    done = 0
    for part in stream.iter_batches(batch_size=None, batch_format="pyarrow"):
        parts.append(part)
        done += len(part)
        progress(done, total)
    if not parts:
        return pa.table({}), {}
    # A block without images has columns of null type.
    rows = pa.concat_tables(parts, promote_options="permissive")
    skipped = Counter(why for why in rows["skipped"].to_pylist() if why)
    return rows.filter(pc.is_null(rows["skipped"])).sort_by("id"), dict(skipped)


def _check_labels(task: Task, table: ImageTable, version: TableVersion, where: scan.Where) -> int:
    """How many rows there are. Raises DataError, before anything is predicted, for a label that is
    none of the model's.
    """
    name = table.columns.label
    column = scan.rows(table, version, [name], where)[name]
    labels = label_column.read(column, task.kind, name).drop_null().to_pylist()
    if labels:
        task.encode(labels)
    return len(column)


def _judged(
    package: Package, batch: pa.Table, names: Columns, columns: list[str], most: int
) -> pa.Table:
    """The rows of one batch; `skipped` says why a row has no scores."""
    task = package.task
    labels = label_column.read(batch[names.label], task.kind, names.label).to_pylist()
    labelled = [i for i, label in enumerate(labels) if label is not None]
    images = batch[names.image].take(pa.array(labelled, pa.int64())).to_pylist()
    attempt = package.attempt(images, threads=1)
    places = [labelled[i] for i in attempt.good]

    # Every row of the batch has its place: judged, or skipped for a reason.
    skipped: list[str | None] = ["without a label"] * len(labels)
    for i in labelled:
        skipped[i] = "do not decode"
    scores: list[Any] = [None] * len(labels)
    png: list[bytes | None] = [None] * len(labels)
    looks = {look: np.full(len(labels), np.nan, np.float32) for look in LOOKS}
    measured = measure.statistics(attempt.pixels_NHWC)
    kept = _kept(task, attempt, [labels[i] for i in places], most)
    for n, place in enumerate(places):
        skipped[place] = None
        scores[place] = attempt.predictions.scores_NC[n]
        png[place] = kept[n]
        for look in LOOKS:
            looks[look][place] = measured[look][n]

    made = {
        "id": batch[names.id].cast(pa.string()),
        "label": pa.array([None if label is None else str(label) for label in labels], pa.string()),
        "skipped": pa.array(skipped, pa.string()),
        "scores": pa.array(scores, pa.list_(pa.float32())),
        "png": pa.array(png, pa.binary()),
        **{look: pa.array(values) for look, values in looks.items()},
    }
    for column in columns:
        made[_TEXT + column] = _slice_values(batch[column])
    return pa.table(made)


def _slice_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers as float64, all else as text; nulls stay."""
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if is_number:
        return column.cast(pa.float64())
    texts = [None if value is None else str(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _kept(task: Task, attempt: Attempt, labels: list[Any], most: int) -> list[bytes | None]:
    """The pixels of the batch's most confident mistakes, as PNG; None for all others."""
    kept: list[bytes | None] = [None] * len(labels)
    if not labels:
        return kept
    scores_NC = attempt.predictions.scores_NC
    sure_N = _confidence_of_mistakes(task, scores_NC, _targets(task, labels))
    for place in np.argsort(-sure_N)[:most].tolist():
        if sure_N[place] > 0:
            out = io.BytesIO()
            Image.fromarray(attempt.pixels_NHWC[place]).save(out, "PNG")
            kept[place] = out.getvalue()
    return kept


def _confidence_of_mistakes(
    task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray
) -> np.ndarray:
    """How sure the model is of each mistake, 0 for what is right; for numbers, the error."""
    if task.kind in NUMERIC:
        return np.abs(scores_NC[:, 0].astype(np.float64) - targets_NC[:, 0])
    wrong_NC = metrics.decided(task, scores_NC) != (targets_NC >= 0.5)
    if task.kind == "multi_label":
        # A tag may be missing with certainty, too.
        sure_NC = np.maximum(scores_NC, 1 - scores_NC)
        return np.where(wrong_NC, sure_NC, 0).max(1) if wrong_NC.size else np.zeros(len(scores_NC))
    return np.where(wrong_NC.any(1), scores_NC.max(1), 0)


def _mistakes(
    task: Task, rows: pa.Table, scores_NC: np.ndarray, targets_NC: np.ndarray, most: int
) -> tuple[Mistake, ...]:
    """The `most` most confident mistakes of all batches together, the surest first."""
    sure_N = _confidence_of_mistakes(task, scores_NC, targets_NC)
    # The surest first. Of each batch the surest were kept, so those of all are among them.
    found = []
    for place in np.argsort(-sure_N, kind="stable")[:most].tolist():
        png = rows["png"][place].as_py()
        # 0: the model is right. No pixels: another of equally sure mistakes of a batch was kept.
        if sure_N[place] <= 0 or png is None:
            continue
        predicted = task.predictions(scores_NC[place : place + 1])[0]
        label = str(rows["label"][place].as_py())
        image_id = rows["id"][place].as_py()
        found.append(Mistake(image_id, label, predicted, float(sure_N[place]), png))
    return tuple(found)


def _targets(task: Task, labels: list[Any]) -> np.ndarray:
    return task.targets(torch.tensor(task.encode(labels))).numpy()


def _values(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_floating(column.type):
        return column.to_numpy()
    return np.array(column.to_pylist(), dtype=object)
