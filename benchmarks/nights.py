"""Tests of a night that benchmarks/horizon.py measures, and that nightly checks do not make.

- `sequential_p` (Besag and Clifford 1991) draws permutations until it knows. A check draws 500, and
  all that its level takes where these leave a doubt (raypipe/watch/promise.py): the same promise,
  with the detectors' own permutations.
- `night_p` is for nights whose images share a state (weather, light) that follows a stationary
  Gaussian AR(1): it compares a night's mean with the spread of the reference's nights. A champion's
  reference is images of no known night, and it needs 20 nights at least: no check can make it.
- `last_nights` are the images of several nights, as raypipe/watch/spans.py has them.

Letters in names: N rows of the reference, M of the window, L = N + M, P permutations, B nights of
the reference, Q directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import f as f_distribution

from raypipe.errors import DataError
from raypipe.watch import mmd

EXCEEDANCES = 4
"""Permutations as extreme as the window after which it is no alarm. More: a steadier p-value, at a
proportional cost of nights that alarm."""
FIRST, MOST_AT_ONCE = 64, 4096
ROUNDING = 1e-6
"""Of a squared MMD in float32. The chance statistic of 500 + 500 rows is about 1e-3."""
MOST_ROWS = 10_000
"""Of both sides together: the kernel matrix then takes 400 MB."""
DIRECTIONS = 8
NIGHTS_A_DIRECTION = 5
LEAST_NIGHTS = 20


@dataclass(frozen=True)
class SequentialP:
    """A valid p-value, the permutations that it took, and how many were as extreme."""

    p_value: float
    permutations: int
    extreme: int


def sequential_p(
    observed: float,
    draw: Callable[[int], np.ndarray],
    level: float,
    exceedances: int = EXCEEDANCES,
) -> SequentialP:
    """The p-value of Besag and Clifford (1991): draw until `exceedances` draws are as extreme.

    draw(count): so many further statistics under the null, float (count,). After `exceedances` /
    `level` draws it stops; then, and only then, the p-value can be below `level`. It is valid:
    P(p <= a) <= a under the null, for every a. DataError for statistics that are not finite and
    for a level outside 0 to 1; at 0 nothing can be shown.
    """
    if not 0 < level <= 1 or exceedances < 1:
        raise DataError(
            "No number of permutations shows this level",
            got=(level, exceedances),
            rule="The level is above 0 and at most 1, exceedances at least 1",
            fix="A level of 0 means that this horizon's budget is spent: do not test",
        )
    if not math.isfinite(observed):
        raise DataError("The window's statistic is not finite", got=observed)

    most = math.ceil(exceedances / level - 1e-9) - 1
    drawn = extreme = 0
    at_once = FIRST
    while drawn < most:
        found_P = np.asarray(draw(min(at_once, most - drawn)))
        if not found_P.size or not np.isfinite(found_P).all():
            raise DataError("Statistics of permutations are missing or not finite")
        as_extreme = np.flatnonzero(found_P >= observed)
        missing = exceedances - extreme
        if len(as_extreme) >= missing:
            # It stops at the very draw, not at the end of what was drawn at once.
            drawn += int(as_extreme[missing - 1]) + 1
            return SequentialP(exceedances / drawn, drawn, exceedances)
        extreme += len(as_extreme)
        drawn += len(found_P)
        at_once = min(2 * at_once, MOST_AT_ONCE)
    return SequentialP((extreme + 1) / (drawn + 1), drawn, extreme)


class Regrouped:
    """Squared MMD of a window, and of random regroupings of its rows and the reference's.

    A kernel matrix that is kept serves any number of permutations, each L² multiplications.
    """

    def __init__(self, kernel_LL: np.ndarray, reference_rows: int, seed: int) -> None:
        """kernel_LL: values of pairs, 0 on the diagonal, the reference's rows first."""
        rows = len(kernel_LL)
        self._batch_rows = rows - reference_rows
        if reference_rows < 2 or self._batch_rows < 2:
            raise DataError(
                "Too few rows to compare",
                got=(reference_rows, self._batch_rows),
                rule="At least two on each side",
            )
        self._kernel_LL = np.ascontiguousarray(kernel_LL, np.float32)
        self._row_sums_L = self._kernel_LL.sum(1, dtype=np.float64)
        self._rng = np.random.default_rng(seed)
        observed_L1 = (np.arange(rows) >= reference_rows)[:, None]
        self.statistic = float(self._squared(observed_L1)[0])

    @classmethod
    def of(
        cls, reference_ND: np.ndarray, batch_MD: np.ndarray, width: float, seed: int
    ) -> Regrouped:
        """With the Gaussian kernel of `mmd.mmd`. DataError above `MOST_ROWS` rows, and for numbers
        that are not finite."""
        pooled_LD = np.concatenate([reference_ND, batch_MD])
        if len(pooled_LD) > MOST_ROWS:
            fix = "Sample drift.max_rows rows of each side"
            raise DataError("Too many rows for one matrix", got=len(pooled_LD), fix=fix)
        if not np.isfinite(pooled_LD).all():
            raise DataError("Features hold numbers that are not finite")
        return cls(mmd.kernel(pooled_LD, width), len(reference_ND), seed)

    def p_value(self, level: float) -> SequentialP:
        """`sequential_p` of the window. Equal statistics, as of equal images, count as extreme."""
        return sequential_p(self.statistic - ROUNDING, self.draw, level)

    def draw(self, count: int) -> np.ndarray:
        """The statistics of `count` further random regroupings, float64 (count,)."""
        rows = len(self._kernel_LL)
        keys_PL = self._rng.random((count, rows), np.float32)
        chosen_PM = np.argpartition(keys_PL, self._batch_rows - 1, axis=1)[:, : self._batch_rows]
        in_batch_LP = np.zeros((rows, count), bool)
        in_batch_LP[chosen_PM.T, np.arange(count)] = True
        return self._squared(in_batch_LP)

    def _squared(self, in_batch_LP: np.ndarray) -> np.ndarray:
        """The unbiased squared MMD (mmd.py says why it is one matrix product)."""
        chosen_LP = in_batch_LP.astype(np.float32)
        # torch's product, not numpy's: it obeys the number of threads that raypipe has set.
        product_LP = (torch.from_numpy(self._kernel_LL) @ torch.from_numpy(chosen_LP)).numpy()
        inside_P = np.einsum("lp,lp->p", product_LP, chosen_LP, dtype=np.float64)
        touching_P = self._row_sums_L @ in_batch_LP
        across_P = touching_P - inside_P
        inside_rest_P = self._row_sums_L.sum() - touching_P - across_P
        m = self._batch_rows
        n = len(self._kernel_LL) - m
        squared_P: np.ndarray = (
            inside_rest_P / (n * (n - 1)) + inside_P / (m * (m - 1)) - 2 * across_P / (n * m)
        )
        return squared_P


