"""How good is a registered model on a labelled table, and where is it worse?

Each image is read and decoded once. It gives a row: its scores, its label, the columns that slices
are made of, and how it looks (images/measure.py). The metrics and slices are made of these rows, so
nothing is predicted twice. Of the most confident mistakes the pixels are kept, as the model saw
them.

Letters in names: N images, C classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from raypipe.config import Section
from raypipe.errors import ConfigError, DataError, nearest, one_line
from raypipe.models import metrics
from raypipe.models.quality import Quality, quality
from raypipe.models.slices import Sliced, sliced
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import Package
from raypipe.serve.judged_rows import COLUMN, EXACT_DIGITS, GROUP, LOOKS, judged, targets
from raypipe.serve.shared_package import share
from raypipe.tables import label_column, scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

SHOWN, LONGEST = 3, 80  # unknown classes in a text, and characters of each


class EvaluateConfig(Section):
    """Which model is evaluated on which table, and how its slices are made."""

    model: str | None = None
    """The registered version: a number or an alias of the job's own model, or models:/NAME@ALIAS or
    models:/NAME/VERSION of any model in the same store. null: the champion."""

    table: TableConfig | None = None
    """The labelled table. null: the test split of the job's own table."""

    slices: list[str] | None = None
    """Columns whose values make slices. Numbers with more than 12 different values, and times, are
    cut at their quartiles. null: the column of sources, if there is one. Brightness, contrast,
    sharpness and megapixels of the images always make slices too."""

    group: str | None = None
    """Column with the group of an image, for example the part that it shows. Intervals count
    groups, not images. null: every image counts."""

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

    unknown: dict[str, int] = field(default_factory=dict)
    """Judged images of classes that the model does not know, by class; the most frequent first."""

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

    name: the model's, for the result. progress: called with (rows done, all rows). An image of a
    class that the model does not know counts as wrong. Raises ConfigError for a column that the
    table lacks, DataError where no labelled image decodes, no label is one of the model's, or a tag
    or a number is none.
    """
    columns = _slice_columns(table, version, cfg)
    found = _judge(package, table, version, where, columns, cfg, progress)
    rows = found.rows
    if not len(rows):
        raise DataError(
            f"{version} has no image to evaluate on",
            got=in_words(found.skipped) or where or None,
            rule="An evaluation needs images that decode, with labels",
            fix="Check evaluate.table, its where, and its label column",
        )
    # All images together: metrics and slices look at them from several sides.
    task = package.task
    numbers = [chunk.flatten().to_numpy() for chunk in rows["scores"].chunks]
    scores_NC = np.concatenate(numbers).reshape(len(rows), -1)
    labels = rows["label"].to_pylist()
    targets_NC = targets(task, labels)
    unknown: Counter[str] = Counter()
    if task.kind == "single_label":
        classes = {*task.classes}
        unknown.update(label for label in labels if label not in classes)
        if unknown.total() == len(labels):
            raise _unknown(task, labels, table.columns.label)

    # What the slices compare: right or wrong, or the absolute error.
    is_number = task.kind in NUMERIC
    if is_number:
        outcome_N = np.abs(scores_NC[:, 0].astype(np.float64) - targets_NC[:, 0])
    else:
        predicted_NC, true_NC = metrics.decided(task, scores_NC), targets_NC >= 0.5
        outcome_N = (predicted_NC == true_NC).all(1).astype(np.float64)
    # What slices are made of: columns of the table, and how the images look.
    by_name = {column: _values(rows[COLUMN + column]) for column in columns}
    by_name |= {look: rows[look].to_numpy() for look in LOOKS}
    group_N = _values(rows[GROUP]) if cfg.group else None
    slices = sliced(
        outcome_N,
        by_name,
        higher_is_better=not is_number,
        group_N=group_N,
        least=cfg.least_images,
        seed=seed,
    )
    overall = metrics.overall(task, scores_NC, targets_NC)
    return Evaluation(
        model=name,
        table=version,
        quality=quality(task, scores_NC, targets_NC, overall),
        skipped=found.skipped,
        sliced=slices,
        grouped_by=cfg.group,
        mistakes=_mistakes(task, found.surest),
        unknown=dict(unknown.most_common()),
    )


def unknown_in_words(unknown: dict[str, int]) -> str:
    """How many judged images are of classes that the model does not know; "" where none is."""
    if not unknown:
        return ""
    names = ", ".join(f"{one_line(n, LONGEST)!r} {unknown[n]:,}" for n in list(unknown)[:SHOWN])
    more = f" and {len(unknown) - SHOWN:,} more classes" if len(unknown) > SHOWN else ""
    images = sum(unknown.values())
    return (
        f"{images:,} image{'s' * (images > 1)} of classes that the model does not know ({names}"
        f"{more}): wrong, in no row of the confusion matrix, and not in balanced_accuracy"
    )


def in_words(skipped: dict[str, int]) -> str:
    """How many images are not judged, and why; "" where all are."""
    return ", ".join(f"{count:,} {why}" for why, count in skipped.items())


def _slice_columns(table: ImageTable, version: TableVersion, cfg: EvaluateConfig) -> list[str]:
    """The columns that make slices. A column of groups makes some only if it is named as one."""
    known = [field.name for field in table.at(version).schema().fields]
    wanted = list(cfg.slices or ())
    source = table.columns.source
    if cfg.slices is None and source in known and source != cfg.group:
        wanted.append(source)
    for name in [*wanted, *([cfg.group] if cfg.group else [])]:
        if name not in known:
            raise ConfigError(f"{version} has no column {name!r}", fix=nearest(name, known))
        if name in (table.columns.image, *LOOKS):
            raise ConfigError(
                f"The column {name!r} makes no slices",
                rule=f"The image is no value, and {', '.join(LOOKS)} are measured",
                fix="Leave it out of evaluate.slices",
            )
    return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class _Judged:
    """All rows of an evaluation."""

    rows: pa.Table
    """Of the judged images, by id; the columns are those of judged_rows.py without png."""

    skipped: dict[str, int]
    """Images that are not judged, by the reason."""

    surest: pa.Table
    """The surest mistakes, with their png."""


def _judge(
    package: Package,
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    columns: list[str],
    cfg: EvaluateConfig,
    progress: Callable[[int, int], None],
) -> _Judged:
    names = table.columns
    groups = [cfg.group] if cfg.group else []
    wanted = list(dict.fromkeys([names.id, names.label, names.image, *columns, *groups]))
    total = _check_labels(package.task, table, version, where)
    shared = share(package)

    def judge_batch(batch: pa.Table) -> pa.Table:
        # Runs in a worker process of Ray Data.
        return judged(shared.open(), batch, names, columns, cfg.mistakes, cfg.group)

    # Ray Data reads and predicts on all CPUs; blocks arrive as they are done.
    dataset = scan.dataset(table, version, wanted, where)
    stream = dataset.map_batches(judge_batch, batch_size=64, batch_format="pyarrow")
    parts: list[pa.Table] = []
    surest = pa.table({})
    done = 0
    for part in stream.iter_batches(batch_size=None, batch_format="pyarrow"):
        # Of the pictures only the surest so far stay: a large table may have a million mistakes.
        surest = _surest_of([surest, part], cfg.mistakes)
        parts.append(part.drop_columns("png"))
        done += len(part)
        progress(done, total)
    # A block without images has columns of null type.
    rows = pa.concat_tables(parts, promote_options="permissive") if parts else pa.table({})
    if not len(rows):
        return _Judged(rows, {}, surest)
    skipped = Counter(why for why in rows["skipped"].to_pylist() if why)
    # Blocks arrive in any order, and ids may repeat: the same rows are to give the same draws.
    order = [(name, "ascending") for name in ("id", "label", *LOOKS)]
    judged_rows = rows.filter(pc.is_null(rows["skipped"])).sort_by(order)
    return _Judged(judged_rows, dict(skipped), surest)


def _surest_of(parts: list[pa.Table], most: int) -> pa.Table:
    mistakes = [part.filter(part["sure"].is_valid()) for part in parts if len(part)]
    if not mistakes:
        return pa.table({})
    together = pa.concat_tables(mistakes, promote_options="permissive")
    return together.sort_by([("sure", "descending"), ("id", "ascending")]).slice(0, most)


def _check_labels(task: Task, table: ImageTable, version: TableVersion, where: scan.Where) -> int:
    """How many rows there are. Raises DataError, before anything is predicted, where no class is
    one of the model's, or for a tag or a number that is none.
    """
    name = table.columns.label
    column = scan.rows(table, version, [name], where)[name]
    labels = label_column.read(column, task.kind, name).drop_null().to_pylist()
    if not labels:
        return len(column)
    if task.kind != "single_label":
        task.encode(labels)
    elif not {*labels} & {*task.classes}:
        raise _unknown(task, labels, name)
    return len(column)


def _unknown(task: Task, labels: Sequence[str], column: str) -> DataError:
    """The error where the model knows no class of a table: it may be another one's."""
    return DataError(
        "Labels that the model does not know",
        got=sorted({*labels})[:5],
        rule=f"None of the labels is one of its classes: {', '.join(task.classes)}",
        fix=f"Choose another model or table, or the column of labels, which is {column!r} now: "
        "table.columns.label; with a table of its own, evaluate.table.columns.label",
    )


def _mistakes(task: Task, surest: pa.Table) -> tuple[Mistake, ...]:
    """The surest mistakes as they are shown."""
    found = []
    for row in surest.to_pylist():
        scores_NC = np.array([row["scores"]], np.float32)
        predicted = task.predictions(scores_NC)[0]
        found.append(Mistake(row["id"], row["label"], predicted, row["sure"], row["png"]))
    return tuple(found)


def _values(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_integer(column.type) and _is_exact(column):
        column = column.cast(pa.float64())
    if pa.types.is_floating(column.type) or pa.types.is_timestamp(column.type):
        return column.to_numpy()
    return np.array(column.to_pylist(), dtype=object)


def _is_exact(column: pa.ChunkedArray) -> bool:
    """Are whole numbers so short that a float64 keeps them? Longer ones name things."""
    ends = pc.min_max(column).as_py()
    return ends["min"] is None or max(-ends["min"], ends["max"]) < 10**EXACT_DIGITS
