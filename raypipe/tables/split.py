"""Which split an image belongs to: a pure function of its family, so nothing moves when rows are added.

A family is an image and its near-duplicates; its id is the first member's. Splits are drawn from a hash of the family id:
the class balance holds on average, and near-duplicates fall on one side, so a test image has no twin in training.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

import numpy as np

from raypipe.images import measure

_BANDS = 16  # two hashes that differ in fewer bits than there are bands agree on one band (pigeonhole): exact recall


def position(family: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{family}".encode()).digest()[:8], "big") / 2**64


def draw(family: str, fractions: dict[str, float], salt: str = "") -> str:
    """The split whose share of [0, 1) holds the family's position."""
    at, edge = position(family, salt) * sum(fractions.values()), 0.0
    for name, share in fractions.items():
        edge += share
        if at < edge:
            return name
    return name


class Families:
    """Finds the family of each new look among those already seen; at most `max_bits` of 256 bits apart."""

    def __init__(self, max_bits: int = 12) -> None:
        if not 0 <= max_bits < _BANDS:
            raise ValueError(f"max_bits {max_bits} must be below {_BANDS} for the band index to find every pair")
        self._max_bits = max_bits
        self._looks: list[np.ndarray] = []
        self._families: list[str] = []
        self._index: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)

    def join(self, image_id: str, look: bytes, family: str | None = None) -> str:
        """The family of this image: `family` when it is known already, the nearest one's, or a new one of its own."""
        bits = np.frombuffer(look, np.uint8)
        bands = [(b, look[2 * b : 2 * b + 2]) for b in range(_BANDS)]
        if family is None:
            near = sorted({i for band in bands for i in self._index[band]})
            if near:
                apart = measure.hamming(bits, np.stack([self._looks[i] for i in near]))
                best = int(apart.argmin())
                family = self._families[near[best]] if apart[best] <= self._max_bits else None
        family = family or image_id
        for band in bands:
            self._index[band].append(len(self._looks))
        self._looks.append(bits)
        self._families.append(family)
        return family
