"""Where is a model worse? Parts of the judged images, each with an interval of its metric.

Of many parts, some look bad by chance. So the interval of each is as wide as their number asks for
(Bonferroni), parts with few images are left out, and a part counts as worse only if its whole
interval is worse than the metric of all images. How an interval is made: intervals.py.

Letters in names: N images, G groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from raypipe.models.intervals import interval

BINS = 4  # of a column of numbers or times: quartiles
MOST_NAMES = 30  # of a column of texts: the most frequent ones
MOST_VALUES = (
    12  # a column of at most so many different numbers names things, as lines or shifts do
)


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
    least: int
    """The least number of images of a slice."""

    left_out: int
    """Parts with fewer images than the least number, and less frequent texts than the first 30."""


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
    N images by name. Texts are parts by themselves, and so are numbers of at most MOST_VALUES
    different values; more numbers, and times, are cut at their quartiles. Null (None, NaN or NaT)
    is a part of its own. group_N: images with one value are drawn together; those with null are
    alone. least: parts with fewer images are left out. Raises ValueError without images.
    """
    if not len(outcome_N):
        raise ValueError("slices are of images, and there are none")
    rng = np.random.default_rng(seed)
    # Without a column of groups, every image is one.
    groups_N = np.arange(len(outcome_N)) if group_N is None else _numbered(group_N)

    # Every part of every column, and those of them that are large enough to say something.
    parts = []
    left_out = 0
    for column, values in columns.items():
        named, beyond = _parts(values)
        parts += [(column, name, inside_N) for name, inside_N in named]
        left_out += beyond
    large = []
    for part in parts:
        count = int(part[2].sum())
        if count < least:
            left_out += 1
        elif count < len(outcome_N):
            large.append(part)
        # A part of all images says nothing more than all images do.

    # All images together. A share lies in 0..1; an error has no upper end.
    is_share = higher_is_better
    value = float(outcome_N.mean())
    low, high = interval(outcome_N, groups_N, 0.05, is_share, rng)
    found = []
    for column, name, inside_N in large:
        inside = outcome_N[inside_N]
        grouped = groups_N[inside_N]
        # Bonferroni: each interval misses with a share of the 5 %.
        ends = interval(inside, grouped, 0.05 / len(large), is_share, rng)
        worse = ends[1] < value if higher_is_better else ends[0] > value
        groups = len(np.unique(grouped))
        mean = float(inside.mean())
        found.append(Slice(column, name, len(inside), groups, mean, *ends, worse))
    # By the better end: a small part with a wide interval does not come first by luck. Where it is
    # the same, as of errors with a lower end of 0, by the value.
    if higher_is_better:
        found.sort(key=lambda part: (part.high, part.value))
    else:
        found.sort(key=lambda part: (-part.low, -part.value))
    return Sliced(value, low, high, tuple(found), least, left_out)


def _numbered(group_N: np.ndarray) -> np.ndarray:
    """A number for each image, equal for images of one group; a null's own is its own."""
    known_N = np.array([value is not None and value == value for value in group_N], bool)
    # No array of texts: each would take as much as the longest.
    names = [str(value) for value in group_N]
    places = {name: place for place, name in enumerate(sorted(set(names)))}
    groups_N = np.array([places[name] for name in names])
    alone_N = len(group_N) + np.arange(len(group_N))
    return np.where(known_N, groups_N, alone_N)


def _parts(values: np.ndarray) -> tuple[list[tuple[str, np.ndarray]], int]:
    """((name, inside_N bool) of a column's parts, how many less frequent texts there are)."""
    if values.dtype.kind == "M":
        return _of_times(values), 0
    if values.dtype.kind in "iuf":
        return _of_numbers(values if values.dtype.kind == "f" else values.astype(np.float64)), 0
    listed = ["(null)" if value is None else str(value) for value in values]
    texts = np.array(listed, dtype=object)
    # The most frequent values; of equally frequent ones the first in the alphabet.
    counts = Counter(listed)
    most = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_NAMES]
    return [(name, texts == name) for name in most], len(counts) - len(most)


def _of_times(values_N: np.ndarray) -> list[tuple[str, np.ndarray]]:
    times_N = values_N.astype("datetime64[s]")
    seconds_N = np.where(np.isnat(times_N), np.nan, times_N.astype(np.int64))

    def texts(seconds: np.ndarray) -> list[str]:
        stamps = seconds.astype(np.int64).astype("datetime64[s]")
        # Days where they tell the times apart.
        days = np.datetime_as_string(stamps, unit="D").tolist()
        return days if len(set(days)) == len(days) else np.datetime_as_string(stamps).tolist()

    return _quartiles(seconds_N, texts)


def _of_numbers(values_N: np.ndarray) -> list[tuple[str, np.ndarray]]:
    different = np.unique(values_N[np.isfinite(values_N)])
    if len(different) > MOST_VALUES:
        return _quartiles(values_N.astype(np.float64), _texts)
    # Numbers of lines, cameras or shifts: all digits, and no more than their type has.
    names = [np.format_float_positional(value, trim="-") for value in different]
    parts = [(name, values_N == value) for name, value in zip(names, different, strict=True)]
    return [*_unknown(values_N), *parts]


def _quartiles(
    values_N: np.ndarray, texts: Callable[[np.ndarray], list[str]]
) -> list[tuple[str, np.ndarray]]:
    """Numbers in parts of about equal size; fewer parts where values repeat.

    texts: how edges are written.
    """
    parts = _unknown(values_N)
    known_N = np.isfinite(values_N)
    if not known_N.any():
        return parts
    edges = np.unique(np.quantile(values_N[known_N], np.linspace(0, 1, BINS + 1)))
    names = texts(edges)
    # All numbers are the same.
    if len(edges) == 1:
        return [*parts, (names[0], known_N)]
    for i, (start, end) in enumerate(pairwise(edges)):
        # The last part holds its upper edge.
        is_last = i == len(edges) - 2
        below = values_N <= end if is_last else values_N < end
        parts.append((f"{names[i]} to {names[i + 1]}", known_N & (values_N >= start) & below))
    return parts


def _unknown(values_N: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The part without a number, if there is one."""
    is_null_N = ~np.isfinite(values_N)
    return [("(null)", is_null_N)] if is_null_N.any() else []


def _texts(numbers: np.ndarray) -> list[str]:
    """Different numbers as different texts, without more digits than that takes: 0.41, 2019."""
    # What is before the point stays as it is.
    whole = len(f"{np.abs(numbers).max(initial=0):.0f}")
    for digits in range(min(17, max(3, whole)), 18):
        texts = [
            np.format_float_positional(number, digits, fractional=False, trim="-")
            for number in numbers
        ]
        if len(set(texts)) == len(numbers):
            break
    return texts
