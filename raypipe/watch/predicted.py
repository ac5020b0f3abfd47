"""A predicted batch, as drift checks take it: its images with their features and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.images.measure import SEEN
from raypipe.serve import batch
from raypipe.tables.table import TableVersion


@dataclass(frozen=True)
class Batch:
    """A predicted batch. Row i of the arrays is the image ids[i] with the hash sha256[i].

    looks_NK: the columns of `measure.SEEN`; None: not read. broken: images of the batch without a
    prediction, which are not here. groups: of each image, "" where it has none; None: not known.
    """

    version: TableVersion
    ids: list[str | None]
    sha256: list[str]
    features_ND: np.ndarray
    scores_NC: np.ndarray
    looks_NK: np.ndarray | None = None
    broken: int = 0
    groups: list[str] | None = None


def read_batch(
    version: TableVersion, uri: str, key: str, storage_options: dict[str, str] | None = None
) -> Batch:
    """The rows of one prediction; batch.predict returns its key.

    They are in the order of ids and hashes, which is the same whenever they are read. Images that
    do not decode have no features, and are left out.
    """
    columns = ["image_id", "sha256", "embedding", "scores", "error", *SEEN]
    rows = batch.read_rows(uri, key, columns, storage_options)
    predicted = len(rows)
    rows = rows.filter(pc.is_null(rows["error"])) if len(rows) else rows
    if not len(rows):
        raise DataError(
            f"No image of {version} decodes and has a finite answer: there is nothing to compare",
            fix="raypipe clean finds such images and tags a version without them",
        )
    rows = rows.sort_by([("image_id", "ascending"), ("sha256", "ascending")])
    features, scores = (np.stack(rows[name].to_numpy()) for name in ("embedding", "scores"))
    # A look that is not known is null there, and NaN here.
    looks_NK = np.stack([rows[name].cast(pa.float32()).to_numpy() for name in SEEN], axis=1)
    ids, hashes = rows["image_id"].to_pylist(), rows["sha256"].to_pylist()
    return Batch(version, ids, hashes, features, scores, looks_NK, predicted - len(rows))
