"""What every drift test starts from: both sides cut to a size and projected, and a kernel's width.

The exact tests and Alibi Detect's get the same arrays from here. A sidecar's worker imports this
file too, under numpy 1: it imports nothing but numpy.

A p-value is only worth its false-alarm rate, so nothing is fitted on the reference alone:
standardisation, principal components and the kernel's width come from reference and batch
*together*, which leaves the two exchangeable when nothing has drifted. Fitted on 130 reference rows
alone, 64 components suit those rows better than any fresh ones: MMD then says p < 0.05 in 9 of 60
draws from one distribution, where the union says it in 4 (and KS in 5.4 % of 500). Both sides are
cut to `max_rows` first, so that a batch of 2,000 does not own the components that 130 reference
rows are judged in.

Letters: N rows of the reference, M of the batch, L of both; D features, K components.
"""

from __future__ import annotations

import numpy as np

# At most, and at most a quarter of the rows: a component needs several rows to be more than noise.
COMPONENTS = 64
NEIGHBOURS = 5
# Rows of a side that online.py compares: the kernel's matrix then takes 256 MB.
MOST_ONLINE = 4_000
# Pairs of rows that the kernel's width is measured on: all of them up to 500 + 500 rows. Of more
# rows a sample, which is off by less than 1 % (test_projection.py).
PAIRS = 500_000
# scipy's distribution of Cramér-von Mises's statistic is a sum that ends at terms of 1e-7: what it
# says below is rounding (2.4e-7 where the two sides have nothing in common, sometimes 0).
LEAST_CVM = 1e-6


def drawn(rows: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """The numbers of at most so many rows, drawn evenly, in their order."""
    if rows <= most:
        return np.arange(rows)
    return np.sort(rng.choice(rows, most, replace=False))


def subsample(rows_ND: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most so many rows, drawn evenly, in their order; float64."""
    return rows_ND[drawn(len(rows_ND), most, rng)].astype(np.float64)


def columns(scores_NC: np.ndarray) -> np.ndarray:
    """The scores that say something of their own, float64.

    Two classes are one number twice: testing both would only double the Bonferroni factor.
    """
    two = scores_NC.shape[1] == 2
    return np.asarray(scores_NC[:, 1:] if two else scores_NC, dtype=np.float64)


def project(reference_ND: np.ndarray, batch_MD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both on the principal components of their standardised union: float32 (N, K) and (M, K).

    Signs and all, the components are a function of the union only.
    """
    rows = len(reference_ND)
    pooled_LD = np.concatenate([reference_ND, batch_MD])
    spread_D = pooled_LD.std(0)
    # A feature that never moves says nothing.
    alive_D = spread_D > 1e-6 * max(1e-12, spread_D.max())
    if not alive_D.any():
        return np.zeros((rows, 1), np.float32), np.zeros((len(batch_MD), 1), np.float32)
    pooled_LD = (pooled_LD[:, alive_D] - pooled_LD[:, alive_D].mean(0)) / spread_D[alive_D]
    keep = max(1, min(COMPONENTS, len(pooled_LD) // 4, pooled_LD.shape[1]))
    _, _, axes = np.linalg.svd(pooled_LD, full_matrices=False)
    projected_LK = (pooled_LD @ axes[:keep].T).astype(np.float32)
    return projected_LK[:rows], projected_LK[rows:]


def median_width(pooled_LD: np.ndarray, seed: int) -> float:
    """The median heuristic: a Gaussian kernel's width by the distances between rows of both sides.

    Of reference and batch together, so that it does not know which is which.
    """
    rng = np.random.default_rng(seed)
    count = len(pooled_LD)
    if count * (count - 1) // 2 <= PAIRS:
        one, other = np.triu_indices(count, 1)
    else:
        one = rng.integers(count, size=PAIRS)
        # Another row than the first.
        other = (one + rng.integers(1, count, size=PAIRS)) % count
    squared = [
        ((pooled_LD[one[part]] - pooled_LD[other[part]]).astype(np.float64) ** 2).sum(1)
        for part in np.array_split(np.arange(len(one)), max(1, len(one) // 10_000))
    ]
    return float(np.sqrt(0.5 * max(np.median(np.concatenate(squared)), 1e-12)))


def unusual(reference_ND: np.ndarray, batch_MD: np.ndarray) -> np.ndarray:
    """distance_M float32: each batch row's mean distance to the 5 nearest reference rows.

    In units of the reference's own median. Here the reference sets the scale alone: this ranks
    images for people to look at and is no test.
    """
    # In float64, where no square overflows.
    spread_D = reference_ND.std(0, dtype=np.float64)
    # A feature that is dead in the reference must not rule.
    spread_D = np.maximum(spread_D, max(0.1 * float(np.median(spread_D)), 1e-6))
    mean_D = reference_ND.mean(0, dtype=np.float64)
    reference_ND, batch_MD = (
        ((side - mean_D) / spread_D).astype(np.float64) for side in (reference_ND, batch_MD)
    )
    nearest = min(NEIGHBOURS, len(reference_ND) - 1)
    own_N = _own_distances(reference_ND, nearest)
    unit = max(float(np.median(own_N)), 1e-12)
    blocks = [
        _nearest(_squared_distances(batch_MD[at : at + 1024], reference_ND), nearest)
        for at in range(0, len(batch_MD), 1024)
    ]
    return (np.concatenate(blocks) / unit).astype(np.float32)


def _own_distances(rows_ND: np.ndarray, nearest: int) -> np.ndarray:
    """Of each row to its nearest other rows. In blocks: 10,000 rows would take 800 MB at once."""
    found = []
    for start in range(0, len(rows_ND), 1024):
        squared = _squared_distances(rows_ND[start : start + 1024], rows_ND)
        # No row is its own neighbour.
        places = np.arange(len(squared))
        squared[places, start + places] = np.inf
        found.append(_nearest(squared, nearest))
    return np.concatenate(found)


def _nearest(squared: np.ndarray, count: int) -> np.ndarray:
    return np.sqrt(np.partition(squared, count - 1, axis=1)[:, :count]).mean(1)


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0)
