"""A Gaussian process that ranks configurations on a task that it has not seen.

One process for all tasks: Matern 3/2 over scaled numbers and over a learned place of each category
(backbone, optimizer, schedule, augmentation), with one length scale a number; a part shared by all
runs of a backbone; and a part shared by runs of one task. Noise is a configuration's own luck.

What it costs: 15 s of one core for the kernel (80 steps of Adam on the marginal likelihood of 700
random rows), and one inverse of 2,243 rows, which gives the prediction of every task left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.quicktune import Runs

STEPS = 80
ROWS = 700  # of each step's likelihood
PLACES = 3  # dimensions of a category's place


class Kernel(torch.nn.Module):
    """k(row, row) for the rows of one table."""

    def __init__(self, runs: Runs, rows_n: np.ndarray) -> None:
        super().__init__()
        numbers_NF = torch.tensor(runs.numbers_NF[rows_n])
        self.numbers_NF = numbers_NF - numbers_NF.mean(0)
        self.codes_NC = torch.tensor(runs.categories_NC[rows_n])
        self.task_N = torch.tensor(runs.task_N[rows_n])
        # Logarithms: of 1 / length scale, and of variances.
        self.scale_F = torch.nn.Parameter(_full(-1.5, numbers_NF.shape[1]))
        self.smooth, self.backbone, self.task, self.noise = (
            torch.nn.Parameter(_full(at)) for at in (0.0, -1.0, -2.0, -1.0)
        )
        sizes = [int(codes_N.max()) + 1 for codes_N in self.codes_NC.T]
        self.places = torch.nn.ParameterList(
            0.3 * torch.randn(size, PLACES, dtype=torch.float64) for size in sizes
        )

    def forward(self, i_n: torch.Tensor, j_m: torch.Tensor) -> torch.Tensor:
        """k_nm between two sets of rows."""
        codes = self.codes_NC.T
        placed = [place[codes[i]] for i, place in enumerate(self.places)]
        at_ND = torch.cat([self.numbers_NF * self.scale_F.exp(), *placed], dim=1)
        x_nD, y_mD = at_ND[i_n], at_ND[j_m]
        squared_nm = (x_nD**2).sum(1)[:, None] + (y_mD**2).sum(1)[None] - 2 * x_nD @ y_mD.T
        far_nm = (3 * squared_nm.clamp_min(1e-12)).sqrt()
        backbone_N = self.codes_NC[:, 0]
        same_nm = (backbone_N[i_n][:, None] == backbone_N[j_m][None]).double()
        task_nm = (self.task_N[i_n][:, None] == self.task_N[j_m][None]).double()
        smooth_nm = self.smooth.exp() * (1 + far_nm) * (-far_nm).exp()
        return smooth_nm + self.backbone.exp() * same_nm + self.task.exp() * task_nm * (1 + same_nm)

    def noisy(self, i_n: torch.Tensor) -> torch.Tensor:
        """The covariance of what is measured."""
        own_nn = (self.noise.exp() + 1e-4) * torch.eye(len(i_n), dtype=torch.float64)
        return self(i_n, i_n) + own_nn

    def penalty(self) -> torch.Tensor:
        """Length scales and places stay near where they began: 97 of them, for 2,243 rows."""
        places = sum(((place**2).sum() for place in self.places), torch.zeros(()))
        return 0.02 * ((self.scale_F + 1.5) ** 2).sum() + 0.05 * places


@dataclass(frozen=True)
class Left:
    """What is predicted of a task's configurations from all other tasks."""

    mean_n: np.ndarray
    covariance_nn: np.ndarray


def fitted(
    runs: Runs, rows_n: np.ndarray, target_n: np.ndarray, seen_n: np.ndarray, seed: int = 0
) -> Kernel:
    """A kernel whose parameters maximise the likelihood of the rows in `seen_n` alone.

    Rows without a target come last, and are not seen.
    """
    torch.manual_seed(seed)
    kernel = Kernel(runs, rows_n)
    optimizer = torch.optim.Adam(kernel.parameters(), lr=0.08)
    seen = torch.tensor(np.flatnonzero(seen_n))
    y_n = torch.tensor(target_n)
    for _ in range(STEPS):
        some_b = seen[torch.randperm(len(seen))[:ROWS]]
        y_b = y_n[some_b] - y_n[seen].mean()
        root_bb = torch.linalg.cholesky(kernel.noisy(some_b))
        weights_b = torch.cholesky_solve(y_b[:, None], root_bb)[:, 0]
        loss = 0.5 * (y_b @ weights_b) + root_bb.diagonal().log().sum() + kernel.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return kernel


@torch.no_grad()
def left_out(kernel: Kernel, target_n: np.ndarray, tasks: list[int]) -> dict[int, Left]:
    """Each task's prediction from the rows of all others, by one inverse for all of them.

    A block of the inverse is the inverse of the block's covariance given the rest.
    """
    everything = torch.arange(len(target_n))
    y_n = torch.tensor(target_n)
    precision_nn = torch.cholesky_inverse(torch.linalg.cholesky(kernel.noisy(everything)))
    found = {}
    for task in tasks:
        own = torch.where(kernel.task_N == task)[0]
        mean = y_n[kernel.task_N != task].mean()
        covariance = torch.linalg.inv(precision_nn[own][:, own])
        # y - C (P y): what the task's own values tell cancels.
        centred_n = y_n - mean
        expected = centred_n[own] - covariance @ (precision_nn @ centred_n)[own]
        found[task] = Left((expected + mean).numpy(), covariance.numpy())
    return found


def _full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)
