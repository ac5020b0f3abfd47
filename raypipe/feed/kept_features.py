"""The Delta table that keeps the features of one frozen backbone, beside the runs.

A row is (content, features, format). content is the sha256 of an image's stored bytes. The table's
name holds a hash of all that turns bytes into features (`backbone_hash`). Ids play no part: several
photographs under one id have several rows, and a new photograph under an old id has a new row.

FORMAT is part of the hash and of every row. Format 1 kept features under ids, in folders with other
names: it is never read, and its features are computed again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError
from raypipe.models.fingerprint import backbone_hash
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append

log = logging.getLogger("raypipe")

FORMAT = 2
COLUMNS = ("content", "features", "format")
Vectors = dict[bytes, np.ndarray]  # features by content


class KeptFeatures:
    """The kept features of one backbone. width: numbers per image."""

    def __init__(self, store: str, model: ModelConfig) -> None:
        # The weights are part of the table's name, so the model must be built.
        built = ImageModel(model, classes=2)
        self.width = built.head.linear.in_features
        weights = backbone_hash(model, built.backbone, FORMAT)
        self._store = Path(store)
        self._prefix = f"{model.slug}-{model.pixels}px-"
        self.uri = f"{store}/{self._prefix}{weights}"

    def read(self) -> Vectors:
        """All that is kept. Raises DataError for a table of another format or another backbone."""
        if not ImageTable.exists(self.uri):
            self._log_old_folders()
            return {}
        table = ImageTable(self.uri)
        pinned = table.pin()
        names = [field.name for field in table.at(pinned).schema().fields]

        # All rows must be of this format and width; a mixture would train on wrong features.
        if set(names) == set(COLUMNS):
            rows = scan.rows(table, pinned, names)
            vectors = self._vectors(rows)
            if vectors is not None:
                return vectors
        raise DataError(
            f"These kept features are not of format {FORMAT}, or not of this backbone",
            got=self.uri,
            rule="Kept features are read only if all rows are of this format and backbone",
            fix="Remove this folder: they are made again",
        )

    def _vectors(self, rows: pa.Table) -> Vectors | None:
        """The rows as vectors by content; None where they are not as this class writes them."""
        vectors: Vectors = {}
        columns = [rows[name].to_pylist() for name in COLUMNS]
        for content, features, format in zip(*columns, strict=True):
            if format == FORMAT:
                vectors[content] = np.frombuffer(features, np.float32)

        # A content that exists in another format only is missing here.
        complete = len(vectors) == len(rows["content"].unique())
        hashes = all(len(content) == 32 for content in vectors)
        widths = all(len(vector) == self.width for vector in vectors.values())
        return vectors if complete and hashes and widths else None

    def add(self, vectors: Vectors, why: str) -> None:
        """Keep more. Two runs may keep the same content at the same time: that does no harm."""
        features = [vector.astype(np.float32).tobytes() for vector in vectors.values()]
        rows = pa.table(
            {
                "content": pa.array(list(vectors), pa.binary()),
                "features": pa.array(features, pa.binary()),
                "format": pa.array([FORMAT] * len(vectors), pa.int32()),
            }
        )
        try:
            append(self.uri, rows, why)
        except Exception:  # deltalake's errors share no base
            # Another run may have made the table a moment ago.
            if not ImageTable.exists(self.uri):
                raise
            append(self.uri, rows, why)

    def _log_old_folders(self) -> None:
        """Name the folders of format 1, which may be removed."""
        for folder in sorted(self._store.glob(f"{self._prefix}*")):
            if not ImageTable.exists(str(folder)):
                continue
            names = [field.name for field in ImageTable(str(folder)).delta().schema().fields]
            if "image_id" in names:
                log.info(
                    "Features that an earlier raypipe kept under ids are made again: "
                    "%s may be removed",
                    folder,
                )
