"""The rows of a batch of predictions, made in a worker process of Ray, and whole.

An image that does not decode is a row too, with `error` and without label, scores and embedding:
so a prediction has exactly the rows of the table that it predicts.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import RaypipeError, one_line
from raypipe.images import decode, measure
from raypipe.images.measure import LOOKS
from raypipe.registry.package import Attempt, Package
from raypipe.tables.table import Columns

FORMAT = 5
"""Of a row. Format 4 has no `state`; format 3 no `line`; format 2 no `error`, no looks, and one
commit a prediction; format 1 neither key nor sha256. Predictions of older formats are made again.
"""

SCHEMA = pa.schema(
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
        # Why there is no prediction of this image; null where there is one.
        ("error", pa.string()),
        # How it looks, as the model saw it (images/measure.py); width and height as it is stored.
        *((look, pa.float32()) for look in LOOKS),
        ("width", pa.int32()),
        ("height", pa.int32()),
        # The prediction's model, table and selection, whatever the version: those of one line can
        # add to each other. `version` is the number of the table's version, `state` a hash of its
        # files: after a restore from a backup the number may mean other rows.
        ("line", pa.string()),
        ("version", pa.int64()),
        ("state", pa.string()),
        # The prediction that this one adds to, or null.
        ("base", pa.string()),
        # True: the row of the base with this id and sha256 is not in this version any more.
        ("gone", pa.bool_()),
        # The part of the prediction, and its rows in all parts: with fewer it is not finished.
        ("part", pa.string()),
        ("rows", pa.int64()),
    ]
)
# Columns that each version of raypipe has written: a table without them is another one.
OLDEST = ("image_id", "label", "scores", "embedding", "classes", "model", "table")
# Equal in all rows of a part. They say which parts of which predictions a table has.
CONSTANT = ("line", "key", "base", "version", "state", "rows", "part", "gone")
GONE = "gone: not in the table any more"
# What differs from row to row; the rest is the same in all rows of a part.
OF_ROWS = (
    *("image_id", "label", "scores", "embedding", "sha256", "error"),
    *LOOKS,
    *("width", "height"),
)


def predicted(package: Package, batch: pa.Table, names: Columns, threads: int = 1) -> pa.Table:
    """The columns OF_ROWS of one batch of images (columns id and image), in its order."""
    images = batch[names.image].to_pylist()
    attempt = attempted(package, images, batch[names.id].to_pylist(), threads)
    predictions = attempt.predictions
    good = np.array(attempt.good, dtype=np.int64)

    # Each image has a label or an error.
    labels: list[str | None] = [None] * len(images)
    errors: list[str | None] = [None] * len(images)
    for place, label in zip(attempt.good, predictions.labels, strict=True):
        labels[place] = label
    for place, error in attempt.errors.items():
        errors[place] = error
    sizes = [decode.size(image) or (None, None) for image in images]
    columns = {
        "image_id": batch[names.id].cast(pa.string()).combine_chunks(),
        "label": pa.array(labels, pa.string()),
        "scores": vectors(predictions.scores_NC, good, len(images)),
        "embedding": vectors(predictions.features_ND, good, len(images)),
        "sha256": pa.array([_sha256(image) for image in images], pa.string()),
        "error": pa.array(errors, pa.string()),
    }
    # Only a decoded image looks like anything.
    for look, values in measure.statistics(attempt.pixels_NHWC).items():
        all_N = np.full(len(images), np.nan, np.float32)
        all_N[good] = values
        columns[look] = pa.array(all_N, pa.float32(), from_pandas=True)  # NaN becomes null
    columns["width"] = pa.array([width for width, _ in sizes], pa.int32())
    columns["height"] = pa.array([height for _, height in sizes], pa.int32())
    return pa.table([columns[name] for name in OF_ROWS], names=list(OF_ROWS))


def attempted(
    package: Package, images: list[bytes | None], names: list[str | None], threads: int
) -> Attempt:
    """What the model says; an image that it has no finite answer to is an error, like a broken one.

    Raises for a model whose code fails, and for one that has no finite answer to any image, as
    Package.attempt_finite does.
    """
    try:
        return package.attempt_finite(images, threads)
    except RaypipeError as e:
        raise _naming(e, package, images, names) from e


def _naming(
    error: RaypipeError, package: Package, images: list[bytes | None], names: list[str | None]
) -> RaypipeError:
    """The error of a model that fails on a batch, with the first image that it fails on alone."""
    for image, name in zip(images, names, strict=True):
        try:
            package.attempt([image], 1)
        except RaypipeError:
            what = f"{error.what}; image {one_line(name, 100)!r} alone is enough"
            return type(error)(what, got=error.got, rule=error.rule, fix=error.fix)
    return error


def gone(names: list[str | None], hashes: list[str | None]) -> pa.Table:
    """Rows that say: the base's row of this id and sha256 is not in this version."""
    rows = pa.table(
        {"image_id": pa.array(names, pa.string()), "sha256": pa.array(hashes, pa.string())}
    )
    return rows.append_column("error", pa.repeat(GONE, len(rows)))


def whole(tables: list[pa.Table], same: dict[str, Any]) -> pa.Table:
    """The rows of a part in SCHEMA. same: columns with one value; null where neither has one."""
    rows = pa.concat_tables(tables).combine_chunks()
    columns: list[pa.Array | pa.ChunkedArray] = []
    for field in SCHEMA:
        if field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        elif same.get(field.name) is None:
            columns.append(pa.nulls(len(rows), field.type))
        else:
            columns.append(pa.repeat(pa.scalar(same[field.name], field.type), len(rows)))
    return pa.table(columns, SCHEMA)


def vectors(values_ND: np.ndarray, good: np.ndarray, rows: int) -> pa.Array:
    """A list for each row of the batch; null for rows that are not in `good`.

    The numbers are not converted one by one: 100,000 embeddings of 1,280 numbers would take 4 GB as
    Python objects.
    """
    is_good = np.zeros(rows, bool)
    is_good[good] = True
    # A null has no numbers. A batch is small, so int32 offsets do not overflow.
    lengths = is_good.astype(np.int32) * values_ND.shape[1]
    ends = np.cumsum(lengths, dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), ends])
    numbers = pa.array(values_ND.astype(np.float32).ravel())
    is_null = ~is_good
    return pa.ListArray.from_arrays(pa.array(offsets), numbers, mask=pa.array(is_null))


def _sha256(image: bytes | None) -> str | None:
    return None if image is None else hashlib.sha256(image).hexdigest()
