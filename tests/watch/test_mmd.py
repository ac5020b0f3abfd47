"""MMD in blocks equals the definition, in pairs; its p-value is that of a permutation test."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.watch import mmd
from raypipe.watch.mmd import regroupings
from raypipe.watch.projection import median_width


def by_definition(points_LD: np.ndarray, in_batch_L: np.ndarray, width: float) -> float:
    """Gretton et al. 2012, eq. 3: pairs of equal rows are left out."""
    squared_LL = ((points_LD[:, None] - points_LD[None]).astype(np.float64) ** 2).sum(2)
    kernel_LL = np.exp(-squared_LL / (2 * width**2))
    np.fill_diagonal(kernel_LL, 0)
    batch, rest = in_batch_L, ~in_batch_L
    n, m = int(rest.sum()), int(batch.sum())
    own = kernel_LL[rest][:, rest].sum() / (n * (n - 1))
    own += kernel_LL[batch][:, batch].sum() / (m * (m - 1))
    return float(own - 2 * kernel_LL[rest][:, batch].mean())


@pytest.mark.parametrize(("rows", "batch_rows"), [(2, 2), (70, 33), (40, 61)])
@pytest.mark.parametrize("far", [0.0, 1000.0])
def test_it_is_the_definition(
    rows: int, batch_rows: int, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks and a rest; and rows that all lie far from 0."""
    monkeypatch.setattr(mmd, "BLOCK", 16)
    rng = np.random.default_rng(rows)
    points = rng.normal(size=(rows + batch_rows, 5)) + far
    points[0] = points[-1]
    pooled = points.astype(np.float32)
    width = median_width(pooled, seed=0)
    chosen = regroupings(rows, batch_rows, 20, seed=1)
    assert (chosen.sum(0) == batch_rows).all()
    found = mmd.mmd(pooled[:rows], pooled[rows:], width, chosen)
    observed = np.arange(len(pooled)) >= rows
    # Neighbouring float32 numbers near 1000 are 6e-5 apart.
    near = 1e-6 if not far else 1e-3
    assert found.statistic == pytest.approx(by_definition(pooled, observed, width), abs=near)
    permuted = [by_definition(pooled, chosen[:, p], width) for p in range(20)]
    assert found.permuted_P == pytest.approx(permuted, abs=near)


def test_p_is_uniform_without_drift_and_small_with_it() -> None:
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(200):
        points = rng.normal(size=(60, 4)).astype(np.float32)
        chosen = regroupings(40, 20, 99, seed)
        p_values.append(mmd.mmd(points[:40], points[40:], 2.0, chosen).p_value)
    # Kolmogorov's distance that 200 uniform draws exceed once in 1,000.
    assert np.abs(np.sort(p_values) - np.arange(1, 201) / 200).max() < 0.138
    moved = points[40:] + 2
    assert mmd.mmd(points[:40], moved, 2.0, chosen).p_value == 0.01


def test_equal_rows_are_no_trouble() -> None:
    points = np.ones((30, 3), np.float32)
    found = mmd.mmd(points[:20], points[20:], median_width(points, 0), regroupings(20, 10, 50, 0))
    assert found.statistic == pytest.approx(0, abs=1e-6) and found.p_value == 1
