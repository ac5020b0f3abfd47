"""The Delta table that keeps the features of one frozen backbone, beside the runs.

A row is (content, features, format). content is the sha256 of an image's stored bytes. The table's
name holds a hash of all that turns bytes into features (`backbone_hash`). Ids play no part: several
photographs under one id have several rows, and a new photograph under an old id has a new row.

FORMAT is part of the hash and of every row. Format 1 kept features under ids, in folders with other
names: it is never read, and its features are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raypipe.errors import DataError
from raypipe.models.fingerprint import backbone_hash
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableVersion, append

log = logging.getLogger("raypipe")

FORMAT = 2
COLUMNS = ("content", "features", "format")


@dataclass(frozen=True)
class Kept:
    """What was kept at one time.

    contents: sha256 of each row, fixed binary of 32 bytes. features: features_nD of the same rows
    in the same order, in parts; they are read when they are asked for.
    """

    contents: pa.Array
    features: Iterator[np.ndarray]


def build(model: ModelConfig) -> ImageModel:
    """The model whose backbone makes the features; each process builds its own.

    A factory may draw a tensor that no image passes: it is the same each time.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ImageModel(model, classes=2)


class KeptFeatures:
    """The kept features of one backbone. width: numbers per image. backbone: its hash."""

    def __init__(self, store: str, model: ModelConfig) -> None:
        # The weights are part of the table's name, so the model must be built.
        built = build(model)
        self.width = built.head.features
        self.backbone = backbone_hash(model, built.backbone, FORMAT)
        self._store = Path(store)
        self._prefix = f"{model.slug}-{model.pixels}px-"
        self.uri = f"{store}/{self._prefix}{self.backbone}"

    def read(self) -> Kept:
        """What is kept now. Raises DataError for a table of another format or another backbone."""
        if not ImageTable.exists(self.uri):
            self._log_old_folders()
            return Kept(as_contents(b""), iter(()))
        table = ImageTable(self.uri)
        pinned = table.pin()
        names = {field.name for field in table.at(pinned).schema().fields}

        # All rows must be of this format and width; a mixture would train on wrong features.
        if names != set(COLUMNS):
            raise self._other_format()
        rows = scan.rows(table, pinned, ["content", "format"])
        contents = rows["content"].filter(pc.equal(rows["format"], FORMAT))
        # A content that exists in another format only is missing here.
        if len(contents) < len(rows) and len(contents.unique()) < len(rows["content"].unique()):
            raise self._other_format()
        joined = b"".join(_joined(chunk, 32) or b"" for chunk in contents.chunks)
        if len(joined) != 32 * len(contents):
            raise self._other_format()
        return Kept(as_contents(joined), self._features(table, pinned))

    def _features(self, table: ImageTable, pinned: TableVersion) -> Iterator[np.ndarray]:
        """features_nD of the rows of this format, a row group at a time."""
        for rows in scan.each(table, pinned, ["features", "format"]):
            features = rows["features"].filter(pc.equal(rows["format"], FORMAT)).combine_chunks()
            joined = _joined(features, 4 * self.width)
            if joined is None:
                raise self._other_format()
            yield np.frombuffer(joined, np.float32).reshape(-1, self.width)

    def _other_format(self) -> DataError:
        return DataError(
            f"These kept features are not of format {FORMAT}, or not of this backbone",
            got=self.uri,
            rule="Kept features are read only if all rows are of this format and backbone",
            fix="Remove this folder: they are made again",
        )

    def add(self, contents: Sequence[bytes], features_nD: np.ndarray, why: str) -> None:
        """Keep more. Two runs may keep the same content at the same time: that does no harm."""
        features_nB = np.ascontiguousarray(features_nD, np.float32).view(np.uint8)
        rows = pa.table(
            {
                "content": pa.array(contents, pa.binary()),
                "features": pa.array([row.tobytes() for row in features_nB], pa.binary()),
                "format": pa.array([FORMAT] * len(contents), pa.int32()),
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


def as_contents(joined: bytes | np.ndarray) -> pa.Array:
    """Hashes that lie end to end as an Arrow column, which finds them faster than a dict."""
    data = pa.py_buffer(joined)
    return pa.Array.from_buffers(pa.binary(32), data.size // 32, [None, data])


def _joined(values: pa.Array, width: int) -> memoryview | None:
    """The bytes of a binary column, end to end; None unless each value has `width` bytes."""
    lengths = pc.binary_length(values)
    if values.null_count or not pc.all(pc.equal(lengths, width), min_count=0).as_py():
        return None
    if not len(values):
        return memoryview(b"")
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, offset_type)[values.offset : values.offset + len(values) + 1]
    return memoryview(data or b"")[int(ends[0]) : int(ends[-1])]
