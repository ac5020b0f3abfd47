"""Encoded images in the order of the plan, holding no more row groups than its windows need.

A step names its samples a few steps before they are due: their row groups are then read in the background, each once, and
let go when the stream has passed the last window that needs them. What is in flight is counted in bytes.

Every image is checked against its sha256 when its row group is read. A group whose images were all as they should be is not
hashed again (2.4 % of the time that decoding takes) while its bytes still have the same sum: bits that flip and blocks that go
missing change it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raypipe.feed.buffers import Buffers
from raypipe.feed.dataset import Rows
from raypipe.feed.order import Step
from raypipe.tables import pages
from raypipe.tables.fragment import Fragment, Options, binary, located, read_bytes

AHEAD = 4  # steps between naming a row group and needing it
READERS = 2
MISMATCH = "its bytes do not match their sha256"

Broken = list[tuple[int, str]]  # (position, reason)


@dataclass(frozen=True)
class Encoded:
    """The stored bytes of a row group's images, by physical row; valid while referred to."""

    data: memoryview
    spans: pages.Spans

    def __getitem__(self, row: int) -> memoryview:
        start, end = self.spans[row]
        return self.data[start:end]

    @property
    def checksum(self) -> int:
        return int(np.frombuffer(self.data, np.uint64, count=len(self.data) // 8).sum())

    def broken(self, row_n: np.ndarray, sha256_n32: np.ndarray | None) -> Broken:
        """Positions in row_n of the images that are not what was stored once."""
        if sha256_n32 is None:
            return []
        hashed = ((n, hashlib.sha256(self[row]).digest()) for n, row in enumerate(row_n.tolist()))
        return [(n, MISMATCH) for n, digest in hashed if digest != sha256_n32[n].tobytes()]


def encoded(fragment: Fragment, column: str, storage_options: Options, buffers: Buffers | None = None) -> Encoded:
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
    return Encoded(memoryview(values_data or b""), list(itertools.pairwise(ends)))


class RowGroups:
    """A context manager; `steps(wanted)` yields (step, its samples' encoded bytes, which of them are broken).

    `intact` remembers from pass to pass what was checked.
    """

    def __init__(self, rows: Rows, intact: dict[int, int]) -> None:
        self._rows, self._intact = rows, intact
        self._bounds = np.concatenate(([0], np.cumsum(rows.sizes_F)))
        self._held: dict[int, Future[tuple[Encoded, dict[int, str]]]] = {}
        self._until: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="row-groups")
        self._buffers = Buffers(most=256)
        self.peak_bytes = 0

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held.clear()

    def steps(self, wanted: Iterator[Step]) -> Iterator[tuple[Step, list[memoryview], Broken]]:
        coming: deque[tuple[Step, list[int]]] = deque()
        for step in wanted:
            coming.append((step, self._want(step)))
            if len(coming) > AHEAD:
                yield self._take(*coming.popleft())
        while coming:
            yield self._take(*coming.popleft())

    def alternatives(self, sample: int) -> Iterator[tuple[int, memoryview]]:
        """The other samples of the row group, starting with the next one: what a broken image is replaced by."""
        group = int(np.searchsorted(self._bounds, sample, side="right")) - 1
        first, size = int(self._bounds[group]), int(self._rows.sizes_F[group])
        images, broken = self._read(group)
        assert self._rows.row_N is not None
        for n in range(1, size):
            other = first + (sample - first + n) % size
            if other not in broken:
                yield other, images[int(self._rows.row_N[other])]

    def _want(self, step: Step) -> list[int]:
        """Start to read the step's row groups; which of them each sample lies in."""
        groups = (np.searchsorted(self._bounds, step.samples_B, side="right") - 1).tolist()
        for group, until in zip(groups, step.until_B.tolist(), strict=True):
            self._until[group] = max(self._until.get(group, 0), until)
            if group not in self._held:
                self._held[group] = self._pool.submit(self._read, group)
                self.peak_bytes = max(self.peak_bytes, sum(self._rows.fragments[g].bytes for g in self._held))
        return groups

    def _take(self, step: Step, groups: Sequence[int]) -> tuple[Step, list[memoryview], Broken]:
        assert self._rows.row_N is not None
        held = {group: self._held[group].result() for group in set(groups)}
        rows = self._rows.row_N[step.samples_B].tolist()
        views = [held[group][0][row] for group, row in zip(groups, rows, strict=True)]
        broken = []
        if any(found for _, found in held.values()):
            at = zip(groups, step.samples_B.tolist(), strict=True)
            broken = [(slot, held[group][1][sample]) for slot, (group, sample) in enumerate(at) if sample in held[group][1]]
        for group in [g for g, until in self._until.items() if until <= step.done]:
            del self._held[group], self._until[group]
        return step, views, broken

    def _read(self, group: int) -> tuple[Encoded, dict[int, str]]:
        """A row group's images, and the samples of it that are broken."""
        rows = self._rows
        images = encoded(rows.fragments[group], rows.column, rows.storage_options, self._buffers)
        if rows.row_N is None or rows.sha256_N32 is None or self._intact.get(group) == (checksum := images.checksum):
            return images, {}
        first, last = self._bounds[group : group + 2].tolist()
        broken = images.broken(rows.row_N[first:last], rows.sha256_N32[first:last])
        if not broken:
            self._intact[group] = checksum
        return images, {first + n: reason for n, reason in broken}
