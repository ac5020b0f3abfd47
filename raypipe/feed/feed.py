"""One rank's batches of a run: the plan of feed/order.py, loaded by one of the loaders.

1. The driver calls `prepare`: it chooses a loader, logs why, and returns a `Source` for each split.
2. Each rank opens its sources in a `Feed`, which yields batches on the rank's device.

A feed resumes at any (epoch, step), at any world size; `Feed.state()` is where it stands.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from raypipe.cluster import container
from raypipe.errors import DataError
from raypipe.feed import order
from raypipe.feed.cache import Cached, InMemory, decode_all, decode_here
from raypipe.feed.dataset import FeedConfig, Pinned
from raypipe.feed.loaders import Loaded, Loader, Streaming, TaskDecoder, ThreadDecoder
from raypipe.feed.locate import locate
from raypipe.feed.order import Step
from raypipe.feed.rows import Rows
from raypipe.feed.share import Share

log = logging.getLogger("raypipe")

# Threads that decode for a GPU, at most. Beside 16 of them a step took 1.8 times as long
# (benchmarks/results/2026-11-26-gpu.md). They share the interpreter's lock with the thread that
# starts the GPU's work.
GPU_THREADS = 8
CACHE_SHARE = 0.6  # of the object store's memory; trials and results need the rest
JUDGED, JUDGED_SIDE_PX = 256, 512  # images of a batch that a finished model is judged on: 200 MB


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch. Tensors are on the rank's device.

    inputs: pixels_BHWC uint8, or features_BD float32.
    samples_B: sample numbers in their split (int64).
    positions_B: places in the epoch's stream, each once an epoch: the key of augmentation.
    share: how much this part counts.
    """

    inputs: Tensor
    labels_B: Tensor
    samples_B: np.ndarray
    positions_B: np.ndarray
    share: Share


@dataclass(frozen=True)
class Source:
    """A split and the loader of its images. Picklable: large parts are references to Ray's store.

    carrier: the loader: threads, offload, cache, or memory (`inputs` is one array).
    rows: `Rows`, or a reference to them.
    blocks: with cache, (pixels, replaced) references of each row group.
    read: how many images were read, or are being read, for all who share this source. Streaming
    loaders read anew for each: 0.
    broken: with memory, (the sample that replaces it, reason) by broken sample.
    """

    carrier: str
    rows: Any
    side_px: int
    cfg: FeedConfig
    blocks: tuple[Any, ...] = ()
    inputs: Any = None
    read: int = 0
    broken: dict[int, tuple[int, str]] = field(default_factory=dict)

    @property
    def decoded(self) -> int:
        """How many of those that were read could be decoded; waits until all of them were tried."""
        return self.read - sum(map(_broken, self.blocks))

    @property
    def judged_at_once(self) -> int:
        """Images of a batch where a finished model is judged: fewer of many pixels."""
        if self.carrier == "memory":
            return JUDGED
        return max(1, min(JUDGED, JUDGED * JUDGED_SIDE_PX**2 // self.side_px**2))

    def open(self, device: torch.device) -> tuple[Rows, Loader]:
        """The rows, and a loader for this process."""
        rows: Rows = fetch(self.rows)
        pinned_memory = device.type == "cuda"
        if self.carrier == "memory":
            return rows, InMemory(fetch(self.inputs), self.broken)
        if self.carrier == "cache":
            return rows, Cached(rows, self.cfg, self.blocks, pinned_memory)
        if self.carrier == "offload":
            tasks = partial(TaskDecoder, self.side_px, pinned_memory)
            return rows, Streaming(rows, self.cfg, tasks)
        threads = partial(ThreadDecoder, self.side_px, self._threads(device), pinned_memory)
        return rows, Streaming(rows, self.cfg, threads)

    def _threads(self, device: torch.device) -> int:
        """How many threads of this process decode."""
        if self.cfg.threads is not None or device.type == "cpu":
            return self.cfg.cpu_threads
        cpus, quota = float(len(container.usable_cpus())), container.cpu_limit()
        if quota is not None:
            cpus = min(cpus, quota.most)
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, min(GPU_THREADS, int(cpus / ranks_here)))


def _broken(block: tuple[Any, Any]) -> int:
    """How many images of a row group cannot be decoded."""
    try:
        return len(fetch(block[1]))
    except RayError:  # whoever reads its images gets the error
        return 0


def prepare(
    pinned: Pinned,
    splits: Sequence[str],
    side_px: int,
    cfg: FeedConfig,
    seed: int,
    here: bool = False,
    most: int | None = None,
) -> dict[str, Source]:
    """The splits of a pinned version as sources, all with one loader.

    The cache starts to decode now and is filled while training runs. here: this process decodes,
    and everything is decoded when this returns. most: images of each split; None: all.
    """
    # One loader for all splits: it depends on the size of all their pixels.
    rows_by_split = {
        split: locate(pinned, split, cfg).sampled(most) for split in sorted(set(splits))
    }
    images = sum(len(rows) for rows in rows_by_split.values())
    decoded_mb = images * side_px**2 * 3 / 2**20
    carrier = choose(cfg, decoded_mb)

    sources = {}
    for split, rows in rows_by_split.items():
        blocks: tuple[Any, ...] = ()
        if carrier == "cache" and here:
            log.info("Decoding %d images", len(rows))
            blocks = decode_here(rows, side_px)
        elif carrier == "cache":
            blocks = decode_all(rows, side_px, cfg, seed)

        shared = ray.put(rows) if ray.is_initialized() else rows
        sources[split] = Source(
            carrier,
            shared,
            side_px,
            cfg,
            blocks,
            read=len(rows) if blocks else 0,
        )
    return sources


def await_decoded(sources: Iterable[Source]) -> None:
    """Wait until all images of the cache are decoded.

    Call it before trials reserve all CPUs: decode tasks need one, and would never get it. An image
    whose task failed raises later, when it is read.
    """
    # Decode tasks run in the cluster since `prepare`.
    waiting = []
    images = 0
    for source in sources:
        waiting += [pixels for pixels, _ in source.blocks]
        images += source.read

    logged = False
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1.0, fetch_local=False)
        if waiting and not logged:
            log.info("Decoding %d images", images)
            logged = True


