"""Random numbers that belong to a position of an epoch's stream: the same whatever batch, rank or world size reads it, and
after a resume.

Each choice (say, how far to turn) has a splitmix64 stream of its own, started by a hash of (seed, epoch, the choice's name);
position i takes its i-th number. No state, any order: a batch of 64 costs 30 us a choice, on the CPU, whatever the device.
Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Draws:
    """Of one epoch, for positions_B: places in the epoch's stream, int64."""

    seed: int
    epoch: int
    positions_B: np.ndarray | Tensor

    def uniform(self, choice: str, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """float64 B in [low, high)."""
        return low + (high - low) * ((self._bits(choice) >> np.uint64(11)) * 2.0**-53)

    def chance(self, choice: str, share: float = 0.5) -> np.ndarray:
        """bool B, true with this probability."""
        return self.uniform(choice) < share

    def integers(self, choice: str, count: int) -> np.ndarray:
        """int64 B in [0, count)."""
        return (self.uniform(choice) * count).astype(np.int64)

    def sign(self, choice: str) -> np.ndarray:
        """float64 B, -1 or 1."""
        return np.where(self.chance(choice), -1.0, 1.0)

    def _bits(self, choice: str) -> np.ndarray:
        name = f"{self.seed}/{self.epoch}/{choice}".encode()
        start = np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), np.uint64)
        z = start + GAMMA * (
            np.asarray(self.positions_B).astype(np.uint64) + np.uint64(1)
        )  # wraps, as it should
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
