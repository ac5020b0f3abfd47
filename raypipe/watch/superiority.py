"""Is the challenger better? One-sided tests of paired results, and their correction for number.

Each test has the null hypothesis 'the challenger is no better' and looks at pairs: the results of
both models on the same row. Pure functions of counts and arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy

FLIPS = 9_999
SIGNS_AT_A_TIME = 1_000_000  # 8 MB of random signs


def mcnemar(won: int, lost: int) -> float:
    """The exact McNemar test (1947): the probability of `won` or more heads in fair tosses.

    A toss is a row on which exactly one model is right. Other rows do not tell the models apart.
    """
    if won == 0:
        return 1.0
    return float(scipy.special.bdtrc(won - 1, won + lost, 0.5))


def sign_flips(gains_N: np.ndarray) -> float:
    """The sign-flip permutation test (Fisher 1935) of the differences in absolute error.

    Under the null hypothesis each sign is equally likely. The p-value is the share of draws whose
    sum is as large as the observed one. The observed signs count as one draw. The draws have a
    fixed seed, so equal input gives an equal p-value. NaN where a difference is not finite.
    """
    # No draw compares with NaN: its p-value would be the smallest there is.
    if not np.isfinite(gains_N).all():
        return math.nan
    observed = gains_N.sum()
    rng = np.random.default_rng(0)
    threshold = observed - 1e-9 * abs(observed)  # equal sums must not differ by rounding
    draws_at_a_time = max(1, SIGNS_AT_A_TIME // gains_N.size)

    as_large = 1
    for start in range(0, FLIPS, draws_at_a_time):
        draws = min(draws_at_a_time, FLIPS - start)
        bits_DN = rng.integers(0, 2, (draws, gains_N.size), dtype=np.int8)
        signs_DN = 2.0 * bits_DN - 1
        as_large += int((signs_DN @ gains_N >= threshold).sum())
    return as_large / (1 + FLIPS)


def holm(p_values: Sequence[float], alpha: float) -> list[int]:
    """The hypotheses that are rejected at `alpha` together: Holm's step-down procedure (1979).

    Returns their positions in `p_values`, smallest p first.
    """
    by_size = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = []
    for rank, i in enumerate(by_size):
        level = alpha / (len(p_values) - rank)
        # Written so that a p-value of NaN stops the procedure.
        if not p_values[i] <= level:
            break
        rejected.append(i)
    return rejected