def choose(cfg: FeedConfig, decoded_mb: float, store_mb: float | None = None) -> str:
    """The loader for so many megabytes of decoded pixels.

    store_mb: of the object store; None: that of the cluster that is joined. Falls back to threads,
    with a warning, where the cache was asked for and cannot hold them.
    """
    if cfg.carrier in ("threads", "offload"):
        return cfg.carrier
    if store_mb is None and not ray.is_initialized():
        log.info("Feed: threads (there is no cluster to keep decoded images)")
        return "threads"

    # The cache is limited by its setting and by the memory that the cluster can give it.
    if store_mb is None:
        store_mb = ray.cluster_resources().get("object_store_memory", 0) / 2**20
    limit_mb = min(cfg.cache_mb, store_mb * CACHE_SHARE)
    fits = decoded_mb <= limit_mb
    if cfg.carrier == "cache" and not fits:
        log.warning(
            "The cache cannot hold %.0f MB of pixels (%.0f MB free): decoding in threads instead",
            decoded_mb,
            limit_mb,
        )
    carrier = "cache" if fits else "threads"
    log.info(
        "Feed: %s (decoded images take %.0f MB, the cache may hold %.0f MB)",
        carrier,
        decoded_mb,
        limit_mb,
    )
    return carrier


def fetch(value: Any) -> Any:
    """The value itself, or what a reference refers to."""
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


