"""How long an image takes from its table to pixels: for whoever plans with it.

The first images of a split are read and decoded as a feed does it: a row group at once, then its
images in threads. Small pictures on a local disk take a tenth of a second for this. Photos of 12
megapixels in an object store take some seconds, and then the end of a search takes minutes.
"""

from __future__ import annotations

import time

import numpy as np

from raypipe.cluster import container
from raypipe.feed.dataset import FeedConfig, Pinned
from raypipe.feed.encoded import encoded
from raypipe.feed.locate import locate
from raypipe.feed.rows import Rows
from raypipe.images.decode import decode_good

# Of so many row groups the fastest counts: on a busy machine one of them may wait for others. The
# first that takes longer says enough.
ROW_GROUPS, SLOW_S = 3, 0.5
MOST_BYTES = 64_000_000  # of a row group: a larger one is not read for an estimate
DECODED = 32  # images of a row group that are decoded, at most


def measured(pinned: Pinned, split: str, side_px: int, cfg: FeedConfig) -> float:
    """Seconds that an image of this split takes, of many; 0: the split has none, or its row groups
    are too large to be read for this.

    Raises DataError for a file that cannot be read.
    """
    # Hashes are not compared: to look at the column, row groups from all over the table are read.
    rows = locate(pinned, split, cfg.model_copy(update={"verify": False}))
    # As many threads as will decode the images: where a cache holds them, all CPUs do.
    takes_all = cfg.carrier in ("auto", "cache")
    threads = len(container.usable_cpus()) if takes_all else cfg.cpu_threads
    took_s: list[float] = []
    began = time.perf_counter()
    small = [n for n, fragment in enumerate(rows.fragments) if fragment.bytes <= MOST_BYTES]
    for group in small[:ROW_GROUPS]:
        took_s.append(_of_group(rows, group, side_px, threads))
        if time.perf_counter() - began > SLOW_S:
            break
    return min(took_s, default=0.0)


def _of_group(rows: Rows, group: int, side_px: int, threads: int) -> float:
    """Seconds that an image of one row group takes."""
    assert rows.row_N is not None
    row_n: np.ndarray = rows.row_N[rows.samples(group)]
    began = time.perf_counter()
    images = encoded(rows.fragments[group], rows.column, rows.storage_options)
    # The whole row group is read for these, though others of it may be of another split.
    read_s = (time.perf_counter() - began) / len(row_n)
    some = [images[int(row)] for row in row_n[:DECODED]]
    decode_good(some[:1], side_px)  # libraries are loaded at a first call
    began = time.perf_counter()
    decode_good(some, side_px, threads)
    return read_s + (time.perf_counter() - began) / len(some)
