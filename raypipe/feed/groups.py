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
        """What a broken image is replaced by, best first: see `stand_ins`."""
        assert self._rows.row_N is not None
        held: tuple[int, Encoded, dict[int, str]] | None = None
        for group, other in stand_ins(self._bounds, sample):
            if held is None or held[0] != group:
                held = group, *self._read(group)
            if other not in held[2]:
                yield other, held[1][int(self._rows.row_N[other])]

    def _want(self, step: Step) -> list[int]:
        """Start to read the step's row groups; which of them each sample lies in."""
        groups = (np.searchsorted(self._bounds, step.samples_B, side="right") - 1).tolist()
        for group, until in zip(groups, step.until_B.tolist(), strict=True):
            self._until[group] = max(self._until.get(group, 0), until)
            if group not in self._held:
                self._held[group] = self._pool.submit(self._read, group)
                self.peak_bytes = max(
                    self.peak_bytes, sum(self._rows.fragments[g].bytes for g in self._held)
                )
        return groups

    def _take(self, step: Step, groups: Sequence[int]) -> tuple[Step, list[memoryview], Broken]:
        assert self._rows.row_N is not None
        held = {group: self._held[group].result() for group in set(groups)}
        rows = self._rows.row_N[step.samples_B].tolist()
        views = [held[group][0][row] for group, row in zip(groups, rows, strict=True)]
        broken = []
        if any(found for _, found in held.values()):
            at = zip(groups, step.samples_B.tolist(), strict=True)
            broken = [
                (slot, held[group][1][sample])
                for slot, (group, sample) in enumerate(at)
                if sample in held[group][1]
            ]
        for group in [g for g, until in self._until.items() if until <= step.done]:
            del self._held[group], self._until[group]
        return step, views, broken

    def _read(self, group: int) -> tuple[Encoded, dict[int, str]]:
        """A row group's images, and the samples of it that are broken."""
        rows = self._rows
        images = encoded(rows.fragments[group], rows.column, rows.storage_options, self._buffers)
        checksum = None if rows.sha256_N32 is None else images.checksum
        if rows.row_N is None or (checksum is not None and self._intact.get(group) == checksum):
            return images, {}
        first, last = self._bounds[group : group + 2].tolist()
        digests = None if rows.sha256_N32 is None else rows.sha256_N32[first:last]
        broken = images.broken(rows.row_N[first:last], digests)
        if not broken and checksum is not None:
            self._intact[group] = checksum
        return images, {first + n: reason for n, reason in broken}


def stand_ins(bounds: np.ndarray, sample: int) -> Iterator[tuple[int, int]]:
    """(row group, sample) of what may take a broken image's place, for every carrier alike: the other images of its row group
    from the next one on, then those of the row groups behind it, around the table. bounds: where each row group begins."""
    groups = len(bounds) - 1
    own = int(np.searchsorted(bounds, sample, side="right")) - 1
    first, last = bounds[own : own + 2].tolist()
    yield from ((own, other) for other in (*range(sample + 1, last), *range(first, sample)))
    for group in (*range(own + 1, groups), *range(own)):
        yield from ((group, other) for other in range(*bounds[group : group + 2].tolist()))
