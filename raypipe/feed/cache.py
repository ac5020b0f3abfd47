"""Loaders of inputs that are ready in memory: decoded images (`cache`), and frozen features.

Every row group is decoded once, by a Ray task or by the driver, and kept in the object store.
Epochs, workers and trials of a node share it without a copy. A batch is then gathered from rows of
150 kB, 20 times as fast as decoding. The first epoch starts when its first windows are decoded; it
does not wait for the rest.
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
from raypipe.feed.dataset import FeedConfig
from raypipe.feed.decoding import Replaced, decode_group
from raypipe.feed.groups import stand_ins
from raypipe.feed.loaders import Loaded, none_readable, report_broken
from raypipe.feed.order import Step
from raypipe.feed.rows import Rows

Block = tuple[np.ndarray, Replaced]  # a row group: its pixels_nHWC, and its broken images


def decode_all(rows: Rows, side_px: int, cfg: FeedConfig, seed: int) -> tuple[Any, ...]:
    """Start to decode every row group, in the order in which epoch 0 needs them.

    Returns a pair of references (pixels, replaced) for each row group, in table order.
    """
    task = ray.remote(decode_group).options(
        num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=5
    )
    blocks = {}
    for group in rows.order(cfg, 1, seed).epoch(0).groups():
        blocks[group] = task.remote(*_arguments(rows, group, side_px))
    return tuple(blocks[group] for group in range(len(rows.sizes_F)))


def decode_here(rows: Rows, side_px: int) -> tuple[Any, ...]:
    """Decode every row group in threads of this process; all are decoded when this returns.

    Returns what `decode_all` does. No other process has to start, and no CPU of the cluster is
    taken.
    """

    def decode(group: int) -> Block:
        return decode_group(*_arguments(rows, group, side_px))

    blocks = []
    groups = range(len(rows.sizes_F))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # `map` keeps the table's order, whichever thread is done first.
        for pixels, replaced in pool.map(decode, groups):
            blocks.append((ray.put(pixels), ray.put(replaced)))
    return tuple(blocks)


def _arguments(rows: Rows, group: int, side_px: int) -> tuple[Any, ...]:
    """The arguments of `decode_group` for one row group."""
    assert rows.row_N is not None
    return (
        rows.fragments[group].for_task(),
        rows.column,
        rows.storage_options,
        rows.row_N[rows.samples(group)],
        rows.hash_field,
        side_px,
    )


@dataclass
class Cached:
    """The loader of `cache`. It waits for a block (a decoded row group) when a batch needs it."""

    rows: Rows
    cfg: FeedConfig
    blocks: Sequence[Any]
    pinned_memory: bool = False
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0
    _ready: dict[int, Block] = field(default_factory=dict)

    def batches(self, steps: Iterator[Step]) -> Iterator[Loaded]:
        bounds = self.rows.bounds
        buffers = Buffers()
        for step in steps:
            # The blocks that hold this step's samples.
            groups = np.searchsorted(bounds, step.samples_B, side="right") - 1
            blocks = {group: self._block(group) for group in np.unique(groups).tolist()}

            # An empty batch of an evaluation has a shape, too: that of any block.
            any_block = next(iter(blocks.values())) if blocks else self._block(0)
            shape_HWC = any_block[0].shape[1:]
            pixels_BHWC = buffers.tensor((len(groups), *shape_HWC), self.pinned_memory)
            out_BHWC = pixels_BHWC.numpy()

            # Copy each sample's pixels into its slot.
            samples_B = step.samples_B
            slots = zip(groups.tolist(), samples_B.tolist(), strict=True)
            for slot, (group, sample) in enumerate(slots):
                block_nHWC, replaced = blocks[group]
                place = sample - bounds[group]
                out_BHWC[slot] = block_nHWC[place]
                if place not in replaced:
                    continue

                # A broken image: another one takes its slot.
                reason = replaced[place][1]
                report_broken(self.rows, self.cfg, self.replaced, sample, reason)
                other, pixels_HWC = self._stand_in(bounds, sample, reason)
                samples_B = samples_B.copy()
                samples_B[slot] = other
                out_BHWC[slot] = pixels_HWC
            yield pixels_BHWC, samples_B, step

    def _stand_in(self, bounds: np.ndarray, sample: int, reason: str) -> tuple[int, np.ndarray]:
        """What replaces a broken sample: (sample, pixels_HWC)."""
        for group, other in stand_ins(bounds, sample):
            block_nHWC, replaced = self._block(group)
            place = other - int(bounds[group])
            if place not in replaced:
                return other, block_nHWC[place]
        raise none_readable(self.rows, reason)

    def _block(self, group: int) -> Block:
        """One decoded row group; waits until it is decoded."""
        if group not in self._ready:
            pixels_ref, replaced_ref = self.blocks[group]
            self._ready[group] = ray.get(pixels_ref), ray.get(replaced_ref)
        return self._ready[group]


@dataclass
class InMemory:
    """The loader of inputs that are one array, as frozen features_ND are.

    broken: (the sample that replaces it, reason) by broken sample.
    """

    inputs_N: np.ndarray
    broken: dict[int, tuple[int, str]] = field(default_factory=dict)
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0

    def batches(self, steps: Iterator[Step]) -> Iterator[Loaded]:
        for step in steps:
            samples_B = step.samples_B
            if self.broken:
                broken = self.broken.keys() & set(samples_B.tolist())
                for sample in broken:
                    other, reason = self.broken[sample]
                    self.replaced[sample] = reason
                    samples_B = np.where(step.samples_B == sample, other, samples_B)

            inputs_B = torch.from_numpy(self.inputs_N[samples_B])
            yield inputs_B, samples_B, step
