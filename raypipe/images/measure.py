"""Perceptual hashes: which images look the same to an eye.

A 256-bit difference hash (16 x 16 signs of horizontal gradients): re-encoding and resizing flip a few bits, another picture
flips about 128. Source: N. Krawetz, "Kind of Like That" (2013).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

BITS = 256


def difference_hash(gray_HW: np.ndarray) -> bytes:
    """32 bytes: for each cell of a 16x16 grid, is the right neighbour brighter?"""
    small = np.asarray(Image.fromarray(gray_HW).resize((17, 16), Image.Resampling.BOX), dtype=np.int16)
    return np.packbits(small[:, 1:] > small[:, :-1]).tobytes()


def hamming(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Differing bits between one hash (32,) and many (n, 32), uint8 -> int64 (n,)."""
    return np.bitwise_count(np.bitwise_xor(many, one)).sum(axis=-1, dtype=np.int64)