def last_nights(
    windows: Sequence[Sequence[Hashable]], span: int, most_rows: int, seed: int
) -> list[Hashable]:
    """The distinct images of the last `span` windows: at most `most_rows` of them, at random.

    windows: keys of images, as their sha256, oldest window first. An image that came on many nights
    is one image: counted twice it would be no independent draw.
    """
    if span < 1 or most_rows < 1:
        raise DataError("A span has at least one night and one row", got=(span, most_rows))
    distinct = list(dict.fromkeys(key for window in windows[-span:] for key in window))
    if len(distinct) <= most_rows:
        return distinct
    picked = np.random.default_rng(seed).choice(len(distinct), most_rows, replace=False)
    return [distinct[i] for i in np.sort(picked)]


def night_p(reference_BQ: np.ndarray, nights_KQ: np.ndarray) -> np.ndarray:
    """Does the mean of a night lie outside the spread of the reference's nights? Hotelling's T².

    reference_BQ: mean embeddings of B nights in the order of time, on Q directions that were chosen
    without these nights (principal components of the training features), widest first; nights_KQ:
    of K later nights. Returns a p-value each, (K,). Of Q directions, `DIRECTIONS` are used at most,
    and fewer where the nights are few or alike: as many as the reference can say the spread of.

    Exact for independent Gaussian nights. For a stationary Gaussian AR(1) the effective number of
    nights is estimated. Nights hold about equally many images. DataError below `LEAST_NIGHTS`
    nights, for nights that are all the same, and for numbers that are not finite.
    """
    nights, width = reference_BQ.shape
    if nights < LEAST_NIGHTS or nights_KQ.ndim != 2 or nights_KQ.shape[1] != width:
        raise DataError(
            "The reference has too few nights, or other directions than the night",
            got=(reference_BQ.shape, nights_KQ.shape),
            rule=f"At least {LEAST_NIGHTS} nights, and as many directions on both sides",
        )
    if not (np.isfinite(reference_BQ).all() and np.isfinite(nights_KQ).all()):
        raise DataError("Means of nights hold numbers that are not finite")
    # A direction in which no night differs has no spread to compare with.
    differs_Q = np.ptp(reference_BQ, axis=0) > 0
    reference_BQ = reference_BQ[:, differs_Q][:, :DIRECTIONS]
    nights_KQ = nights_KQ[:, differs_Q][:, :DIRECTIONS]
    if not reference_BQ.shape[1]:
        raise DataError("All nights of the reference have the same mean, or no directions")

    correlation = _autocorrelation(reference_BQ)
    lags = np.arange(1, nights)
    # Variance of the reference's mean, in variances of a night.
    of_mean = (1 + 2 * ((1 - lags / nights) * correlation**lags).sum()) / nights
    free = (nights - 1) * (1 - correlation**2) / (1 + correlation**2)
    used = int(min(reference_BQ.shape[1], max(1, free // NIGHTS_A_DIRECTION)))

    deviations_BQ = reference_BQ[:, :used] - reference_BQ[:, :used].mean(0)
    spread_QQ = deviations_BQ.T @ deviations_BQ / (nights * (1 - of_mean))
    away_KQ = nights_KQ[:, :used] - reference_BQ[:, :used].mean(0)
    inverse_QQ = np.linalg.pinv(spread_QQ, hermitian=True)
    squared_K = ((away_KQ @ inverse_QQ) * away_KQ).sum(1) / (1 + of_mean)
    rest = free - used + 1
    p_K: np.ndarray = f_distribution.sf(squared_K * rest / (used * free), used, rest)
    return p_K


def _autocorrelation(reference_BQ: np.ndarray) -> float:
    """Of one night with the next: of the direction in which it is largest, with its bias removed.

    An estimate from B nights is too low by about (1 + 4r) / B (Marriott and Pope 1954).
    """
    deviations_BQ = reference_BQ - reference_BQ.mean(0)
    power_Q = (deviations_BQ**2).sum(0)
    lagged_Q = (deviations_BQ[1:] * deviations_BQ[:-1]).sum(0)
    raw_Q = np.divide(lagged_Q, power_Q, out=np.zeros_like(power_Q), where=power_Q > 0)
    nights = len(reference_BQ)
    corrected_Q = (nights * raw_Q + 1) / (nights - 4)
    return float(np.clip(corrected_Q.max(), 0, 0.98))
