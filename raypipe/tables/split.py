"""Which split an image belongs to: a pure function of its near-duplicate group, so nothing moves
when rows are added.

A group that the table has keeps its split, also where the source gave it, or where the shares were
others then (`ingest_state`).

`draw` takes the split from a hash of the group's id: the shares hold on average, in every class.
`Strata` holds them exactly in every class; the price is that a draw depends on the draws before it.
Near-duplicates share a group (`near_duplicates`) and so a split.

A gap that cannot be chance, a split without an image or without a class, is reported (`missing`).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass

# Below this chance a gap is no accident: 85 images drawn, and none in a split of 15 %.
CERTAIN = 1e-6
# From this chance on a gap is not worth a word.
UNLIKELY = 0.05

Placed = Counter[tuple["str | None", str]]  # images by (label, split)


def position(group: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{salt}:{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def draw(group: str, fractions: dict[str, float], salt: str = "") -> str:
    """The split of a group: shares cut [0, 1) into pieces, and the group's position lies in one of
    them.
    """
    at = position(group, salt) * sum(fractions.values())
    edge = 0.0
    for name, share in fractions.items():
        edge += share
        if at < edge:
            return name
    # Rounding may leave the sum of the shares a little below the position.
    return name


class Strata:
    """Draws splits so that the images of every label have the wanted shares.

    At any point of an ingest the shares hold to within as many images as there are splits.
    Near-duplicate groups stay together and can make the difference larger.
    """

    def __init__(self) -> None:
        self._split_of: dict[str, str] = {}
        self._images: defaultdict[str | None, Counter[str]] = defaultdict(Counter)

    def add(self, group: str, label: str | None, drawn: str) -> None:
        """Count an image of this group and label in the split `drawn`."""
        self._split_of.setdefault(group, drawn)
        self._images[label][drawn] += 1

    def draw(
        self, group: str, label: str | None, fractions: dict[str, float], salt: str = ""
    ) -> str:
        """The split that the group is in. A new group gets one that lacks images of this label.

        The more images a split lacks, the likelier it is drawn.
        """
        if group in self._split_of:
            return self._split_of[group]
        have = self._images[label]
        # With this image; so the splits together lack one.
        images = 1 + sum(have[name] for name in fractions)
        scale = sum(fractions.values())
        lacking = {}
        for name, share in fractions.items():
            wanted = share / scale * images
            lack = wanted - have[name]
            if lack > 0:
                lacking[name] = lack
        return draw(group, lacking, salt)

    def copy(self) -> Strata:
        """An independent copy: for a batch whose commit may fail."""
        return deepcopy(self)


@dataclass(frozen=True)
class Missing:
    """A split without an image, or without an image of `label`, although `drawn` images were drawn
    for all splits.

    `chance` is the probability of this gap if draws are independent.
    """

    split: str
    label: str | None
    drawn: int
    chance: float

    def __str__(self) -> str:
        of = "" if self.label is None else f" of {self.label!r}"
        return f"{self.split} has no image{of} of {self.drawn}"


def missing(drawn: Placed, have: Placed, fractions: dict[str, float]) -> list[Missing]:
    """The splits that lack images, or a class, although chance would rarely leave them so: (1 -
    share) ** images < 5 %.

    `drawn` are the images whose split was drawn, `have` all images of the table then. Unlabelled
    images are of no class.
    """
    # Drawn images by label; the labels are the classes.
    images = Counter[str | None]()
    for (label, _), n in drawn.items():
        images[label] += n
    classes = sorted(label for label in images if label is not None)
    filled = {split for (_, split), n in have.items() if n}
    scale = sum(fractions.values())

    gaps = []
    for name, share in fractions.items():
        # The chance that one image is not drawn for this split.
        elsewhere = 1 - share / scale
        if name not in filled:
            total = drawn.total()
            gaps.append(Missing(name, None, total, elsewhere**total))
            continue
        # The split has images: look for classes without one.
        for label in classes:
            if not have[label, name]:
                n = images[label]
                gaps.append(Missing(name, label, n, elsewhere**n))
    return [gap for gap in gaps if gap.chance < UNLIKELY]
