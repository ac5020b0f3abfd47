"""Stored images -> pixels, in this process or as a Ray task.

This module imports neither torch nor Ray. So a new worker process decodes its first image after
half a second instead of four, and the first epoch waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raypipe.feed import stored
from raypipe.feed.encoded import Broken, encoded
from raypipe.images.decode import BadImage, decode_into
from raypipe.tables.fragment import Fragment

# By the place of a broken image in its row group: (the place of its replacement or -1, reason).
Replaced = dict[int, tuple[int, str]]


def try_decode(encoded: memoryview | bytes, out_HWC: np.ndarray) -> str | None:
    """Decode into one slot. Returns the reason where the image does not decode, else None."""
    try:
        decode_into(encoded, out_HWC)
    except BadImage as e:
        return f"{e.reason}: {e.detail}"
    return None


def decode_many(
    encoded: Sequence[memoryview | bytes], out_BHWC: np.ndarray, first: int = 0
) -> Broken:
    """Decode images into the first slots of a batch. Returns (first + slot, reason) of failures."""
    broken: Broken = []
    for slot, image in enumerate(encoded):
        reason = try_decode(image, out_BHWC[slot])
        if reason is not None:
            broken.append((first + slot, reason))
    return broken


def decode_bytes(data: np.ndarray, ends: np.ndarray, side_px: int) -> tuple[np.ndarray, Broken]:
    """Decode images that lie end to end in `data`. Image i is data[ends[i]:ends[i + 1]]."""
    view = data.data
    images = [view[start:end] for start, end in itertools.pairwise(ends)]
    shape = (len(images), side_px, side_px, 3)
    pixels_BHWC = np.empty(shape, np.uint8)
    broken = decode_many(images, pixels_BHWC)
    return pixels_BHWC, broken


def decode_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    hashes: pa.Field | None,
    side_px: int,
) -> tuple[np.ndarray, Replaced]:
    """Decode and check one row group: (pixels_nHWC, its broken images).

    hashes: the column to compare with; None: nothing is compared.

    A broken image is replaced by the next readable one of the row group. Where there is none, its
    pixels are 0 and its replacement is -1: the loader looks in other row groups.
    """
    images = encoded(fragment, column, storage_options)
    count = len(row_n)
    pixels_nHWC = np.empty((count, side_px, side_px, 3), np.uint8)
    undecoded = decode_many([images[row] for row in row_n.tolist()], pixels_nHWC)

    # An image may be both; a wrong sha256 says more than a decoder's error.
    mismatched = images.broken(row_n, stored.digests(fragment, hashes, row_n, storage_options))
    broken = dict(undecoded + mismatched)

    replaced: Replaced = {}
    for place, reason in broken.items():
        # The next readable one, around the row group.
        other = -1
        for n in range(1, count):
            candidate = (place + n) % count
            if candidate not in broken:
                other = candidate
                break
        pixels_nHWC[place] = pixels_nHWC[other] if other >= 0 else 0
        replaced[place] = (other, reason)
    return pixels_nHWC, replaced


def hash_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    hashes: pa.Field | None,
) -> tuple[np.ndarray, Broken]:
    """Hash and check one row group: (sha256_n32 of the stored bytes, its broken images).

    hashes: as for `decode_group`.
    """
    images = encoded(fragment, column, storage_options)
    broken = images.broken(row_n, stored.digests(fragment, hashes, row_n, storage_options))
    found = b"".join(images.digest(row) for row in row_n.tolist())
    sha256_n32 = np.frombuffer(found, np.uint8).reshape(-1, 32)
    return sha256_n32, broken
