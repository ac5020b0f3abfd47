"""One rank's batches of a run: the plan of feed/order.py, carried by one of the carriers, on the rank's device.

`prepare` decides in the driver how images travel and says why; each rank then opens the `Source` it is given. A feed resumes at
any (epoch, step), at any world size: `state()` names where it stands.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from raypipe.errors import DataError
from raypipe.feed import order
from raypipe.feed.cache import Cached, InMemory, decode_all, decode_here
from raypipe.feed.dataset import FeedConfig, Pinned, Rows, locate
from raypipe.feed.loaders import Carrier, Pixels, Streaming, TaskDecoder, ThreadDecoder
from raypipe.feed.order import Share, Step

log = logging.getLogger("raypipe")


@dataclass(frozen=True)
class Batch:
    """inputs: pixels_BHWC uint8 or features_BD float32, on the device; samples_B numbers them in their split (int64).

    positions_B: their places in the epoch's stream, each of which comes once: what augmentation is keyed by. share: what this
    rank's part counts of the global batch.
    """

    inputs: Tensor
    labels_B: Tensor
    samples_B: np.ndarray
    positions_B: np.ndarray
    share: Share


@dataclass(frozen=True)
class Source:
    """A split and how its images travel, picklable: `rows`, `blocks` and `inputs` stay in the object store. `decoded` images
    were, or are being, decoded for all who share it; a stream decodes anew for each. `broken` are those samples of `inputs`
    that another one stands in for, and why."""

    carrier: str
    rows: Any
    side_px: int
    cfg: FeedConfig
    blocks: tuple[Any, ...] = ()
    inputs: Any = None
    decoded: int = 0
    broken: dict[int, tuple[int, str]] = field(default_factory=dict)

    def open(self, device: torch.device) -> tuple[Rows, Carrier]:
        rows: Rows = fetch(self.rows)
        pinned_memory = device.type == "cuda"
        if self.carrier == "memory":
            return rows, InMemory(fetch(self.inputs), self.broken)
        if self.carrier == "cache":
            return rows, Cached(rows, self.cfg, self.blocks, pinned_memory)
        if self.carrier == "offload":
            return rows, Streaming(
                rows, self.cfg, partial(TaskDecoder, self.side_px, pinned_memory)
            )
        return rows, Streaming(
            rows, self.cfg, partial(ThreadDecoder, self.side_px, self.cfg.threads, pinned_memory)
        )


def prepare(
    pinned: Pinned,
    splits: Sequence[str],
    side_px: int,
    cfg: FeedConfig,
    seed: int,
    here: bool = False,
) -> dict[str, Source]:
    """The splits of a pinned version as sources, all by one carrier. `cache` starts decoding now and fills as it goes; `here`:
    this process does it, and is done when this returns."""
    rows = {split: locate(pinned, split, cfg) for split in splits}
    carrier = choose(cfg, sum(len(r) for r in rows.values()) * side_px**2 * 3 / 2**20)
    sources = {}
    for split, r in rows.items():
        if here and carrier == "cache":
            log.info("Decoding %d images", len(r))
        blocks = (
            ()
            if carrier != "cache"
            else decode_here(r, side_px)
            if here
            else decode_all(r, side_px, cfg, seed)
        )
        shared = ray.put(r) if ray.is_initialized() else r
        sources[split] = Source(
            carrier, shared, side_px, cfg, blocks, decoded=len(r) if blocks else 0
        )
    return sources


def await_decoded(sources: Iterable[Source]) -> None:
    """Wait until what the cache is to hold is decoded. Who takes all CPUs of a cluster before that, and then waits for images,
    waits for ever: the tasks that decode them need a CPU. One that failed raises where its images are read."""
    waiting, images = (
        [pixels for s in sources for pixels, _ in s.blocks],
        sum(s.decoded for s in sources),
    )
    for turn in itertools.count():
        if not waiting:
            return
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1.0, fetch_local=False)
        if turn == 0 and waiting:
            log.info("Decoding %d images", images)


def choose(cfg: FeedConfig, decoded_mb: float) -> str:
    """The carrier for so many megabytes of pixels; falls back to threads, and says so, when the cache cannot hold them."""
    if cfg.carrier in ("threads", "offload"):
        return cfg.carrier
    if not ray.is_initialized():
        log.info("Feed: threads (there is no cluster to keep decoded images)")
        return "threads"
    free_mb = (
        ray.cluster_resources().get("object_store_memory", 0) / 2**20 * 0.6
    )  # what trials and results leave
    limit = min(cfg.cache_mb, free_mb)
    carrier = cfg.carrier
    if carrier == "auto":
        carrier = "cache" if decoded_mb <= limit else "threads"
    elif carrier == "cache" and decoded_mb > limit:
        log.warning(
            "The cache cannot hold %.0f MB of pixels (%.0f MB free): decoding in threads instead",
            decoded_mb,
            limit,
        )
        carrier = "threads"
    log.info(
        "Feed: %s (decoded images take %.0f MB, the cache may hold %.0f MB)",
        carrier,
        decoded_mb,
        limit,
    )
    return carrier


def fetch(value: Any) -> Any:
    """The value itself, wherever it is kept."""
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


class Feed:
    """`train(epoch, step)` and `val()` yield this rank's batches; equally many on every rank."""

    def __init__(
        self,
        train: Source,
        val: Source,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._rank, self._world, self._device = rank, world, device or torch.device("cpu")
        (self._train_rows, self._train), (self._val_rows, self._val) = (
            train.open(self._device),
            val.open(self._device),
        )
        self._batch_size, self._order = (
            batch_size,
            self._train_rows.order(train.cfg, batch_size, seed),
        )
        self._stream: Iterator[Pixels] | None = None
        self._at = (0, 0)
        self._trace = _trace_file(train.cfg.trace, rank, world)

    @property
    def steps(self) -> int:
        return self._order.steps

    @property
    def replaced(self) -> int:
        """Broken images that others stood in for, so far."""
        return len(self._train.replaced) + len(self._val.replaced)

    @property
    def in_flight_bytes(self) -> int:
        """The most encoded bytes that row groups being read or shuffled took at a time."""
        return max(self._train.in_flight_bytes, self._val.in_flight_bytes)

    def state(self) -> tuple[int, int]:
        """(epoch, step) of the next training batch: what `train` resumes from."""
        return self._at

    def train(self, epoch: int, step: int = 0) -> Iterator[Batch]:
        """The rest of an epoch. The next epoch is read ahead meanwhile, so that epochs follow each other without a gap."""
        if self._stream is None or self._at != (epoch, step):
            self._stream = self._train.batches(self._wanted(epoch, step))
        stream = self._stream
        for t in range(step, self.steps):
            inputs, samples_B, planned = next(stream)
            self._at = (epoch, t + 1) if t + 1 < self.steps else (epoch + 1, 0)
            if self._trace is not None:
                self._note(epoch, t, samples_B, planned)
            yield self._batch(inputs, samples_B, planned, self._train_rows)

    def val(self) -> Iterator[Batch]:
        steps = order.evaluation(self._val_rows.sizes_F, self._batch_size, self._rank, self._world)
        for inputs, samples_B, planned in self._val.batches(steps):
            yield self._batch(inputs, samples_B, planned, self._val_rows)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None

    def _wanted(self, epoch: int, step: int) -> Iterator[Step]:
        yield from self._order.rank(epoch, step, self._rank, self._world)
        for later in itertools.count(epoch + 1):
            yield from self._order.rank(later, 0, self._rank, self._world)

    def _batch(self, inputs: Tensor, samples_B: np.ndarray, planned: Step, rows: Rows) -> Batch:
        labels_B = torch.from_numpy(rows.labels_N[samples_B])
        # Pinned memory: the copy runs while the device still computes the step before.
        inputs, labels_B = (t.to(self._device, non_blocking=True) for t in (inputs, labels_B))
        return Batch(inputs, labels_B, samples_B, planned.positions_B, planned.share)

    def _note(self, epoch: int, step: int, samples_B: np.ndarray, planned: Step) -> None:
        assert self._trace is not None
        images = planned.share.images  # a stand-in counts nothing
        ids = self._train_rows.ids.take(samples_B[:images]).to_pylist()
        line = {"epoch": epoch, "step": step, "rank": self._rank, "world": self._world, "ids": ids}
        with self._trace.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(line | {"positions": planned.positions_B[:images].tolist()}) + "\n"
            )


def _trace_file(folder: str | None, rank: int, world: int) -> Path | None:
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(
            f"The trace cannot be written: {e}", got=folder, fix="Set feed.trace to a folder"
        ) from None
    return Path(folder) / f"rank-{rank}-of-{world}-{os.getpid()}.jsonl"