class Feed:
    """One rank's batches. `train(epoch, step)` and `val()` yield equally many on every rank."""

    def __init__(
        self,
        train: Source,
        val: Source,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
        micro: int = 1,
    ) -> None:
        """batch_size: of all ranks together. micro: in so many parts a rank computes its own."""
        self._rank = rank
        self._world = world
        self._device = device or torch.device("cpu")
        # Of a rank's validation batch, as many as it trains on at once: more may not fit its GPU.
        self._at_once = -(-batch_size // (world * micro))
        self._train_rows, self._train = train.open(self._device)
        self._val_rows, self._val = val.open(self._device)
        self._order = self._train_rows.order(train.cfg, batch_size, seed)
        self._trace = _trace_file(train.cfg.trace, rank, world)

        # The training stream reads ahead, also into the next epoch. _at: its next (epoch, step).
        self._stream: Iterator[Loaded] | None = None
        self._at = (0, 0)

    @property
    def steps(self) -> int:
        """Training batches of an epoch."""
        return self._order.steps

    @property
    def replaced(self) -> int:
        """Broken images replaced so far."""
        return len(self._train.replaced) + len(self._val.replaced)

    @property
    def in_flight_bytes(self) -> int:
        """The peak of encoded bytes in row groups that were being read or shuffled."""
        return max(self._train.in_flight_bytes, self._val.in_flight_bytes)

    def state(self) -> tuple[int, int]:
        """(epoch, step) of the next training batch: resume with `train(epoch, step)`."""
        return self._at

    def train(self, epoch: int, step: int = 0) -> Iterator[Batch]:
        """The epoch's batches from `step` on.

        The stream reads the next epoch ahead, so epochs follow each other without a gap.
        """
        # Go on with the running stream, unless the caller asks for another place.
        if self._stream is None or self._at != (epoch, step):
            steps = self._steps_from(epoch, step)
            self._stream = self._train.batches(steps)
        stream = self._stream

        for t in range(step, self.steps):
            inputs, samples_B, planned = next(stream)

            # Set before the batch is used: a checkpoint then names the next one.
            if t + 1 < self.steps:
                self._at = (epoch, t + 1)
            else:
                self._at = (epoch + 1, 0)
            if self._trace is not None:
                self._write_trace(self._trace, epoch, t, samples_B, planned)
            yield self._batch(inputs, samples_B, planned, self._train_rows)

    def val(self) -> Iterator[Batch]:
        """Every validation sample that can be read, exactly once over all ranks.

        What stands for a broken image comes in its own place, and would count twice.
        """
        steps = order.evaluation(
            self._val_rows.sizes_F,
            self._at_once,
            self._rank,
            self._world,
        )
        for inputs, samples_B, planned in self._val.batches(steps):
            own_B = samples_B == planned.samples_B
            if not own_B.all():
                # Ranks stay in step, so one of several keeps a batch of which nothing is left.
                if self._world == 1 and not own_B.any():
                    continue
                inputs, samples_B = inputs[torch.from_numpy(own_B)], samples_B[own_B]
                share = Share.whole(len(samples_B))
                planned = replace(planned, positions_B=planned.positions_B[own_B], share=share)
            yield self._batch(inputs, samples_B, planned, self._val_rows)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None

    def _steps_from(self, epoch: int, step: int) -> Iterator[Step]:
        """The plan from here on, through all later epochs."""
        yield from self._order.rank(epoch, step, self._rank, self._world)
        for later in itertools.count(epoch + 1):
            yield from self._order.rank(later, 0, self._rank, self._world)

    def _batch(self, inputs: Tensor, samples_B: np.ndarray, planned: Step, rows: Rows) -> Batch:
        labels_B = torch.from_numpy(rows.labels(samples_B))
        # From pinned memory the copy runs while the device still computes the step before.
        inputs = inputs.to(self._device, non_blocking=True)
        labels_B = labels_B.to(self._device, non_blocking=True)
        return Batch(inputs, labels_B, samples_B, planned.positions_B, planned.share)

    def _write_trace(
        self, path: Path, epoch: int, step: int, samples_B: np.ndarray, planned: Step
    ) -> None:
        images = planned.share.images  # leaves out an image that is computed but counts nothing
        ids = self._train_rows.ids_of(samples_B[:images])
        line = {
            "epoch": epoch,
            "step": step,
            "rank": self._rank,
            "world": self._world,
            "ids": ids,
            "positions": planned.positions_B[:images].tolist(),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _trace_file(folder: str | None, rank: int, world: int) -> Path | None:
    """The file of this process's trace. Raises DataError where the folder cannot be made."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(
            f"The trace cannot be written: {e}", got=folder, fix="Set feed.trace to a folder"
        ) from None
    return Path(folder) / f"rank-{rank}-of-{world}-{os.getpid()}.jsonl"
