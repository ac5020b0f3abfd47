"""A median of measurements, with an interval that asks nothing of their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

MISS = 0.05  # share of intervals that miss the median


@dataclass(frozen=True)
class Spread:
    """A median of measurements and the ends of its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """With an interval of order statistics that holds the median with at least 95 %.

        Without enough values for that, or with one that is no number, it is open.
        """
        ordered = np.sort(np.asarray(values, float))
        count = len(ordered)
        if not count or not np.isfinite(ordered).all():
            return cls(math.nan, -math.inf, math.inf)
        # Each end may miss with half of MISS: fewer than `below` values lie under the median.
        below = 0
        while scipy.special.bdtr(below, count, 0.5) <= MISS / 2:
            below += 1
        median = float(np.median(ordered))
        if below == 0:
            return cls(median, -math.inf, math.inf)
        return cls(median, float(ordered[below - 1]), float(ordered[-below]))
