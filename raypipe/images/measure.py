"""Perceptual hashes: which images look the same to an eye.

A 256-bit difference hash (16 x 16 signs of horizontal gradients): re-encoding and resizing flip a few bits, another picture
flips about 128. Source: N. Krawetz, "Kind of Like That" (2013).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BITS = 256
ROWS, COLUMNS = 16, 17
FLAT = 0.01  # grey levels: sums of 32-bit floats differ by less where nothing does
ONE_THREAD = 262_144  # multiplications below which OpenBLAS starts no threads of its own: ingest has its own already


def difference_hash(gray_HW: np.ndarray) -> bytes:
    """32 bytes: for each cell of a 16x16 grid, is the right neighbour brighter?

    Cells are exact means over fractions of pixels. Copies at 0.4 to 0.8 of the size move 1 bit, where Pillow's box filter,
    which takes whole pixels and rounds, moves 3 to 4.
    """
    down, across = _shares(gray_HW.shape[0], ROWS), _shares(gray_HW.shape[1], COLUMNS)
    pixels_HW, strips = gray_HW.astype(np.float32), max(1, ONE_THREAD // down.size)
    rows = [
        down @ pixels_HW[:, left : left + strips] for left in range(0, gray_HW.shape[1], strips)
    ]
    means = np.concatenate(rows, axis=1) @ across.T / (gray_HW.size / (ROWS * COLUMNS))
    return np.packbits(np.diff(means) > FLAT).tobytes()


@lru_cache(maxsize=256)
def _shares(pixels: int, cells: int) -> np.ndarray:
    """(cells, pixels) float32: how much of each pixel of a line lies in each of so many equal cells."""
    edges, first = np.linspace(0, pixels, cells + 1), np.arange(pixels)
    inside = np.minimum(edges[1:, None], first + 1) - np.maximum(edges[:-1, None], first)
    return inside.clip(0, 1).astype(np.float32)


def hamming(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Differing bits between one hash (32,) and many (n, 32), uint8 -> int64 (n,)."""
    return np.bitwise_count(np.bitwise_xor(many, one)).sum(axis=-1, dtype=np.int64)
