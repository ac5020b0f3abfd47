"""Measures of a picture: perceptual hashes, and how bright, rich in contrast and sharp it is.

Hashes tell which images look the same to an eye.

The hash is a 256-bit difference hash: 16 x 16 signs of horizontal gradients. Re-encoding and
resizing flip a few bits; another picture differs in about 128.
Source: N. Krawetz, "Kind of Like That" (2013).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BITS = 256
ROWS, COLUMNS = 16, 17
LOOKS = ("brightness", "contrast", "sharpness")  # what `statistics` gives
SEEN = (*LOOKS, "width", "height")  # with the size as it is stored: what drift checks compare
FLAT = 0.01  # grey levels: rounding of float32 sums differs by less where nothing else does

PIXELS_AT_ONCE = 65_536  # of `statistics`: 256 kB of grey levels

# Below so many multiplications, OpenBLAS starts no threads of its own. Ingest has its own already.
ONE_THREAD = 262_144


def difference_hash(gray_HW: np.ndarray) -> bytes:
    """32 bytes. For each cell of a 16x16 grid: is the right neighbour brighter?

    The mean of a cell counts fractions of pixels exactly. Copies at 0.4 to 0.8 of the size move one
    bit; with Pillow's box filter, which takes whole pixels and rounds, 3 to 4.
    """
    height, width = gray_HW.shape
    down = _shares(height, ROWS)
    across = _shares(width, COLUMNS)
    pixels_HW = gray_HW.astype(np.float32)

    # Sum over each row of cells, in strips small enough for one thread.
    strip = max(1, ONE_THREAD // down.size)
    row_sums = []
    for left in range(0, width, strip):
        row_sums.append(down @ pixels_HW[:, left : left + strip])

    pixels_in_cell = gray_HW.size / (ROWS * COLUMNS)
    means = np.concatenate(row_sums, axis=1) @ across.T / pixels_in_cell
    return np.packbits(np.diff(means) > FLAT).tobytes()


@lru_cache(maxsize=256)
def _shares(pixels: int, cells: int) -> np.ndarray:
    """(cells, pixels) float32: the share of each pixel of a line that lies in each equal cell."""
    edges = np.linspace(0, pixels, cells + 1)
    cell_start = edges[:-1, None]
    cell_end = edges[1:, None]
    pixel_start = np.arange(pixels)
    pixel_end = pixel_start + 1

    # The length that a pixel and a cell have in common; negative where they are apart.
    overlap_start = np.maximum(cell_start, pixel_start)
    overlap_end = np.minimum(cell_end, pixel_end)
    overlap = overlap_end - overlap_start
    return overlap.clip(0, 1).astype(np.float32)


def hamming(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Differing bits between one hash (32,) and many (n, 32), uint8 -> int64 (n,)."""
    different = np.bitwise_xor(many, one)
    return np.bitwise_count(different).sum(axis=-1, dtype=np.int64)


def statistics(pixels_NHWC: np.ndarray) -> dict[str, np.ndarray]:
    """How N pictures look, float32 (N,) each, from uint8 RGB of any size.

    brightness: the mean grey level, 0 to 1. contrast: the standard deviation of grey levels, 0 to
    0.5. sharpness: the standard deviation of the Laplacian (the difference to the four neighbours'
    mean), 0 to 1; low means blurred. It depends on the size, so compare pictures of one size.
    """
    looks_N3 = np.empty((len(pixels_NHWC), 3), np.float32)
    # Small pictures together: one by one, calling numpy takes longer than its work. Large ones stay
    # in the processor's cache.
    pixels = int(np.prod(pixels_NHWC.shape[1:3]))
    at_once = max(1, PIXELS_AT_ONCE // max(1, pixels))
    for start in range(0, len(pixels_NHWC), at_once):
        looks_N3[start : start + at_once] = _looks(pixels_NHWC[start : start + at_once])
    brightness, contrast, sharpness = looks_N3.T.copy()
    return {"brightness": brightness, "contrast": contrast, "sharpness": sharpness}


def _looks(pixels_BHWC: np.ndarray) -> np.ndarray:
    """float32 (B, 3): brightness, contrast and sharpness."""
    weights_C = np.array([0.299, 0.587, 0.114], np.float32) / 255
    gray_BHW = pixels_BHWC.astype(np.float32) @ weights_C
    brightness = gray_BHW.mean(axis=(1, 2))

    # Around the mean, sums of squares lose no digits.
    gray_BHW -= brightness[:, None, None]
    sharpness = np.zeros(len(gray_BHW), np.float32)
    if min(gray_BHW.shape[1:]) > 2:
        laplacian_BHW = _laplacian(gray_BHW)
        laplacian_BHW -= laplacian_BHW.mean(axis=(1, 2))[:, None, None]
        sharpness = _root_mean_square(laplacian_BHW)
    return np.stack([brightness, _root_mean_square(gray_BHW), sharpness], axis=1)


def _root_mean_square(values_BHW: np.ndarray) -> np.ndarray:
    flat_BK = values_BHW.reshape(len(values_BHW), -1)
    root: np.ndarray = np.sqrt(np.einsum("bk,bk->b", flat_BK, flat_BK) / flat_BK.shape[1])
    return root


def _laplacian(gray_BHW: np.ndarray) -> np.ndarray:
    """The inner pixels less the mean of their four neighbours."""
    above, below = gray_BHW[:, :-2, 1:-1], gray_BHW[:, 2:, 1:-1]
    left, right = gray_BHW[:, 1:-1, :-2], gray_BHW[:, 1:-1, 2:]
    # In place: arrays of this size cost more than the sums.
    laplacian_BHW = above + below
    laplacian_BHW += left
    laplacian_BHW += right
    laplacian_BHW /= -4
    laplacian_BHW += gray_BHW[:, 1:-1, 1:-1]
    return laplacian_BHW
