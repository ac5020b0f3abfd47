"""What the images of a split look like: for the reference that drift is compared with.

Brightness, contrast and sharpness as the model sees an image, and its size as it is stored: what a
prediction keeps of each image too (serve/predicted_rows.py). So many images are decoded once more,
which takes about as long as predicting them; features of a frozen backbone come without pixels.
"""

from __future__ import annotations

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
    assert rows.row_N is not None
    rng = np.random.default_rng(0)
    group_N = np.searchsorted(rows.bounds, samples_N, side="right") - 1
    groups = np.unique(group_N)
    if len(groups) > ROW_GROUPS:
        groups = rng.choice(groups, ROW_GROUPS, replace=False)
    places = np.flatnonzero(np.isin(group_N, groups))
    if len(places) > IMAGES:
        places = rng.choice(places, IMAGES, replace=False)

    for group in np.unique(group_N[places]).tolist():
        images = encoded(rows.fragments[group], rows.column, rows.storage_options)
        of_group = places[group_N[places] == group]
        for start in range(0, len(of_group), AT_ONCE):
            some = of_group[start : start + AT_ONCE]
            found = _looks(
                [images[int(row)] for row in rows.row_N[samples_N[some]]], side_px, threads
            )
            looks_NK[some] = found
    return looks_NK


def _looks(images: list[memoryview], side_px: int, threads: int) -> np.ndarray:
    sizes = [decode.size(image) or (np.nan, np.nan) for image in images]
    looks_BK = np.full((len(images), len(SEEN)), np.nan, np.float32)
    looks_BK[:, -2:] = sizes
    decoded = decode.decode_good(images, side_px, threads)
    good = list(decoded.good)
    for column, values in enumerate(measure.statistics(decoded.pixels_NHWC).values()):
        looks_BK[good, column] = values
    return looks_BK
