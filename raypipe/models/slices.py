"""Where is a model worse? Parts of the judged images, each with an interval of its metric.

Of many parts, some look bad by chance. So the interval of each is as wide as their number asks for
(Bonferroni), parts with few images are left out, and a part counts as worse only if its whole
interval is worse than the metric of all images.

The interval is a bootstrap's: images are drawn again, with replacement, or whole groups of them
where images of a group are alike. Where every image is right, all draws are equal and the
bootstrap's interval has no width, which is wrong; so for shares it is widened to Wilson's
(1927), with the number of groups.

Letters in names: N images, G groups, B draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.stats import norm

DRAWS = 4000
BINS = 4  # of a column of numbers: quartiles
MOST_NAMES = 30  # of a column of texts: the most frequent ones


@dataclass(frozen=True)
class Slice:
    """One part of the judged images."""

    column: str
    name: str
    images: int
    groups: int
    """How many groups these are of; as many as images where nothing groups them."""

    value: float
    """The share that is right; for numbers, the mean absolute error."""

    low: float
    high: float
    """Ends of the interval. Of shares, all intervals together hold the truth with 95 %. Of errors
    they are too narrow: of 20 skewed ones a single interval held it in 85 of 100 cases."""

    worse: bool
    """Its whole interval is worse than the value of all images."""


@dataclass(frozen=True)
class Sliced:
    """All slices, worst first: by the better end of their interval."""

    value: float
    low: float
    high: float
    """Of all images; a 95 % interval."""

    slices: tuple[Slice, ...]
    left_out: int
    """Parts with fewer images than the least number."""


def sliced(
    outcome_N: np.ndarray,
    columns: Mapping[str, np.ndarray],
    *,
    higher_is_better: bool,
    group_N: np.ndarray | None = None,
    least: int = 20,
    seed: int = 0,
) -> Sliced:
    """The mean outcome of every part that a column makes.

    outcome_N: 1 for a right image and 0 for a wrong one, or its absolute error. columns: values of
    N images by name: texts are parts by themselves, numbers are cut at their quartiles. Null (None
    or NaN) is a part of its own. group_N: images with one value are drawn together. least: parts
    with fewer images are left out. Raises ValueError without images.
    """
    if not len(outcome_N):
        raise ValueError("slices are of images, and there are none")
    rng = np.random.default_rng(seed)
    # Without a column of groups, every image is one.
    groups_N = np.arange(len(outcome_N))
    if group_N is not None:
        names_N = np.array([str(value) for value in group_N])
        _, groups_N = np.unique(names_N, return_inverse=True)

    # Every part of every column, and those of them that are large enough to say something.
    parts = []
    for column, values in columns.items():
        for name, inside_N in _parts(values):
            parts.append((column, name, inside_N))
    large = [part for part in parts if part[2].sum() >= least]

    # All images together. A share lies in 0..1 and has a Wilson interval; an error has none.
    is_share = higher_is_better
    value = float(outcome_N.mean())
    low, high = _interval(outcome_N, groups_N, 0.05, is_share, rng)
    found = []
    for column, name, inside_N in large:
        inside = outcome_N[inside_N]
        grouped = groups_N[inside_N]
        # Bonferroni: each interval misses with a share of the 5 %.
        ends = _interval(inside, grouped, 0.05 / len(large), is_share, rng)
        worse = ends[1] < value if higher_is_better else ends[0] > value
        found.append(
            Slice(
                column,
                name,
                len(inside),
                len(np.unique(grouped)),
                float(inside.mean()),
                *ends,
                worse,
            )
        )
    # By the better end: a small part with a wide interval does not come first by luck.
    found.sort(key=lambda part: part.high if higher_is_better else -part.low)
    return Sliced(value, low, high, tuple(found), len(parts) - len(large))


def _parts(values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """(name, inside_N bool) of the parts of one column."""
    if values.dtype.kind in "iuf":
        return _quartiles(values.astype(np.float64))
    listed = ["(null)" if value is None else str(value) for value in values]
    texts = np.array(listed, dtype=object)
    # The most frequent values; of equally frequent ones the first in the alphabet.
    names, counts = np.unique(listed, return_counts=True)
    most_first = np.argsort(-counts, kind="stable")
    most = names[most_first][:MOST_NAMES]
    return [(str(name), texts == name) for name in most]


def _quartiles(values_N: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Numbers in parts of about equal size; fewer parts where values repeat."""
    known_N = np.isfinite(values_N)
    parts = []
    if (~known_N).any():
        parts.append(("(null)", ~known_N))
    if not known_N.any():
        return parts
    quantiles = np.quantile(values_N[known_N], np.linspace(0, 1, BINS + 1))
    edges = np.unique(quantiles)
    # All numbers are the same.
    if len(edges) == 1:
        return [*parts, (f"{edges[0]:.3g}", known_N)]
    for i, (start, end) in enumerate(pairwise(edges)):
        # The last part holds its upper edge.
        is_last = i == len(edges) - 2
        below = values_N <= end if is_last else values_N < end
        parts.append((f"{start:.3g} to {end:.3g}", known_N & (values_N >= start) & below))
    return parts


def _interval(
    outcome_N: np.ndarray,
    groups_N: np.ndarray,
    alpha: float,
    is_share: bool,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """The interval of the mean outcome that misses it with probability `alpha`."""
    # A draw takes whole groups, so their sums and sizes are all it needs.
    _, place_N = np.unique(groups_N, return_inverse=True)
    sums_G = np.bincount(place_N, outcome_N)
    sizes_G = np.bincount(place_N)
    groups = len(sizes_G)
    means_B = _drawn_means(sums_G, sizes_G, rng)
    low, high = np.quantile(means_B, [alpha / 2, 1 - alpha / 2]).tolist()
    if is_share:
        wilson = _wilson(float(outcome_N.mean()), groups, alpha)
        low, high = min(low, wilson[0]), max(high, wilson[1])
    return low, high


def _drawn_means(sums_G: np.ndarray, sizes_G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """means_B of groups that are drawn with replacement, in pieces that fit into memory."""
    groups = len(sizes_G)
    at_once = max(1, 2_000_000 // groups)
    means = []
    for start in range(0, DRAWS, at_once):
        draws_BG = rng.integers(0, groups, (min(at_once, DRAWS - start), groups))
        means.append(sums_G[draws_BG].sum(1) / sizes_G[draws_BG].sum(1))
    return np.concatenate(means)


def _wilson(share: float, count: int, alpha: float) -> tuple[float, float]:
    """Wilson's score interval of a share, of `count` independent cases."""
    z = float(norm.ppf(1 - alpha / 2))
    shrink = 1 + z**2 / count
    # The centre is pulled towards one half, the more the fewer cases there are.
    centre = (share + z**2 / (2 * count)) / shrink
    variance = share * (1 - share) / count
    variance += z**2 / (4 * count**2)
    half = z * variance**0.5 / shrink
    return max(0.0, centre - half), min(1.0, centre + half)
