"""Which split an image belongs to: a pure function of its family, so nothing moves when rows are added.

A family is an image and its near-duplicates; its id is the first member's. Splits are drawn from a hash of the family id:
the class balance holds on average, and near-duplicates fall on one side, so a test image has no twin in training. Strata
hold the balance exactly, for the price that a draw depends on those before it.

A perceptual hash sees no difference between smooth surfaces: 1,000 gradients were one family, all of it in `test`. So a family
has a largest size, and a gap that cannot be luck (a split without an image, or without a class) is reported as one.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from raypipe.images import measure

_BANDS = 16  # two hashes that differ in fewer bits than there are bands agree on one band (pigeonhole): exact recall
SMALL_FAMILY = (
    16  # images that stay together in the smallest table: a burst, or one object from some sides
)
CERTAIN = 1e-6  # a gap as unlikely as this is no luck: 85 images and none in a split of 15 %
UNLIKELY = 0.05
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

    def draw(
        self, family: str, label: str | None, fractions: dict[str, float], salt: str = ""
    ) -> str:
        """The split that the family is in; for a new one, any that lacks images of the label, the likelier the more."""
        if family in self._split_of:
            return self._split_of[family]
        have, scale = self._images[label], sum(fractions.values())
        images = 1 + sum(have[name] for name in fractions)
        lacking = {name: share / scale * images - have[name] for name, share in fractions.items()}
        return draw(family, {name: images for name, images in lacking.items() if images > 0}, salt)

    def copy(self) -> Strata:
        return deepcopy(self)


@dataclass(frozen=True)
class Missing:
    """A split without an image, or without an image of `label`, although `drawn` images were drawn for all splits."""

    split: str
    label: str | None
    drawn: int
    chance: float

    def __str__(self) -> str:
        of = "" if self.label is None else f" of {self.label!r}"
        return f"{self.split} has no image{of} of {self.drawn}"


Placed = Counter[tuple["str | None", str]]  # images by (label, split)


def missing(drawn: Placed, have: Placed, fractions: dict[str, float]) -> list[Missing]:
    """Which splits lack images, or a class, where chance alone would rarely leave them so: (1 - share) ** images.

    `drawn` are the images whose split was drawn, `have` all that the table holds then. Unlabelled images are of no class.
    """
    images, classes = Counter[str | None](), {label for label, _ in drawn if label is not None}
    for (label, _), n in drawn.items():
        images[label] += n
    found = []
    for name, share in fractions.items():
        out = 1 - share / sum(fractions.values())
        if not any(n for (_, split), n in have.items() if split == name):
            found.append(Missing(name, None, drawn.total(), out ** drawn.total()))
            continue
        for label in sorted(c for c in classes if not have[c, name]):
            found.append(Missing(name, label, images[label], out ** images[label]))
    return [gap for gap in found if gap.chance < UNLIKELY]


def most_in_family(images: int, fractions: dict[str, float]) -> int | None:
    """How many near-duplicates stay together in a table of so many images: half of what its smallest split should hold.

    A larger family would fill that split alone or leave it empty. None: there is one split, so nothing can be torn apart.
    """
    if len(fractions) < 2:
        return None
    return max(SMALL_FAMILY, int(images * min(fractions.values()) / sum(fractions.values()) / 2))


class Families:
    """Finds the family of each new look among those already seen; at most `max_bits` of 256 bits apart.

    Only the first of equal looks is indexed: a thousand black images cost no more than one. A family takes at most `most`
    images; further ones that look like it stand for themselves, so that smooth surfaces, which all look alike to a perceptual
    hash, do not become one family with one split.
    """

    def __init__(self, max_bits: int = 12, most: int | None = None) -> None:
        if not 0 <= max_bits < _BANDS:
            raise ValueError(
                f"max_bits {max_bits} must be below {_BANDS} for the band index to find every pair"
            )
        self._max_bits, self._most = max_bits, most
        self._first: dict[bytes, int] = {}
        self._families: list[str] = []
        self._images: Counter[str] = Counter()
        self._looks_NB = np.empty((1024, 2 * _BANDS), np.uint8)
        self._index: dict[
            int, int
        ] = {}  # (band, its bits): the first look with them; most have no other
        self._others: defaultdict[int, list[int]] = defaultdict(list)
        self._some_full = False
        self.refused = 0  # images that look like a family which had no room

    def full(self, family: str) -> bool:
        return self._most is not None and self._images[family] >= self._most

    def join(self, image_id: str, look: bytes, family: str | None = None) -> str:
        """The family of this image: `family` when it is known already, the nearest one's, or a new one of its own.

        Pass `family` for what a table holds; then its own id can also mean that the family it looks like had no room.
        """
        known = family
        if known is None or (known == image_id and self._some_full):
            near = self._nearest(look)
            if near is not None and self.full(near):
                self.refused += known is None
                return known or image_id  # not indexed: what comes next shall not gather around it
            family = known or near or image_id
        assert family is not None
        self._images[family] += 1
        self._some_full |= self.full(family)
        if look not in self._first:
            self._add(look, family)
        return family

    def _nearest(self, look: bytes) -> str | None:
        """The family of the nearest look, when that is near enough."""
        if (same := self._first.get(look)) is not None:
            return self._families[same]
        alike = [band for band in self._bands(look) if band in self._index]
        if not alike:
            return None
        others = (self._others[band] for band in alike if band in self._others)
        near = sorted({self._index[band] for band in alike}.union(*others))
        apart = measure.hamming(np.frombuffer(look, np.uint8), self._looks_NB[near])
        best = int(apart.argmin())
        return self._families[near[best]] if apart[best] <= self._max_bits else None

    def _add(self, look: bytes, family: str) -> None:
        at = self._first[look] = len(self._families)
        for band in self._bands(look):
            if self._index.setdefault(band, at) != at:
                self._others[band].append(at)
        if at == len(self._looks_NB):
            self._looks_NB = np.concatenate([self._looks_NB, np.empty_like(self._looks_NB)])
        self._looks_NB[at] = np.frombuffer(look, np.uint8)
        self._families.append(family)

    @staticmethod
    def _bands(look: bytes) -> list[int]:
        bands: list[int] = (
            np.frombuffer(look, np.uint16).astype(np.int64) + _BAND_OFFSETS
        ).tolist()
        return bands
