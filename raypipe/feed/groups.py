"""Encoded images in the order of the plan, holding no more row groups than its windows need.

A step names its samples a few steps before they are due: their row groups are then read in the background, each once, and
let go when the stream has passed the last window that needs them. What is in flight is counted in bytes.

Every image is checked against its sha256 when its row group is read. A group whose images were all as they should be is not
hashed again (2.4 % of the time that decoding takes) while its bytes still have the same sum: bits that flip and blocks that go
missing change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from raypipe.feed.buffers import Buffers
from raypipe.feed.dataset import Rows
from raypipe.feed.encoded import Broken, Encoded, encoded
from raypipe.feed.order import Step

AHEAD = 4  # steps between naming a row group and needing it
READERS = 2


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
