"""Judges one batch of labelled images: the rows of an evaluation.

Runs in the worker processes of Ray Data; evaluation.py puts the rows together.

Letters in names: N images, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raypipe.images import decode, measure
from raypipe.models import metrics
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import NOT_FINITE, Attempt, Package
from raypipe.serve.predicted_rows import attempted, vectors
from raypipe.tables import label_column
from raypipe.tables.table import Columns

LOOKS = ("brightness", "contrast", "sharpness", "megapixels")
COLUMN = "column:"  # before the name of a column of slices
GROUP = "group"  # what names an image's group
# Digits of a whole number of which a float64 keeps all.
EXACT_DIGITS = 15


def judged(
    package: Package,
    batch: pa.Table,
    names: Columns,
    columns: list[str],
    most: int,
    group: str | None = None,
) -> pa.Table:
    """One row for each image of the batch.

    Columns: id, label (text), scores; skipped (why there are none, else null); sure and png, of the
    `most` surest mistakes; how the image looks; `column:NAME` for each of `columns`; and of the
    column `group` its text.
    """
    task = package.task
    labels = label_column.read(batch[names.label], task.kind, names.label).to_pylist()
    labelled = [i for i, label in enumerate(labels) if label is not None]
    images = batch[names.image].take(pa.array(labelled, pa.int64())).to_pylist()
    ids = batch[names.id].cast(pa.string())
    attempt = attempted(package, images, ids.take(pa.array(labelled, pa.int64())).to_pylist(), 1)
    places = [labelled[i] for i in attempt.good]

    # Every row of the batch has its place: judged, or skipped for a reason.
    skipped: list[str | None] = ["without a label"] * len(labels)
    for i in labelled:
        skipped[i] = "do not decode"
    for i, why in attempt.errors.items():
        if why == NOT_FINITE:
            skipped[labelled[i]] = "without a finite answer"
    for place in places:
        skipped[place] = None
    # The surest mistakes of the batch: those of all batches are among them.
    sure: list[float | None] = [None] * len(labels)
    png: list[bytes | None] = [None] * len(labels)
    for n, confidence in _surest(task, attempt, [labels[i] for i in places], most):
        sure[places[n]] = confidence
        png[places[n]] = decode.encode_png(attempt.pixels_NHWC[n])

    made = {
        "id": ids,
        "label": pa.array(labels, pa.string()),
        "skipped": pa.array(skipped, pa.string()),
        "scores": vectors(attempt.predictions.scores_NC, np.array(places, np.int64), len(labels)),
        "sure": pa.array(sure, pa.float64()),
        "png": pa.array(png, pa.binary()),
    }
    for look, values in _looks(attempt, images).items():
        all_N = np.full(len(labels), np.nan, np.float32)
        all_N[places] = values
        made[look] = pa.array(all_N)
    for column in columns:
        made[COLUMN + column] = _slice_values(batch[column])
        # Labels are read as text, whatever the column's type is.
        if column == names.label and task.kind in NUMERIC:
            numbers = [None if label is None else float(label) for label in labels]
            made[COLUMN + column] = pa.array(numbers, pa.float64())
    if group is not None:
        made[GROUP] = _texts(batch[group])
    return pa.table(made)


def _looks(attempt: Attempt, images: list[bytes]) -> dict[str, np.ndarray]:
    """How the good images look: as the model saw them, and how large they are stored."""
    looks = measure.statistics(attempt.pixels_NHWC)
    megapixels = []
    for i in attempt.good:
        width, height = decode.size(images[i]) or (0, 0)
        megapixels.append(width * height / 1e6)
    return looks | {"megapixels": np.array(megapixels, np.float32)}


def _slice_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whole numbers as they are, others as float64, days and times as timestamps, all else as text;
    nulls stay.
    """
    kind = column.type
    if pa.types.is_integer(kind):
        return column
    # Of a long whole number a float64 would keep the first digits: it names things.
    is_name = pa.types.is_decimal(kind) and kind.scale <= 0 and kind.precision > EXACT_DIGITS
    if (pa.types.is_floating(kind) or pa.types.is_decimal(kind)) and not is_name:
        return column.cast(pa.float64())
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        # UTC, whatever zone the column names.
        zone = getattr(kind, "tz", None)
        in_zone = column.cast(pa.timestamp("us", zone))
        return in_zone.cast(pa.timestamp("us"))
    return _texts(column)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text; null for a null, and for NaN."""
    values = column.to_pylist()
    texts = [None if value is None or value != value else str(value) for value in values]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _surest(task: Task, attempt: Attempt, labels: list[Any], most: int) -> list[tuple[int, float]]:
    """(place, how sure) of the most confident mistakes among the good images."""
    if not labels:
        return []
    targets_NC = targets(task, labels)
    sure_N = confidence_of_mistakes(task, attempt.predictions.scores_NC, targets_NC)
    surest = np.argsort(-sure_N, kind="stable")[:most].tolist()
    return [(place, float(sure_N[place])) for place in surest if sure_N[place] > 0]


def confidence_of_mistakes(task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray) -> np.ndarray:
    """How sure the model is of each mistake, 0 for what is right; for numbers, the error."""
    if task.kind in NUMERIC:
        predicted_N = scores_NC[:, 0].astype(np.float64)
        return np.abs(predicted_N - targets_NC[:, 0])
    is_set_NC = targets_NC >= 0.5
    wrong_NC = metrics.decided(task, scores_NC) != is_set_NC
    if not wrong_NC.size:
        return np.zeros(len(scores_NC))
    if task.kind == "multi_label":
        # A tag may be missing with certainty, too.
        sure_NC = np.maximum(scores_NC, 1 - scores_NC)
        return np.where(wrong_NC, sure_NC, 0).max(1)
    # The highest score is that of the class it said.
    is_wrong_N = wrong_NC.any(1)
    return np.where(is_wrong_N, scores_NC.max(1), 0)


def targets(task: Task, labels: list[Any]) -> np.ndarray:
    """As Task.targets gives them. A class that the model does not know is zeros, so that whatever
    the model says of the image is wrong."""
    if task.kind != "single_label":
        return task.targets(torch.tensor(task.encode(labels))).numpy()
    place_of = {name: place for place, name in enumerate(task.classes)}
    targets_NC = np.zeros((len(labels), len(task.classes)), np.float32)
    for n, label in enumerate(labels):
        if label in place_of:
            targets_NC[n, place_of[label]] = 1
    return targets_NC
