"""A split decoded into memory, and arrays as a training source: what tests compare a feed with."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from raypipe.feed import feed as feeds
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.feed import Feed, Source
from raypipe.feed.rows import Rows
from raypipe.train.job import TrainJob


def memory(inputs_N: np.ndarray, labels_N: np.ndarray) -> Source:
    """Inputs that are arrays already, under ids "0", "1", …"""
    labels_N = labels_N.astype(np.int64) if labels_N.dtype.kind in "iu" else labels_N
    ids = pa.array(map(str, range(len(labels_N))))
    rows = Rows(labels_N, np.ones(len(labels_N), np.int64), ids=ids)
    return Source("memory", rows, 0, FeedConfig(), inputs=inputs_N)


def decoded(job: TrainJob, split: str = "val") -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(pixels_NHWC, labels_N, ids) of a split, in table order."""
    cfg = job.feed.model_copy(update={"carrier": "threads"})
    source = feeds.prepare(pin(job.table, cfg), [split], job.model.pixels, cfg, 0)[split]
    batches = list(Feed(source, source, 64, 0).val())
    pixels, labels = (
        torch.cat(parts).numpy()
        for parts in zip(*((b.inputs, b.labels_B) for b in batches), strict=True)
    )
    rows = feeds.fetch(source.rows)
    return pixels, labels, tuple(rows.ids_of(range(len(rows))))
