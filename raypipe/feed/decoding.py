"""Stored images -> pixels, in this process or as a Ray task.

It knows neither torch nor Ray: a worker process that was just started decodes after half a second and not after four, and the
first epoch waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe.feed.encoded import Broken, encoded
from raypipe.images.decode import BadImage, decode_into
from raypipe.tables.fragment import Fragment


def try_decode(encoded: memoryview | bytes, out_HWC: np.ndarray) -> str | None:
    """Decode into one slot; why it could not be done, or None."""
    try:
        decode_into(encoded, out_HWC)
    except BadImage as e:
        return f"{e.reason}: {e.detail}"
    return None


def decode_many(
    encoded: Sequence[memoryview | bytes], out_BHWC: np.ndarray, first: int = 0
) -> Broken:
    tried = ((i, try_decode(e, out_BHWC[i])) for i, e in enumerate(encoded))
    return [(first + i, reason) for i, reason in tried if reason is not None]


def decode_bytes(data: np.ndarray, ends: np.ndarray, side_px: int) -> tuple[Any, Broken]:
    view = data.data
    pixels = np.empty((len(ends) - 1, side_px, side_px, 3), np.uint8)
    return pixels, decode_many([view[a:b] for a, b in itertools.pairwise(ends)], pixels)


def decode_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    digests: np.ndarray | None,
    side_px: int,
) -> tuple[np.ndarray, dict[int, tuple[int, str]]]:
    """(pixels_nHWC, {position of a broken image: (position of the one in its place, reason)}).

    That place is -1 where none of the row group is readable: others have to stand in.
    """
    images = encoded(fragment, column, storage_options)
    pixels = np.empty((len(row_n), side_px, side_px, 3), np.uint8)
    broken = dict(
        decode_many([images[row] for row in row_n.tolist()], pixels) + images.broken(row_n, digests)
    )
    replaced = {}
    for i, reason in broken.items():
        ahead = ((i + n) % len(row_n) for n in range(1, len(row_n)))
        other = next((o for o in ahead if o not in broken), -1)
        pixels[i] = pixels[other] if other >= 0 else 0
        replaced[i] = (other, reason)
    return pixels, replaced


def hash_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    digests: np.ndarray | None,
) -> tuple[np.ndarray, Broken]:
    """(sha256_n32 of the stored bytes, which images are not what was stored once)."""
    images = encoded(fragment, column, storage_options)
    found = b"".join(images.digest(row) for row in row_n.tolist())
    return np.frombuffer(found, np.uint8).reshape(-1, 32), images.broken(row_n, digests)
