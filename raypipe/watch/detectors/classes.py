"""Chi-squared on the predicted classes: does the model say each class as often as before?

Pearson's test (1900) of a table with two rows, one a side, and a column for each class that either
side has. Its distribution holds where each cell expects 5 images or more (Cochran 1954). With fewer
the p-value is exact: Fisher's for two classes, else by permutation, with the counts of both sides
together held.
"""

from __future__ import annotations

import numpy as np
import scipy

from raypipe.watch.detectors.detector import Found, Pair, Setting

LEAST_EXPECTED = 5
CELLS_AT_A_TIME = 2_000_000


def chi2(pair: Pair, setting: Setting) -> Found:
    """pair: the number of each image's class, (N, 1) and (M, 1)."""
    sides = (pair.reference[:, 0], pair.batch[:, 0])
    known = np.unique(np.concatenate(sides))
    counts_2C = np.array([[(side == number).sum() for number in known] for side in sides])
    # One class on both sides: nothing that could move.
    if len(known) == 1:
        return Found(0.0, 1.0)

    rows_2 = counts_2C.sum(1)
    expected_2C = rows_2[:, None] * counts_2C.sum(0) / rows_2.sum()
    if expected_2C.min() >= LEAST_EXPECTED:
        tested = scipy.stats.chi2_contingency(counts_2C)
        statistic, p_value = float(tested.statistic), float(tested.pvalue)
    else:
        statistic = float(((counts_2C - expected_2C) ** 2 / expected_2C).sum())
        if len(known) == 2:
            p_value = float(scipy.stats.fisher_exact(counts_2C).pvalue)
        else:
            p_value = _permuted(counts_2C, expected_2C, statistic, setting)

    # The class whose counts are furthest from what was expected, in units of chance.
    shares_2C = counts_2C / rows_2[:, None]
    most = int(((counts_2C - expected_2C) ** 2 / expected_2C).sum(0).argmax())
    name = pair.names[int(known[most])] if pair.names else str(int(known[most]))
    before, after = 100 * shares_2C[:, most]
    return Found(statistic, p_value, f"{name!r}: {before:.3g} % to {after:.3g} %")


def _permuted(
    counts_2C: np.ndarray, expected_2C: np.ndarray, statistic: float, setting: Setting
) -> float:
    """The share of random regroupings that are as far from what is expected; ours is one."""
    rng = np.random.default_rng(setting.seed)
    pooled_C, batch = counts_2C.sum(0), int(counts_2C[1].sum())
    # Both rows are as far away from what they expect: the weights of the two add up.
    weights_C = (1 / expected_2C).sum(0)
    threshold = statistic * (1 - 1e-9)
    at_once = max(1, CELLS_AT_A_TIME // len(pooled_C))
    extreme = 0
    for start in range(0, setting.permutations, at_once):
        draws = min(at_once, setting.permutations - start)
        drawn_PC = rng.multivariate_hypergeometric(pooled_C, batch, draws, method="marginals")
        away_P = (drawn_PC - expected_2C[1]) ** 2 @ weights_C
        extreme += int((away_P >= threshold).sum())
    return (extreme + 1) / (setting.permutations + 1)
