"""The order of samples: a pure function of (seed, epoch), sliced by rank.

Global batch *t* holds the same samples at every world size that divides it; a rank takes every world-th one. All ranks see
equally many batches (DDP deadlocks otherwise): a last short batch is dropped in training unless it is the only one, and then
it is filled up from its own start.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(samples), int64."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def global_batches(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Whole batches of `order`; the rest is dropped (it leads another epoch's shuffle), except when there is nothing else."""
    for start in range(0, len(order) - batch_size + 1, batch_size):
        yield order[start : start + batch_size]
    if 0 < len(order) < batch_size:
        yield order


def rank_slice(batch: np.ndarray, rank: int, world: int) -> np.ndarray:
    """This rank's share; equally long on every rank, repeating from the batch's start when world does not divide it."""
    return np.resize(batch, -(-len(batch) // world) * world)[rank::world]


def steps_per_epoch(samples: int, batch_size: int) -> int:
    return max(samples // batch_size, 1 if samples else 0)
