"""Maximum mean discrepancy (MMD) of two samples, exactly, with its p-value by permutation.

Unbiased squared MMD with one Gaussian kernel (Gretton et al. 2012, eq. 3), as Alibi Detect's
MMDDrift computes it. Alibi keeps the matrix of all pairs and sorts it anew for each permutation.
Here the matrix is made in blocks, which are forgotten, and a block serves all permutations at once:
as z is 1 for the rows that a permutation calls the batch, z'Kz is the sum over its pairs, and for
all permutations that is one matrix product. K is symmetric, so half of the blocks are enough.

Legend: N rows of the reference, M of the batch, L = N + M of both, D features, P permutations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows of a block, which is 4 MB of float32.
BLOCK = 1024


@dataclass(frozen=True)
class Mmd:
    """statistic: the squared MMD, which may be slightly negative. permuted_P: of each
    permutation. rounding: statistics that differ by less are equal."""

    statistic: float
    permuted_P: np.ndarray
    rounding: float = 0.0

    @property
    def p_value(self) -> float:
        """The share of regroupings that are at least as extreme; the observed one counts too."""
        extreme = int((self.permuted_P >= self.statistic - self.rounding).sum())
        return (extreme + 1) / (len(self.permuted_P) + 1)


def mmd(
    reference_ND: np.ndarray, batch_MD: np.ndarray, width: float, in_batch_LP: np.ndarray
) -> Mmd:
    """Compare two samples of at least two rows of finite numbers.

    width: the kernel exp(-d² / 2 width²). in_batch_LP: bool, which rows of (reference, batch) each
    permutation calls the batch: every column has M true ones (`regroupings`); about M, and at least
    two of each kind, where whole groups change places (groups.py).

    Memory: L * (D + P / 4) floats, and a few blocks. Time: L² * (D + P) / 2 multiplications.
    """
    points_LD = _scaled(np.concatenate([reference_ND, batch_MD]), width)
    observed_L1 = np.arange(len(points_LD))[:, None] >= len(reference_ND)
    chosen_LP = torch.from_numpy(np.concatenate([observed_L1, in_batch_LP], axis=1))

    # Sums over pairs of different rows: of all rows, of each row with all, inside each batch.
    row_sums_L = torch.zeros(len(points_LD), dtype=torch.float64)
    inside_P = torch.zeros(chosen_LP.shape[1], dtype=torch.float64)
    for one, other, values in _blocks(points_LD):
        times = 1 if one == other else 2
        of_chosen = values @ chosen_LP[other].to(values.dtype)
        inside_P += times * (of_chosen * chosen_LP[one]).sum(0, dtype=torch.float64)
        row_sums_L[one] += values.sum(1)
        if one != other:
            row_sums_L[other] += values.sum(0)
    touching_P = torch.stack([row_sums_L[chosen].sum() for chosen in chosen_LP.T])
    across_P = touching_P - inside_P
    inside_rest_P = row_sums_L.sum() - touching_P - across_P

    batch_P = chosen_LP.sum(0).to(torch.float64)
    rest_P = len(points_LD) - batch_P
    squared_P = (
        inside_rest_P / (rest_P * (rest_P - 1))
        + inside_P / (batch_P * (batch_P - 1))
        - 2 * across_P / (rest_P * batch_P)
    ).numpy()
    return Mmd(float(squared_P[0]), squared_P[1:])


def regroupings(rows: int, batch_rows: int, count: int, seed: int) -> np.ndarray:
    """in_batch_LP of `mmd`: `count` random ways to call `batch_rows` of all rows the batch.

    They are those that Alibi Detect draws after torch.manual_seed(seed), so that both engines give
    equal p-values.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen_LP = np.zeros((rows + batch_rows, count), bool)
    for p in range(count):
        drawn = torch.randperm(len(chosen_LP), generator=generator)[-batch_rows:]
        chosen_LP[drawn.numpy(), p] = True
    return chosen_LP


def kernel(pooled_LD: np.ndarray, width: float) -> np.ndarray:
    """The values of all pairs, float32 (L, L); no row is paired with itself: 0."""
    kernel_LL = np.zeros((len(pooled_LD), len(pooled_LD)), np.float32)
    for one, other, values in _blocks(_scaled(pooled_LD, width)):
        kernel_LL[one, other] = values.numpy()
        kernel_LL[other, one] = values.numpy().T
    return kernel_LL


def _scaled(pooled_LD: np.ndarray, width: float) -> Tensor:
    """Rows whose squared distances are the kernel's negative exponents.

    Around their mean: where all lie far from 0, float32 would round their distances away.
    """
    points = pooled_LD.astype(np.float32)
    points -= points.mean(0, dtype=np.float64).astype(np.float32)
    return torch.from_numpy(points / np.float32(width * np.sqrt(2)))


def _blocks(points_LD: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, kernel values) of the blocks on the diagonal and above it.

    The diagonal itself is 0: no row is paired with itself.
    """
    squares_L = (points_LD**2).sum(1)
    starts = range(0, len(points_LD), BLOCK)
    slices = [slice(start, min(start + BLOCK, len(points_LD))) for start in starts]
    for place, one in enumerate(slices):
        twice = 2 * points_LD[one]
        for other in slices[place:]:
            exponents = torch.addmm(-squares_L[other], twice, points_LD[other].T)
            exponents -= squares_L[one, None]
            # Rounding may make the distance of equal rows negative.
            values = exponents.clamp_(max=0).exp_()
            if one == other:
                values.fill_diagonal_(0)
            yield one, other, values
