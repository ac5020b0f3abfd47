"""Domains where no column names them: clusters of the reference's features that come out again.

k-means on principal components. The number of clusters is the largest whose clusters two halves of
the reference agree on: prediction strength (Tibshirani and Walther 2005). Where there is no such
number there is one domain, which is always right, only blunter.

Legend: N rows, D features, K clusters.
"""

from __future__ import annotations

import numpy as np

from raypipe.watch.mixture import project, squared_distances

MOST = 6
# Of pairs in one cluster of one half, the share that the other half puts together too. Tibshirani
# and Walther recommend 0.8 to 0.9. At 0.9, two kinds of solar cells were missed in 3 of 8 draws.
STRONG = 0.8
SPLITS = 5
STARTS = 5
STEPS = 50
# A half has half of it in each cluster; with fewer rows the agreement is luck.
LEAST_ROWS = 40
COMPONENTS = 16
MOST_ROWS = 2_000  # that clusters are found in; the others go to the nearest


def clusters(features_ND: np.ndarray, seed: int = 0) -> np.ndarray:
    """The cluster of each row, counted from 0, the largest first. Equal input, equal clusters."""
    rng = np.random.default_rng(seed)
    points_ND = project(features_ND)[:, :COMPONENTS]
    some = rng.permutation(len(points_ND))[:MOST_ROWS]
    found = 1
    for count in range(2, min(MOST, len(some) // LEAST_ROWS) + 1):
        if _strength(points_ND[some], count, rng) >= STRONG:
            found = count
    code_N = _assign(points_ND, _centres(points_ND[some], found, rng))
    used, code_N, sizes = np.unique(code_N, return_inverse=True, return_counts=True)
    place_K = np.empty(len(used), int)
    place_K[np.argsort(-sizes, kind="stable")] = np.arange(len(used))
    numbered: np.ndarray = place_K[code_N]
    return numbered


def _strength(points_ND: np.ndarray, count: int, rng: np.random.Generator) -> float:
    """The weakest cluster's agreement, its median over several splits into halves."""
    found = []
    for _ in range(SPLITS):
        mixed = rng.permutation(len(points_ND))
        one, other = points_ND[mixed[::2]], points_ND[mixed[1::2]]
        own_M = _assign(other, _centres(other, count, rng))
        theirs_M = _assign(other, _centres(one, count, rng))
        weakest = 1.0
        for cluster in range(count):
            mine = theirs_M[own_M == cluster]
            if len(mine) * 2 < LEAST_ROWS:
                weakest = 0.0
                break
            sizes = np.bincount(mine)
            together = (sizes * (sizes - 1)).sum() / (len(mine) * (len(mine) - 1))
            weakest = min(weakest, float(together))
        found.append(weakest)
    return float(np.median(found))


def _centres(points_ND: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """k-means (Lloyd 1982), started by k-means++ (Arthur and Vassilvitskii 2007) several times."""
    best: tuple[float, np.ndarray] | None = None
    for _ in range(STARTS if count > 1 else 1):
        centres = points_ND[rng.integers(len(points_ND))][None]
        while len(centres) < count:
            away_N = squared_distances(points_ND, centres).min(1)
            total = away_N.sum()
            chances = away_N / total if total > 0 else None
            chosen = rng.choice(len(points_ND), p=chances)
            centres = np.concatenate([centres, points_ND[chosen][None]])
        for _ in range(STEPS):
            code_N = _assign(points_ND, centres)
            # A cluster without rows stays where it is.
            moved = np.stack(
                [
                    points_ND[code_N == k].mean(0) if (code_N == k).any() else centres[k]
                    for k in range(count)
                ]
            )
            if np.array_equal(moved, centres):
                break
            centres = moved
        cost = float(squared_distances(points_ND, centres).min(1).sum())
        if best is None or cost < best[0]:
            best = cost, centres
    assert best is not None
    return best[1]


def _assign(points_ND: np.ndarray, centres_KD: np.ndarray) -> np.ndarray:
    found: np.ndarray = squared_distances(points_ND, centres_KD).argmin(1)
    return found
