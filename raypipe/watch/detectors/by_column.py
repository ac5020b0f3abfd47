"""Tests of single columns: Kolmogorov-Smirnov, Cramér-von Mises, and what images look like.

Each column is tested alone. The p-value of the piece is min(1, columns * smallest p): Bonferroni.
The numbers are Alibi Detect's: it calls the same functions of scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import scipy

from raypipe.watch.detectors.detector import Found, Pair, Setting
from raypipe.watch.projection import LEAST_CVM


def ks(pair: Pair, setting: Setting) -> Found:
    """The largest distance between two distribution functions, and where it is."""
    return _smallest(pair, _ks)


def cvm(pair: Pair, setting: Setting) -> Found:
    """The sum of squared distances: it sees a small shift of the whole, ks a gap at one place."""
    return _smallest(pair, _cvm)


def _ks(one_N: np.ndarray, other_M: np.ndarray) -> tuple[float, float]:
    found = scipy.stats.ks_2samp(one_N, other_M, method="asymp")
    return float(found.statistic), float(found.pvalue)


def _cvm(one_N: np.ndarray, other_M: np.ndarray) -> tuple[float, float]:
    found = scipy.stats.cramervonmises_2samp(one_N, other_M)
    return float(found.statistic), max(float(found.pvalue), LEAST_CVM)


def _smallest(pair: Pair, test: Callable[[np.ndarray, np.ndarray], tuple[float, float]]) -> Found:
    found = [test(one, other) for one, other in _columns(pair)]
    best = min(range(len(found)), key=lambda k: found[k][1])
    p_value = min(1.0, len(found) * found[best][1])
    detail = ""
    if pair.names:
        middle = [np.median(side[:, best]) for side in (pair.reference, pair.batch)]
        detail = f"{pair.names[best]}: median {middle[0]:.3g} to {middle[1]:.3g}"
    return Found(max(statistic for statistic, _ in found), p_value, detail)


def _columns(pair: Pair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # scipy keeps a float32's precision, and p then has five digits.
    sides = (side.astype(np.float64).T for side in (pair.reference, pair.batch))
    return zip(*sides, strict=True)
