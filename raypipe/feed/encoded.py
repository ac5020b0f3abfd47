"""The images of one row group, as they are stored. Without torch and Ray, so that a task that reads them starts at once."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raypipe.feed.buffers import Buffers
from raypipe.tables import pages
from raypipe.tables.fragment import Fragment, Options, binary, located, read_bytes

MISMATCH = "its bytes do not match their sha256"
NOTHING = "its row holds no image"

Broken = list[tuple[int, str]]  # (position, reason)


@dataclass(frozen=True)
class Encoded:
    """The stored bytes of a row group's images, by physical row; valid while referred to."""

    data: memoryview
    spans: pages.Spans
    nulls: frozenset[int] = frozenset()

    def __getitem__(self, row: int) -> memoryview:
        start, end = self.spans[row]
        return self.data[start:end]

    @property
    def checksum(self) -> int:
        return int(np.frombuffer(self.data, np.uint64, count=len(self.data) // 8).sum())

    def broken(self, row_n: np.ndarray, sha256_n32: np.ndarray | None) -> Broken:
        """Positions in row_n of the images that are not what was stored once. A hash of zeros is none: not checked."""
        rows = row_n.tolist()
        found = (
            [(n, NOTHING) for n, row in enumerate(rows) if row in self.nulls] if self.nulls else []
        )
        known = np.flatnonzero(sha256_n32.any(1)).tolist() if sha256_n32 is not None else []
        for n in known:
            assert sha256_n32 is not None
            if rows[n] not in self.nulls and self.digest(rows[n]) != sha256_n32[n].tobytes():
                found.append((n, MISMATCH))
        return found

    def digest(self, row: int) -> bytes:
        """The sha256 of an image: what anything that is kept about it is kept under."""
        return hashlib.sha256(self[row]).digest()


def encoded(
    fragment: Fragment, column: str, storage_options: Options, buffers: Buffers | None = None
) -> Encoded:
    """A row group's images, as they are stored."""
    chunk = pages.chunk(*located(fragment, column, storage_options))
    if chunk is not None:
        lent = (buffers or Buffers()).take(chunk.size).data
        data = read_bytes(fragment, chunk.offset, lent, storage_options)
        if (spans := pages.spans(data, chunk.rows, chunk.nullable)) is not None:
            return Encoded(data, spans)
    values = binary(fragment, column, storage_options)
    _, offsets, values_data = values.buffers()
    width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    ends = np.frombuffer(offsets, width)[values.offset :][: len(values) + 1].tolist()
    nulls = (
        np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) if values.null_count else ()
    )
    return Encoded(
        memoryview(values_data or b""), list(itertools.pairwise(ends)), frozenset(map(int, nulls))
    )
