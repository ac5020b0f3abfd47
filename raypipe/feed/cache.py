"""The `cache` carrier: every row group decoded once, by a Ray task or by the driver, kept in the object store, and shared
without a copy by epochs, workers and trials of a node. Frozen features are carried the same way, as one array.

A batch is then a gather of 150 kB rows, at 20 times the speed of decoding. The first epoch starts when its first windows are
decoded, not when all is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch

from raypipe.feed.buffers import Buffers
from raypipe.feed.dataset import FeedConfig, Rows
from raypipe.feed.decoding import decode_group
from raypipe.feed.groups import stand_ins
from raypipe.feed.loaders import Pixels, none_readable, note_bad
from raypipe.feed.order import Step


def decode_all(rows: Rows, side_px: int, cfg: FeedConfig, seed: int) -> tuple[Any, ...]:
    """Start decoding every row group, in the order of epoch 0: (pixels, replacements) references, in table order."""
    task = ray.remote(decode_group).options(
        num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=5
    )
    blocks = {
        group: task.remote(*_asked(rows, group, side_px))
        for group in rows.order(cfg, 1, seed).epoch(0).groups()
    }
    return tuple(blocks[group] for group in range(len(rows.sizes_F)))


def decode_here(rows: Rows, side_px: int) -> tuple[Any, ...]:
    """The same, done when it returns, in threads of this process: no other has to start, and no CPU of the cluster is taken."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        done = pool.map(
            lambda group: decode_group(*_asked(rows, group, side_px)), range(len(rows.sizes_F))
        )
        return tuple((ray.put(pixels), ray.put(replaced)) for pixels, replaced in done)


def _asked(rows: Rows, group: int, side_px: int) -> tuple[Any, ...]:
    """What decode_group wants to know."""
    start = int(rows.sizes_F[:group].sum())
    mine = slice(start, start + int(rows.sizes_F[group]))
    digests = None if rows.sha256_N32 is None else rows.sha256_N32[mine]
    assert rows.row_N is not None
    return (
        rows.fragments[group],
        rows.column,
        rows.storage_options,
        rows.row_N[mine],
        digests,
        side_px,
    )


@dataclass
class Cached:
    """Batches gathered from decoded blocks; a block is waited for when a batch first needs it."""

    rows: Rows
    cfg: FeedConfig
    blocks: Sequence[Any]
    pinned_memory: bool = False
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0
    _ready: dict[int, tuple[np.ndarray, dict[int, tuple[int, str]]]] = field(default_factory=dict)

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]:
        bounds, buffers = np.concatenate(([0], np.cumsum(self.rows.sizes_F))), Buffers()
        for step in wanted:
            groups = np.searchsorted(bounds, step.samples_B, side="right") - 1
            blocks = {g: self._block(g) for g in np.unique(groups).tolist()}
            shape = (
                next(iter(blocks.values()))[0].shape[1:] if blocks else self._block(0)[0].shape[1:]
            )
            pixels = buffers.tensor((len(groups), *shape), self.pinned_memory)
            out, samples_B = pixels.numpy(), step.samples_B
            for slot, (group, sample) in enumerate(
                zip(groups.tolist(), samples_B.tolist(), strict=True)
            ):
                block, replaced = blocks[group]
                at = sample - bounds[group]
                out[slot] = block[at]
                if at in replaced:
                    note_bad(self.rows, self.cfg, self.replaced, sample, replaced[at][1])
                    samples_B = samples_B.copy()
                    samples_B[slot], out[slot] = self._stand_in(bounds, sample, replaced[at][1])
            yield pixels, samples_B, step

    def _stand_in(self, bounds: np.ndarray, sample: int, reason: str) -> tuple[int, np.ndarray]:
        """(the sample that takes a broken one's place, its pixels_HWC)."""
        for group, other in stand_ins(bounds, sample):
            block, replaced = self._block(group)
            if (at := other - int(bounds[group])) not in replaced:
                return other, block[at]
        raise none_readable(self.rows, reason)

    def _block(self, group: int) -> tuple[np.ndarray, dict[int, tuple[int, str]]]:
        if group not in self._ready:
            pixels, replaced = self.blocks[group]
            self._ready[group] = ray.get(pixels), ray.get(replaced)
        return self._ready[group]


@dataclass
class InMemory:
    """Inputs that are one array already: frozen features_ND. `broken`: samples that others stand in for, and why."""

    inputs_N: np.ndarray
    broken: dict[int, tuple[int, str]] = field(default_factory=dict)
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]:
        for step in wanted:
            samples_B = step.samples_B
            for sample in self.broken.keys() & set(samples_B.tolist()) if self.broken else ():
                other, self.replaced[sample] = self.broken[sample]
                samples_B = np.where(step.samples_B == sample, other, samples_B)
            yield torch.from_numpy(self.inputs_N[samples_B]), samples_B, step
