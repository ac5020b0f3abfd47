"""The images of one row group as they are stored: encoded bytes, hashed and checked.

This module imports neither torch nor Ray, so that a task that reads images starts at once.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raypipe.feed.buffers import Buffers
from raypipe.tables import pages
from raypipe.tables.fragment import Fragment, Options, binary, read_bytes

MISMATCH = "its bytes do not match their sha256"
NOTHING = "its row holds no image"

Broken = list[tuple[int, str]]  # (position, reason)


@dataclass(frozen=True)
class Encoded:
    """The stored bytes of a row group's images, by physical row.

    spans: (start, end) in `data` of each row's image. The memory is used again when nothing refers
    to this object or its views.
    """

    data: memoryview
    spans: pages.Spans
    nulls: frozenset[int] = frozenset()

    def __getitem__(self, row: int) -> memoryview:
        start, end = self.spans[row]
        return self.data[start:end]

    @property
    def checksum(self) -> int:
        """The sum of all bytes, eight at a time: cheaper than a hash, and it shows damage."""
        return int(np.frombuffer(self.data, np.uint64, count=len(self.data) // 8).sum())

    def broken(self, row_n: np.ndarray, sha256_n32: np.ndarray | None) -> Broken:
        """Positions in row_n of images that are null or do not match their sha256.

        A sha256 of zeros stands for an unknown one: that image is not checked.
        """
        rows = row_n.tolist()
        broken: Broken = []
        if self.nulls:
            broken += [(n, NOTHING) for n, row in enumerate(rows) if row in self.nulls]
        if sha256_n32 is None:
            return broken

        known = np.flatnonzero(sha256_n32.any(1)).tolist()
        for n in known:
            row = rows[n]
            if row not in self.nulls and self.digest(row) != sha256_n32[n].tobytes():
                broken.append((n, MISMATCH))
        return broken

    def digest(self, row: int) -> bytes:
        """The sha256 of an image's stored bytes: the key of everything kept about the image."""
        return hashlib.sha256(self[row]).digest()


def encoded(
    fragment: Fragment, column: str, storage_options: Options, buffers: Buffers | None = None
) -> Encoded:
    """Read a row group's images."""
    # Usual case: plain Parquet pages. The images are used where they lie in the file's bytes.
    chunk = fragment.chunk
    if chunk is not None and fragment.image == column:
        memory = (buffers or Buffers()).take(chunk.size).data
        data = read_bytes(fragment, chunk.offset, memory, storage_options)
        spans = pages.spans(data, chunk.rows, chunk.nullable)
        if spans is not None:
            return Encoded(data, spans)

    # Compressed or dictionary-encoded pages: pyarrow decodes the column.
    values = binary(fragment, column, storage_options)
    _, offsets, values_data = values.buffers()

    # Arrow's offsets: image i lies between offset i and offset i + 1.
    width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    first = values.offset
    ends = np.frombuffer(offsets, width)[first : first + len(values) + 1].tolist()
    null_rows: list[int] = []
    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        null_rows = np.flatnonzero(is_null).tolist()
    data = memoryview(values_data or b"")
    return Encoded(data, list(itertools.pairwise(ends)), frozenset(null_rows))
