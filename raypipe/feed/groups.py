"""Encoded images in the order of the plan, holding no more row groups than its windows need.

A step names its samples a few steps before they are due: their row groups are then read in the background, each once, and
let go when the stream has passed the last window that needs them. What is in flight is counted in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from raypipe.feed.dataset import Rows
from raypipe.feed.order import Step
from raypipe.tables.fragment import Fragment, binary

AHEAD = 4  # steps between naming a row group and needing it
READERS = 2


class RowGroups:
    """A context manager; `steps(wanted)` yields (step, its samples' encoded bytes), which stay valid while referred to."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._bounds = np.concatenate(([0], np.cumsum(rows.sizes_F)))
        self._held: dict[int, Future[pa.Array]] = {}
        self._until: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="row-groups")
        self.peak_bytes = 0

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held.clear()

    def steps(self, wanted: Iterator[Step]) -> Iterator[tuple[Step, list[memoryview]]]:
        coming: deque[Step] = deque()
        for step in wanted:
            self._want(step)
            coming.append(step)
            if len(coming) > AHEAD:
                yield self._take(coming.popleft())
        while coming:
            yield self._take(coming.popleft())

    def alternatives(self, sample: int) -> Iterator[tuple[int, memoryview]]:
        """The other samples of the row group, starting with the next one: what a broken image is replaced by."""
        group = int(np.searchsorted(self._bounds, sample, side="right")) - 1
        first, size = int(self._bounds[group]), int(self._rows.sizes_F[group])
        values = self._read(self._rows.fragments[group])
        for n in range(1, size):
            other = first + (sample - first + n) % size
            yield other, self._views(values, [other])[0]

    def _want(self, step: Step) -> None:
        for group, until in zip(self._groups(step), step.until_B.tolist(), strict=True):
            self._until[group] = max(self._until.get(group, 0), until)
            if group not in self._held:
                self._held[group] = self._pool.submit(self._read, self._rows.fragments[group])
                self.peak_bytes = max(self.peak_bytes, sum(self._rows.fragments[g].bytes for g in self._held))

    def _take(self, step: Step) -> tuple[Step, list[memoryview]]:
        groups = np.asarray(self._groups(step), dtype=np.int64)
        views: list[memoryview] = [memoryview(b"")] * len(groups)
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            for slot, view in zip(mine.tolist(), self._views(self._held[group].result(), step.samples_B[mine]), strict=True):
                views[slot] = view
        for group in [g for g, until in self._until.items() if until <= step.done]:
            del self._held[group], self._until[group]
        return step, views

    def _groups(self, step: Step) -> list[int]:
        return (np.searchsorted(self._bounds, step.samples_B, side="right") - 1).tolist()  # type: ignore[no-any-return]

    def _read(self, fragment: Fragment) -> pa.Array:
        return binary(fragment, self._rows.column, self._rows.storage_options)

    def _views(self, values: pa.Array, samples: np.ndarray | list[int]) -> list[memoryview]:
        assert self._rows.row_N is not None
        _, offsets, data = values.buffers()
        width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
        ends, view = np.frombuffer(offsets, width)[values.offset :], memoryview(data or b"")
        return [view[ends[row] : ends[row + 1]] for row in self._rows.row_N[samples].tolist()]
