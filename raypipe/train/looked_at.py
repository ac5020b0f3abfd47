"""What the images of a split look like: for the reference that drift is compared with.

Brightness, contrast and sharpness as the model sees an image, and its size as it is stored: what a
prediction keeps of each image too (serve/predicted_rows.py). So many images are decoded once more,
which takes about as long as predicting them; features of a frozen backbone come without pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raypipe.feed.encoded import encoded
from raypipe.feed.rows import Rows
from raypipe.images import decode, measure
from raypipe.images.measure import SEEN

# Of 1,000 a side Kolmogorov-Smirnov finds a shift of a tenth of a standard deviation.
IMAGES = 1_000
# Row groups that are read for them, drawn evenly: a large split has thousands.
ROW_GROUPS = 64
AT_ONCE = 64


def looks(rows: Rows, samples_N: np.ndarray, side_px: int, threads: int) -> np.ndarray:
    """looks_NK of these samples, float32: the columns of `measure.SEEN`.

    NaN where an image was not looked at, or does not decode. Raises DataError for a file that
    cannot be read.
    """
    looks_NK = np.full((len(samples_N), len(SEEN)), np.nan, np.float32)
    places = drawn(rows, samples_N, IMAGES)
    for some, images in stored(rows, samples_N, places):
        looks_NK[some] = _looks(images, side_px, threads)
    return looks_NK


def drawn(rows: Rows, samples_N: np.ndarray, most: int) -> np.ndarray:
    """Places in samples_N of at most so many images, always the same ones, of few row groups."""
    rng = np.random.default_rng(0)
    group_N = _groups(rows, samples_N)
    groups = np.unique(group_N)
    if len(groups) > ROW_GROUPS:
        groups = rng.choice(groups, ROW_GROUPS, replace=False)
    places: np.ndarray = np.flatnonzero(np.isin(group_N, groups))
    return rng.choice(places, most, replace=False) if len(places) > most else places


def stored(
    rows: Rows, samples_N: np.ndarray, places: np.ndarray
) -> Iterator[tuple[np.ndarray, list[memoryview]]]:
    """(some of the places, their images as they are stored), row group by row group."""
    assert rows.row_N is not None
    group_N = _groups(rows, samples_N)
    for group in np.unique(group_N[places]).tolist():
        images = encoded(rows.fragments[group], rows.column, rows.storage_options)
        of_group = places[group_N[places] == group]
        for start in range(0, len(of_group), AT_ONCE):
            some = of_group[start : start + AT_ONCE]
            yield some, [images[int(row)] for row in rows.row_N[samples_N[some]]]


def _groups(rows: Rows, samples_N: np.ndarray) -> np.ndarray:
    return np.searchsorted(rows.bounds, samples_N, side="right") - 1


def _looks(images: list[memoryview], side_px: int, threads: int) -> np.ndarray:
    sizes = [decode.size(image) or (np.nan, np.nan) for image in images]
    looks_BK = np.full((len(images), len(SEEN)), np.nan, np.float32)
    looks_BK[:, -2:] = sizes
    decoded = decode.decode_good(images, side_px, threads)
    good = list(decoded.good)
    for column, values in enumerate(measure.statistics(decoded.pixels_NHWC).values()):
        looks_BK[good, column] = values
    return looks_BK
