"""Is the challenger worse on a slice? Tests against a tolerated loss, and their confidence bounds.

Each test has the null hypothesis 'worse by the tolerance or more'. A slice is safe when the test
rejects it, which is the same as: the lower confidence bound lies above `-tolerance`.

- Rows that are right or wrong: Tango's score test (1998, Statistics in Medicine 17:891). It keeps
  its level where few rows differ; Wald's test does not.
- Numbers: Student's t of the mean difference.

Differences are those of the challenger: positive is better. Pure functions of counts and arrays.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

LOOSEST = 4  # times safety_alpha: the highest level of a slice's test, for any number of slices
USEFUL_GAIN = 1.25  # times safety_alpha: a level that is hardly looser is not used
BISECTIONS = 25  # the level is exact to a millionth of a per cent
CLEARED = 0.9  # the probability that `rows_needed` is computed for


def tango(won: int, lost: int, rows: int, difference: float) -> float:
    """The score statistic of 'the true difference is `difference`', about standard normal.

    `won` rows only the challenger has right, `lost` rows only the champion. Tango 1998, equations 3
    and 4.
    """
    # The most likely share of lost rows under the hypothesis solves a x² + b x + c = 0.
    a = 2 * rows
    b = -won - lost + (a - won + lost) * difference
    c = -lost * difference * (1 - difference)
    losing = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)

    variance = rows * (2 * losing + difference * (1 - difference))
    excess = won - lost - rows * difference
    if variance <= 1e-12:
        return math.copysign(math.inf, excess) if excess else 0.0
    return excess / math.sqrt(variance)


def tango_p(won: int, lost: int, rows: int, tolerance: float) -> float:
    """The p-value of 'worse by `tolerance` or more'."""
    return float(scipy.special.ndtr(-tango(won, lost, rows, -tolerance)))


def tango_bound(won: int, lost: int, rows: int, level: float) -> float:
    """The lower confidence bound of the difference: the largest loss not rejected at `level`.

    level: up to 0.5, where the bound is the difference itself.
    """
    z = float(scipy.special.ndtri(1 - level))
    # Between the least difference and the observed one, where the statistic is 0. Just inside of
    # both, because a variance of 0 has no statistic.
    lowest = -1 + 1e-9
    highest = (won - lost) / rows - 1e-9
    if lowest >= highest:
        return -1.0

    def excess(difference: float) -> float:
        return tango(won, lost, rows, difference) - z

    # A level of 0.5 (z = 0), or next to it: the root lies within the margin.
    if excess(highest) >= 0:
        return highest
    return float(scipy.optimize.brentq(excess, lowest, highest, xtol=1e-6))


def student_p(difference: float, error: float, rows: int, tolerance: float) -> float:
    """The p-value of 'worse by `tolerance` or more'; `error` is the difference's standard error.

    Of one row nobody knows it: nothing is shown, here as below.
    """
    if rows < 2:
        return 1.0
    excess = difference + tolerance
    if error == 0:
        return 0.0 if excess > 0 else 1.0
    return float(scipy.special.stdtr(rows - 1, -excess / error))


def student_p_harmed(difference: float, error: float, rows: int) -> float:
    """The p-value of 'no worse'."""
    if rows < 2:
        return 1.0
    if error == 0:
        return 0.0 if difference < 0 else 1.0
    return float(scipy.special.stdtr(rows - 1, difference / error))


def student_bound(difference: float, error: float, rows: int, level: float) -> float:
    """The lower confidence bound of the difference."""
    if rows < 2:
        return -math.inf
    return difference - float(scipy.special.stdtrit(rows - 1, 1 - level)) * error


def rows_needed(error: float, rows: int, level: float, tolerance: float) -> int:
    """Test rows with which an equal challenger passes a slice with a probability of 90 %.

    A normal approximation. `error` is the standard error at `rows` rows. Rounded up to tens.
    """
    error_of_one_row = error * math.sqrt(rows)
    quantiles = float(scipy.special.ndtri(1 - level) + scipy.special.ndtri(CLEARED))
    needed = (error_of_one_row * quantiles / tolerance) ** 2
    return int(math.ceil(needed / 10) * 10)


def slice_level(
    differences_S: np.ndarray, errors_S: np.ndarray, tolerance: float, safety_alpha: float
) -> float:
    """The level of each slice's test: `safety_alpha`, or more where there are many slices.

    What is bounded is one event: a slice is worse by the tolerance, it passes, *and all other
    slices pass*. With many slices an equal challenger fails one of them by chance, so each test may
    be less strict. How much less depends on how likely the others pass. That is estimated here from
    the differences and their standard errors.

    The estimate errs on the strict side: a loss counts as 0, a gain counts twice (with few losses a
    slice passes more easily than its standard error predicts), the standard error of the pooled
    difference is added, and a level that is hardly looser is not used, because counts are discrete.
    """
    variances_S = np.array([max(error, 1e-9) ** 2 for error in errors_S])
    pooled_error = math.sqrt(1 / (1 / variances_S).sum())
    gains_S = np.maximum(_shrunk(differences_S, variances_S), 0.0)
    likely_S = 2 * gains_S + pooled_error
    margins_S = (likely_S + tolerance) / np.sqrt(variances_S)

    def is_strict_enough(level: float) -> bool:
        """Whether the event has at most `safety_alpha`, whichever slice is the worse one."""
        # In logarithms, because products of thirty probabilities get small.
        passes_S = scipy.special.log_ndtr(margins_S + scipy.special.ndtri(level))
        event = math.log(level) + float(passes_S.sum() - passes_S.min())
        return event <= math.log(safety_alpha)

    loosest = min(0.5, LOOSEST * safety_alpha)
    if is_strict_enough(loosest):
        return loosest
    low, high = safety_alpha, loosest
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if is_strict_enough(middle):
            low = middle
        else:
            high = middle
    return low if low > USEFUL_GAIN * safety_alpha else safety_alpha


def _shrunk(differences_S: np.ndarray, variances_S: np.ndarray) -> np.ndarray:
    """Each slice's difference, shrunk towards the pooled one.

    The more of the scatter between slices is sampling error, the more they are shrunk: random
    effects by DerSimonian and Laird 1986.
    """
    weights_S = 1 / variances_S
    total = weights_S.sum()
    pooled = (weights_S * differences_S).sum() / total
    scatter = (weights_S * (differences_S - pooled) ** 2).sum()
    scale = total - (weights_S**2).sum() / total

    between = 0.0  # the variance between slices
    if scale > 0:
        between = max(0.0, (scatter - (len(weights_S) - 1)) / scale)
    own_S = between / (between + variances_S)
    return own_S * differences_S + (1 - own_S) * pooled
