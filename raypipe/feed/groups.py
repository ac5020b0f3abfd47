"""Reads row groups in the order of the plan, and holds no more of them than its windows need.

How it works, for each planned step:
1. `_request`: AHEAD steps before the step is due, start to read its row groups in the background.
   Each row group is read once, however many steps need it.
2. `_take`: when the step is due, wait for its row groups and give out its encoded images.
3. Drop each row group whose last window the stream has passed (`Step.until_B`).

Only the consumer's thread touches `_reads` and `_until`; the reader threads run `_read` only.
peak_bytes is the most encoded bytes that the row groups held took at a time.

Every image is compared with its sha256 when its row group is read. Hashing takes 2.4 % of the time
of decoding. So a row group whose images all matched is not hashed again while the sum of its bytes
stays the same: flipped bits and missing blocks change that sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from raypipe.feed.buffers import Buffers
from raypipe.feed.encoded import Broken, Encoded, encoded
from raypipe.feed.order import Step
from raypipe.feed.rows import Rows

AHEAD = 4  # steps between the request for a row group and its use
READERS = 2  # threads

Group = tuple[Encoded, dict[int, str]]  # its images, and the reason by broken sample


class RowGroups:
    """A context manager; `steps` yields (step, its samples' encoded bytes, which are broken).

    intact: the checksum of each row group whose images all matched; the caller keeps it from pass
    to pass.
    """

    def __init__(self, rows: Rows, intact: dict[int, int]) -> None:
        self._rows = rows
        self._intact = intact
        self._bounds = rows.bounds
        self._reads: dict[int, Future[Group]] = {}  # by row group
        self._until: dict[int, int] = {}  # the position at which a row group is used up
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="row-groups")
        self._buffers = Buffers(most=256)
        self.peak_bytes = 0

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reads.clear()

    def steps(self, steps: Iterator[Step]) -> Iterator[tuple[Step, list[memoryview], Broken]]:
        requested: deque[tuple[Step, list[int]]] = deque()
        for step in steps:
            requested.append((step, self._request(step)))
            if len(requested) > AHEAD:
                yield self._take(*requested.popleft())
        while requested:
            yield self._take(*requested.popleft())

    def alternatives(self, sample: int) -> Iterator[tuple[int, memoryview]]:
        """(sample, encoded bytes) of what may replace a broken image, best first: `stand_ins`."""
        assert self._rows.row_N is not None
        current: int | None = None
        for group, other in stand_ins(self._bounds, sample):
            if group != current:
                images, broken = self._read(group)
                current = group
            if other not in broken:
                yield other, images[int(self._rows.row_N[other])]

    def _request(self, step: Step) -> list[int]:
        """Start to read the step's row groups; returns the row group of each sample."""
        group_B = np.searchsorted(self._bounds, step.samples_B, side="right") - 1
        groups: list[int] = group_B.tolist()
        for group, until in zip(groups, step.until_B.tolist(), strict=True):
            # A later window of the same row group needs it for longer.
            self._until[group] = max(self._until.get(group, 0), until)
            if group in self._reads:
                continue
            self._reads[group] = self._pool.submit(self._read, group)
            held_bytes = sum(self._rows.fragments[g].bytes for g in self._reads)
            self.peak_bytes = max(self.peak_bytes, held_bytes)
        return groups

    def _take(self, step: Step, groups: list[int]) -> tuple[Step, list[memoryview], Broken]:
        """The images of a step whose row groups were requested. groups: of each sample."""
        assert self._rows.row_N is not None
        read = {group: self._reads[group].result() for group in set(groups)}

        views: list[memoryview] = []
        broken: Broken = []
        rows = self._rows.row_N[step.samples_B].tolist()
        samples = step.samples_B.tolist()
        slots = zip(groups, rows, samples, strict=True)
        for slot, (group, row, sample) in enumerate(slots):
            images, reasons = read[group]
            views.append(images[row])
            if sample in reasons:
                broken.append((slot, reasons[sample]))

        # Drop the row groups that no later step needs.
        used_up = [group for group, until in self._until.items() if until <= step.done]
        for group in used_up:
            del self._reads[group], self._until[group]
        return step, views, broken

    def _read(self, group: int) -> Group:
        """Read one row group and check its images. Runs in a reader thread."""
        rows = self._rows
        images = encoded(rows.fragments[group], rows.column, rows.storage_options, self._buffers)
        if rows.row_N is None:
            return images, {}
        samples = rows.samples(group)

        # Without hashes, only null images can be detected.
        if rows.hash_field is None:
            broken = images.broken(rows.row_N[samples], None)
            return images, _by_sample(broken, samples.start)

        # The same bytes as when all images matched: nothing to hash.
        checksum = images.checksum
        if self._intact.get(group) == checksum:
            return images, {}
        broken = images.broken(rows.row_N[samples], rows.digests(group))
        if not broken:
            self._intact[group] = checksum
        return images, _by_sample(broken, samples.start)


def _by_sample(broken: Broken, first: int) -> dict[int, str]:
    """Reasons by sample, of positions in a row group whose first sample is `first`."""
    return {first + place: reason for place, reason in broken}


def stand_ins(bounds: np.ndarray, sample: int) -> Iterator[tuple[int, int]]:
    """(row group, sample) of what may replace a broken image, best first, for every loader alike.

    First the other images of its row group, from the next one on. Then those of the following row
    groups, around the table. bounds: where each row group begins, and the number of samples.
    """
    # First its own row group.
    own = int(np.searchsorted(bounds, sample, side="right")) - 1
    first, last = bounds[own : own + 2].tolist()
    behind = range(sample + 1, last)
    before = range(first, sample)
    for other in (*behind, *before):
        yield own, other

    # Then the others, from the next one on.
    groups = len(bounds) - 1
    groups_behind = range(own + 1, groups)
    groups_before = range(own)
    for group in (*groups_behind, *groups_before):
        first, last = bounds[group : group + 2].tolist()
        for other in range(first, last):
            yield group, other
