"""Near-duplicate groups: an image and the images that look like it. A group gets one split, so no
test image has a twin in training.

Images look alike if their perceptual hashes (256 bits, column `look`) differ in few bits. The id of
a group (column `family`) is the image_id of its first image.

A perceptual hash sees no difference between smooth surfaces: 1,000 gradients became one group, all
of it in `test`. So a group has a largest size.

Looking alike is not transitive: an image may look like images of two groups, which may have got
different splits before it came. It joins the nearest one, and `between` names the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from raypipe.images import measure

# A hash is cut into 16 bands of 16 bits. Two hashes that differ in fewer bits than there are bands
# agree on a whole band (pigeonhole principle). So an index by band finds every pair.
_BANDS = 16
_BAND_OFFSETS = np.arange(_BANDS) << 16
# Images that stay together in the smallest table: a burst of photographs, or one object from some
# sides.
SMALL_GROUP = 16


def most_in_group(images: int, fractions: dict[str, float]) -> int | None:
    """The largest group in a table of so many images: half of what its smallest split should hold.

    A larger group would fill that split alone or leave it empty. None (no limit) for a single
    split, which no group can fill unevenly.
    """
    if len(fractions) < 2:
        return None
    smallest_share = min(fractions.values()) / sum(fractions.values())
    return max(SMALL_GROUP, int(images * smallest_share / 2))


class Groups:
    """Finds the group of each new image among the images before it.

    Hashes may differ in `max_bits` of 256 bits. Of equal hashes only the first is indexed, so a
    thousand black images cost no more than one. A group takes at most `most` images (None: any
    number). Further images that look like it become groups of one, so that smooth surfaces do not
    form one group with one split.
    """

    def __init__(self, max_bits: int = 12, most: int | None = None) -> None:
        if not 0 <= max_bits < _BANDS:
            raise ValueError(
                f"max_bits {max_bits} must be below {_BANDS} for the band index to find every pair"
            )
        self._max_bits = max_bits
        self._most = most
        self._some_full = False
        # Images that look like a group which had no room.
        self.refused = 0
        # hash -> the other groups that its image looked like when it came
        self.between: dict[bytes, list[str]] = {}
        # group id -> number of images
        self._images: Counter[str] = Counter()
        # The indexed hashes, numbered: hash -> number, number -> group id, number -> bytes (32, in
        # a growing array).
        self._number: dict[bytes, int] = {}
        self._groups: list[str] = []
        self._hashes_NB = np.empty((1024, 2 * _BANDS), np.uint8)
        # The band index: key of a band and its bits -> the first hash with them, and the others.
        # Most keys have no others.
        self._index: dict[int, int] = {}
        self._others: defaultdict[int, list[int]] = defaultdict(list)

    def full(self, group: str) -> bool:
        """Has the group its largest size?"""
        return self._most is not None and self._images[group] >= self._most

    def join(self, image_id: str, phash: bytes, group: str | None = None) -> str:
        """Add an image; returns its group: `group` if given, else the nearest one, else a new one
        with the image's id.

        Give `group` for an image that the table holds already. If that is the image's own id, the
        image began the group, or was refused by a full one. Only with a full group it matters
        which.
        """
        given = group
        if given is None or (given == image_id and self._some_full):
            alike = self._alike(phash)
            if alike and self.full(alike[0]):
                self.refused += given is None
                # Not indexed: later images must not gather around this one.
                return given or image_id
            if given is None and len(alike) > 1:
                self.between[phash] = alike[1:]
            group = given or (alike[0] if alike else image_id)
        assert group is not None
        self._images[group] += 1
        self._some_full |= self.full(group)
        if phash not in self._number:
            self._add(phash, group)
        return group

    def _alike(self, phash: bytes) -> list[str]:
        """The groups with an indexed hash that differs in at most `max_bits`, the nearest first.
        For a hash that is indexed itself, only its own.
        """
        same = self._number.get(phash)
        if same is not None:
            return [self._groups[same]]
        candidates: set[int] = set()
        for key in self._keys(phash):
            if key in self._index:
                candidates.add(self._index[key])
                candidates.update(self._others.get(key, ()))
        if not candidates:
            return []
        # In order, so that of equally near hashes the first one wins.
        numbers = sorted(candidates)
        wanted = np.frombuffer(phash, np.uint8)
        bits = measure.hamming(wanted, self._hashes_NB[numbers])
        near = np.flatnonzero(bits <= self._max_bits)
        near = near[bits[near].argsort(kind="stable")]
        return list(dict.fromkeys(self._groups[numbers[i]] for i in near.tolist()))

    def _add(self, phash: bytes, group: str) -> None:
        """Index a hash that is not indexed yet."""
        number = len(self._groups)
        self._number[phash] = number
        self._groups.append(group)
        for key in self._keys(phash):
            first = self._index.setdefault(key, number)
            if first != number:
                self._others[key].append(number)
        if number == len(self._hashes_NB):
            # The array is full: double it.
            more = np.empty_like(self._hashes_NB)
            self._hashes_NB = np.concatenate([self._hashes_NB, more])
        self._hashes_NB[number] = np.frombuffer(phash, np.uint8)

    @staticmethod
    def _keys(phash: bytes) -> list[int]:
        """One number for each band of the hash: the band and its 16 bits."""
        bands = np.frombuffer(phash, np.uint16).astype(np.int64)
        keys: list[int] = (bands + _BAND_OFFSETS).tolist()
        return keys
