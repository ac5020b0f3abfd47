"""Which split an image belongs to: a pure function of its family, so nothing moves when rows are added.

A family is an image and its near-duplicates; its id is the first member's. Splits are drawn from a hash of the family id:
the class balance holds on average, and near-duplicates fall on one side, so a test image has no twin in training. Strata
hold the balance exactly, for the price that a draw depends on those before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from copy import deepcopy

import numpy as np

from raypipe.images import measure

_BANDS = 16  # two hashes that differ in fewer bits than there are bands agree on one band (pigeonhole): exact recall
_BAND_OFFSETS = np.arange(_BANDS) << 16  # one number for (band, its 16 bits)


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


class Strata:
    """Draws splits so that the images of every label have the shares asked for: at any point of an ingest, to within as many
    images as there are splits (families of twins, which stay together, apart)."""

    def __init__(self) -> None:
        self._split_of: dict[str, str] = {}
        self._images: defaultdict[str | None, Counter[str]] = defaultdict(Counter)

    def add(self, family: str, label: str | None, drawn: str) -> None:
        """An image of this family and label is in the split `drawn`."""
        self._split_of.setdefault(family, drawn)
        self._images[label][drawn] += 1

    def draw(self, family: str, label: str | None, fractions: dict[str, float], salt: str = "") -> str:
        """The split that the family is in; for a new one, any that lacks images of the label, the likelier the more."""
        if family in self._split_of:
            return self._split_of[family]
        have, scale = self._images[label], sum(fractions.values())
        images = 1 + sum(have[name] for name in fractions)
        lacking = {name: share / scale * images - have[name] for name, share in fractions.items()}
        return draw(family, {name: images for name, images in lacking.items() if images > 0}, salt)

    def copy(self) -> Strata:
        return deepcopy(self)


class Families:
    """Finds the family of each new look among those already seen; at most `max_bits` of 256 bits apart.

    Only the first of equal looks is indexed: a thousand black images cost no more than one.
    """

    def __init__(self, max_bits: int = 12) -> None:
        if not 0 <= max_bits < _BANDS:
            raise ValueError(f"max_bits {max_bits} must be below {_BANDS} for the band index to find every pair")
        self._max_bits = max_bits
        self._first: dict[bytes, int] = {}
        self._families: list[str] = []
        self._looks_NB = np.empty((1024, 2 * _BANDS), np.uint8)
        self._index: dict[int, int] = {}  # (band, its bits): the first look with them; most have no other
        self._others: defaultdict[int, list[int]] = defaultdict(list)

    def join(self, image_id: str, look: bytes, family: str | None = None) -> str:
        """The family of this image: `family` when it is known already, the nearest one's, or a new one of its own."""
        if (same := self._first.get(look)) is not None:
            return family or self._families[same]
        bands = (np.frombuffer(look, np.uint16).astype(np.int64) + _BAND_OFFSETS).tolist()
        if family is None:
            index, others = self._index, self._others
            alike = [band for band in bands if band in index]
            if alike:
                near = sorted({index[band] for band in alike}.union(*(others[band] for band in alike if band in others)))
                apart = measure.hamming(np.frombuffer(look, np.uint8), self._looks_NB[near])
                best = int(apart.argmin())
                family = self._families[near[best]] if apart[best] <= self._max_bits else None
        at = self._first[look] = len(self._families)
        for band in bands:
            if self._index.setdefault(band, at) != at:
                self._others[band].append(at)
        if at == len(self._looks_NB):
            self._looks_NB = np.concatenate([self._looks_NB, np.empty_like(self._looks_NB)])
        self._looks_NB[at] = np.frombuffer(look, np.uint8)
        self._families.append(family or image_id)
        return self._families[at]
