"""Claim: 100 million images are pinned, located and put in order in at most 60 s and 2 GB.

The table is that of table.py: 300,000 files of 333 rows, here in row groups of at most 128 as
raypipe writes them; 1,000 classes; each file has 331 rows of train, one of val and one of test. No
file exists but one. Its columns, read once and copied for each file, stand for what reading the
others would return. So the seconds are those of raypipe's own handling, and of the copies:
`copies_s`, by one thread that does nothing else. Reading comes on top:
`read_s_per_1000_files` is what one thread takes here to read label and split of real files from the
page cache.

sent_mb: what each node gets of the rows: pickled, with the arrays. first_batch_s: from the rows to
the plan of a worker's first batch, one of 64.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.scale.memory import peak_mb
from benchmarks.scale.table import made, simulate_footers

SPLITS = "train", "val", "test"
ROWS_PER_GROUP = 128  # as raypipe writes tables
BATCH, WORLD = 4096, 64
REAL_READS = 1000
Hashes = Callable[[str], pa.Array]


class OneFile:
    """Stands for the open file of any fragment: its columns are copies of the real one's.

    hashes: the column sha256 of a file, by its path; None: that of the real file.
    """

    def __init__(self, real: Path, hashes: Hashes | None = None) -> None:
        import pyarrow.parquet as pq

        self._columns = pq.read_table(real, partitioning=None)
        self._hashes = hashes
        self._path = ""
        self.schema_arrow = self._columns.schema

    def at(self, path: str) -> OneFile:
        """This file under another path."""
        other = copy(self)
        other._path = path
        return other

    def read_row_group(self, row_group: int, columns: list[str], **more: Any) -> pa.Table:
        return self.read_row_groups([row_group], columns, **more)

    def read_row_groups(self, row_groups: list[int], columns: list[str], **_: Any) -> pa.Table:
        """Of its own memory, as a real read."""
        first = min(row_groups) * ROWS_PER_GROUP
        end = min((max(row_groups) + 1) * ROWS_PER_GROUP, len(self._columns))
        read = self._columns.select(columns).take(np.arange(first, end))
        if self._hashes is not None and "sha256" in columns:
            at = read.schema.get_field_index("sha256")
            read = read.set_column(at, "sha256", self._hashes(self._path).slice(first, end - first))
        return read


def simulate_reads(folder: Path, hashes: Hashes | None = None) -> None:
    """Let all files read as the real one does."""
    from raypipe.feed import locate
    from raypipe.tables import fragment

    real = next(folder.glob("*.parquet"))
    one = OneFile(real, hashes)
    encoded = locate.encoded
    fragment.open_file = lambda _, path, *rest: one.at(path)
    locate.encoded = lambda group, *rest: encoded(replace(group, image=""), *rest)


def read_seconds(folder: Path, footer: bytes) -> float:
    """Seconds to open a real file a thousand times and to read its label and split."""
    from raypipe.tables import fragment

    real = str(next(folder.glob("*.parquet")))
    began = time.perf_counter()
    for _ in range(REAL_READS):
        with fragment.new_file(str(folder), real, None, footer) as file:
            file.read_row_groups([0, 1, 2], columns=["label", "split"], use_threads=False)
    return (time.perf_counter() - began) / REAL_READS * 1000


def copies_seconds(folder: Path, files: int) -> float:
    """Seconds that the copies of so many files' columns take, extrapolated from a thousand."""
    one = OneFile(next(folder.glob("*.parquet")))
    began = time.perf_counter()
    for _ in range(REAL_READS):
        one.at("").read_row_groups([0, 1, 2], columns=["label", "split"])
    return (time.perf_counter() - began) / REAL_READS * files


def sent_mb(rows: Any) -> float:
    """The pickled rows, with their arrays."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(rows, protocol=5, buffer_callback=buffers.append)
    return (len(data) + sum(buffer.raw().nbytes for buffer in buffers)) / 1e6


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, float]:
    from raypipe.feed.dataset import FeedConfig, pin
    from raypipe.feed.locate import locate
    from raypipe.tables import scan
    from raypipe.tables.table import ImageTable, TableConfig

    folder = made(temporary, sizes["files"], ROWS_PER_GROUP)
    found: dict[str, float] = {"images": sizes["files"] * 333}
    table = ImageTable.open(TableConfig(uri=str(folder)))
    simulate_footers(folder, table.snapshot(table.pin()).schema())
    footer = scan.plan(table, table.pin())[0][0].footer
    assert footer is not None
    found["read_s_per_1000_files"] = read_seconds(folder, footer)
    found["copies_s"] = copies_seconds(folder, sizes["files"])
    simulate_reads(folder)
    del table
    before = peak_mb(reset=True)

    def lap(name: str, began: float) -> float:
        now = time.perf_counter()
        found[f"{name}_s"] = now - began
        found[f"{name}_mb"] = peak_mb() - before
        return now

    began = now = time.perf_counter()
    pinned = pin(TableConfig(uri=str(folder)), FeedConfig())
    now = lap("pin", now)
    located = {split: locate(pinned, split, FeedConfig()) for split in SPLITS}
    now = lap("locate", now)
    rows = located["train"]
    order = rows.order(FeedConfig(), BATCH, 0)
    first = next(order.rank(0, 0, 0, WORLD))
    now = lap("first_batch", now)
    found["all_s"] = now - began  # pin, locate, first batch
    found["more_mb"] = peak_mb() - before
    found["first_batch_images"] = len(first.samples_B)
    found["sent_mb"] = sent_mb(rows)
    found |= evaluated(rows)
    return found | balanced(rows)


def evaluated(rows: Any) -> dict[str, float]:
    """Plan a worker's first validation batch, as if the training images were to be validated."""
    from raypipe.feed.order import evaluation

    before = peak_mb(reset=True)
    began = time.perf_counter()
    next(evaluation(rows.sizes_F, BATCH, 0, WORLD))
    return {
        "first_val_batch_s": time.perf_counter() - began,
        "first_val_batch_mb": peak_mb() - before,
    }


def balanced(rows: Any) -> dict[str, float]:
    """A worker's first batch where every class comes equally often."""
    from raypipe.feed.dataset import FeedConfig

    before = peak_mb(reset=True)
    began = time.perf_counter()
    order = rows.order(FeedConfig(sampling="balanced"), BATCH, 0)
    next(order.rank(0, 0, 0, WORLD))
    return {
        "balanced_first_batch_s": time.perf_counter() - began,
        "balanced_mb": peak_mb() - before,
    }
