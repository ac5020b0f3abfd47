"""The squared MMD of a window to the nearest mixture of domains, for many regroupings at once.

Legend: L rows of both sides, D features, K domains, U units (rows, or groups of rows that change
places together), P regroupings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raypipe.watch.groups import MANY
from raypipe.watch.projection import COMPONENTS

AT_ONCE = 50  # permutations whose matrices are in memory together
STEPS = 200  # of the fit of the weights


@dataclass(frozen=True)
class Placed:
    """Which unit each row belongs to, and of each unit its domain and its side."""

    unit_L: np.ndarray
    domain_U: np.ndarray
    is_window_U: np.ndarray
    domains: int

    def regroupings(self) -> float:
        """How many ways there are to choose the window's units, inside the domains."""
        found = 1.0
        for domain in range(self.domains):
            mine = self.domain_U == domain
            chosen = int((mine & self.is_window_U).sum())
            # Exact numbers of this size do not fit into a float.
            found *= float(min(math.comb(int(mine.sum()), chosen), MANY))
        return found

    def sides(self, count: int, rng: np.random.Generator, observed: bool) -> np.ndarray:
        """Weights (count, L, K + 1) of each row in each domain's mean, and in the window's.

        Each is a regrouping; with `observed` the first is the data as they came.
        """
        sides = np.zeros((count, len(self.domain_U), self.domains + 1), np.float32)
        every = np.arange(count)[:, None]
        for domain in range(self.domains):
            mine = np.flatnonzero(self.domain_U == domain)
            chosen = int(self.is_window_U[mine].sum())
            order = rng.random((count, len(mine))).argsort(1)
            if observed:
                order[0] = np.argsort(~self.is_window_U[mine], kind="stable")
            sides[every, mine[order[:, :chosen]], -1] = 1
            sides[every, mine[order[:, chosen:]], domain] = 1
        of_rows = sides[:, self.unit_L]
        weighted: np.ndarray = of_rows / of_rows.sum(1, keepdims=True)
        return weighted


def statistics(
    kernels: tuple[np.ndarray, np.ndarray],
    placed: Placed,
    permutations: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """(statistics (2, P + 1) of features and scores, weights_K). The first are the observed."""
    found = []
    observed_K = None
    for start in range(0, permutations + 1, AT_ONCE):
        count = min(AT_ONCE, permutations + 1 - start)
        sides = placed.sides(count, rng, observed=start == 0)
        features, scores = (_products(kernel, sides) for kernel in kernels)
        weights_PK = nearest_mixture(features)
        if observed_K is None:
            observed_K = weights_PK[0]
        found.append([_distance(products, weights_PK) for products in (features, scores)])
    assert observed_K is not None
    return np.concatenate(found, axis=1), observed_K


def _products(kernel_LL: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Mean kernel values (P, K + 1, K + 1) between the domains and the window."""
    count, rows, each = sides.shape
    # One wide product: as many thin ones take four times as long.
    wide = sides.transpose(1, 0, 2).reshape(rows, count * each)
    by_row = (kernel_LL @ wide).reshape(rows, count, each).transpose(1, 0, 2)
    return np.matmul(sides.transpose(0, 2, 1), by_row).astype(np.float64)


def _distance(products: np.ndarray, weights_PK: np.ndarray) -> np.ndarray:
    """Squared MMD between the window and the mixture with these weights."""
    signs = np.concatenate([weights_PK, np.full((len(weights_PK), 1), -1.0)], axis=1)
    found: np.ndarray = np.einsum("pk,pkj,pj->p", signs, products, signs)
    return found


def nearest_mixture(products: np.ndarray) -> np.ndarray:
    """weights_PK, from 0 up with the sum 1, that bring each mixture nearest to its window.

    products: mean kernel values (P, K + 1, K + 1), the window last. Accelerated projected gradient
    (Beck and Teboulle 2009), for all permutations at once.
    """
    between_PKK, cross_PK = products[:, :-1, :-1], products[:, :-1, -1]
    count, domains = cross_PK.shape
    weights = np.full((count, domains), 1 / domains)
    if domains == 1:
        return weights
    rate_P1 = 1 / np.maximum(np.linalg.eigvalsh(between_PKK)[:, -1:], 1e-12)
    ahead, pace = weights, 1.0
    for _ in range(STEPS):
        slope = np.einsum("pkj,pj->pk", between_PKK, ahead) - cross_PK
        after = _to_simplex(ahead - rate_P1 * slope)
        faster = (1 + math.sqrt(1 + 4 * pace**2)) / 2
        ahead = after + (pace - 1) / faster * (after - weights)
        weights, pace = after, faster
    return weights


def _to_simplex(points_PK: np.ndarray) -> np.ndarray:
    """The nearest points whose parts are at least 0 and sum to 1 (Duchi et al. 2008)."""
    sorted_PK = -np.sort(-points_PK, axis=1)
    shift_PK = (np.cumsum(sorted_PK, axis=1) - 1) / np.arange(1, points_PK.shape[1] + 1)
    last_P = (sorted_PK > shift_PK).sum(1) - 1
    return np.maximum(points_PK - shift_PK[np.arange(len(shift_PK)), last_P][:, None], 0)


def project(pooled_LD: np.ndarray) -> np.ndarray:
    """Principal components of all standardised rows, the largest first: a function of the union."""
    pooled = pooled_LD.astype(np.float64)
    spread_D = pooled.std(0)
    # A feature that never moves says nothing.
    moves_D = spread_D > 1e-6 * max(1e-12, float(spread_D.max()))
    if not moves_D.any():
        return np.zeros((len(pooled), 1))
    pooled = (pooled[:, moves_D] - pooled[:, moves_D].mean(0)) / spread_D[moves_D]
    keep = max(1, min(COMPONENTS, len(pooled) // 4, pooled.shape[1]))
    # Of the two matrices with the same components, the smaller one.
    if len(pooled) <= pooled.shape[1]:
        values, vectors = np.linalg.eigh(pooled @ pooled.T)
        lengths = np.sqrt(np.maximum(values[::-1][:keep], 0))
        found: np.ndarray = vectors[:, ::-1][:, :keep] * lengths
        return found
    _, vectors = np.linalg.eigh(pooled.T @ pooled)
    return pooled @ vectors[:, ::-1][:, :keep]


def gaussian(squared_LL: np.ndarray) -> np.ndarray:
    """Kernel values of all pairs, float32; the width by the median of the distances.

    Their mean is taken off: it cancels in every distance between mixtures, where its rounding would
    not.
    """
    median = float(np.median(squared_LL[np.triu_indices(len(squared_LL), 1)]))
    kernel_LL = np.exp(-squared_LL / max(median, 1e-12))
    centred: np.ndarray = (kernel_LL - kernel_LL.mean()).astype(np.float32)
    return centred


def squared_distances(one_LD: np.ndarray, other_MD: np.ndarray | None = None) -> np.ndarray:
    """Of all pairs of rows (L, M); without a second table, of the pairs within the first."""
    other_MD = one_LD if other_MD is None else other_MD
    squared = (one_LD**2).sum(1)[:, None] + (other_MD**2).sum(1) - 2 * one_LD @ other_MD.T
    return np.maximum(squared, 0)
