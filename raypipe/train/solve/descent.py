"""The minimum of a job's own loss over linear maps, by L-BFGS, and its cross-validated strength.

The loss is convex in the weights (without a focal factor), so there is one minimum, and a
quasi-Newton method finds it in tens of passes where stochastic steps take thousands. The objective
is mean loss + strength / 2 * sum of squared weights; the bias is free.

Letters in names: N images, R directions, C logits. z_NR: coordinates along the directions in which
features vary (ridge.py), so that the parameters are well scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits_NC, targets_NC) -> losses_N."""

STRENGTHS = tuple(10.0 ** (exponent / 2) for exponent in range(2, -11, -1))
"""Tried from strong to weak, in units of the mean variance of a direction: 10 down to 1e-5."""

FOLDS = 4
MOST_DIRECTIONS = 384
"""In cross-validation: the directions with little variance are shrunk to nothing by the strengths
that win, and cost most of its time."""

MOST_PRODUCTS = 2e8
"""Images times directions times logits of the cross-validation: larger ones leave out folds."""

PATIENCE = 2  # weaker strengths that are worse, after which no weaker one is tried
STEPS = 300


@dataclass(frozen=True)
class Minimum:
    """weight_RC, bias_C: of the coordinates. strength: in units of the objective."""

    weight_RC: np.ndarray
    bias_C: np.ndarray
    strength: float


@dataclass(frozen=True)
class Examples:
    """Coordinates, targets and weights of some images. energy_R: as Spectrum's, to scale by."""

    z_NR: Tensor
    targets_NC: Tensor
    weight_N: Tensor
    energy_R: np.ndarray

    def __len__(self) -> int:
        return len(self.z_NR)

    def some(self, rows: np.ndarray) -> Examples:
        """The examples at these places."""
        place = torch.from_numpy(rows)
        return Examples(
            self.z_NR[place], self.targets_NC[place], self.weight_N[place], self.energy_R
        )

    def narrow(self, most: int) -> Examples:
        """The same with at most so many directions."""
        z_NR = self.z_NR[:, :most].contiguous()
        return Examples(z_NR, self.targets_NC, self.weight_N, self.energy_R[:most])

    @property
    def unit(self) -> float:
        """The mean variance of a direction; 1 where nothing varies."""
        if not len(self.energy_R):
            return 1.0
        return float(self.energy_R.mean() / self.weight_N.sum()) or 1.0


def fit(
    examples: Examples, losses: Losses, group_N: np.ndarray, seed: int, bias_C: np.ndarray
) -> Minimum:
    """The minimum at the strength that cross-validation chose.

    group_N: rows with one number lie in one fold. bias_C: where the bias starts.
    """
    strength = choose_strength(examples, losses, group_N, seed, bias_C)
    weight_RC = np.zeros((examples.z_NR.shape[1], len(bias_C)))
    return minimise(examples, losses, strength, (weight_RC, bias_C))


def choose_strength(
    examples: Examples, losses: Losses, group_N: np.ndarray, seed: int, bias_C: np.ndarray
) -> float:
    """The strength with the least loss on images that are left out, of STRENGTHS."""
    narrow = examples.narrow(MOST_DIRECTIONS)
    folds = _folds(group_N, seed)
    size = len(narrow) * narrow.z_NR.shape[1] * len(bias_C)
    # One fold at least, whatever it takes.
    folds = folds[: max(1, min(len(folds), int(MOST_PRODUCTS / max(size, 1))))]
    if not folds:
        return STRENGTHS[len(STRENGTHS) // 2] * examples.unit
    starts = [(np.zeros((narrow.z_NR.shape[1], len(bias_C))), bias_C)] * len(folds)
    best, least, worse = STRENGTHS[0], np.inf, 0
    for strength in STRENGTHS:
        total = 0.0
        for k, (rest, out) in enumerate(folds):
            found = minimise(
                narrow.some(rest), losses, strength * narrow.unit, starts[k], steps=STEPS // 4
            )
            # The next, weaker one begins where this one ended.
            starts[k] = found.weight_RC, found.bias_C
            total += _loss_on(narrow.some(out), losses, found)
        if total < least:
            best, least, worse = strength, total, 0
        else:
            worse += 1
        if worse == PATIENCE:
            break
    # The unit of the narrow examples is not that of all directions.
    return best * narrow.unit


def minimise(
    examples: Examples,
    losses: Losses,
    strength: float,
    start: tuple[np.ndarray, np.ndarray],
    steps: int = STEPS,
) -> Minimum:
    """The minimum of the mean loss and the strength's share, from `start` (weight_RC, bias_C)."""
    from scipy.optimize import minimize

    directions, outputs = start[0].shape
    # Variables of equal curvature: a logistic loss has a quarter of the squared error's.
    curvature_R = examples.energy_R / float(examples.weight_N.sum()) / 4 + strength
    scale = torch.from_numpy(1 / np.sqrt(curvature_R)).to(examples.z_NR.dtype)[:, None]
    share_N = examples.weight_N / examples.weight_N.sum()

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.from_numpy(flat).requires_grad_()
        scaled, bias_C = parameters[:-outputs].view(directions, outputs), parameters[-outputs:]
        weight_RC = scaled.to(scale.dtype) * scale
        logits_NC = examples.z_NR @ weight_RC + bias_C.to(scale.dtype)
        loss = share_N @ losses(logits_NC, examples.targets_NC).to(share_N.dtype)
        loss = loss + strength / 2 * weight_RC.square().sum()
        (slope,) = torch.autograd.grad(loss, parameters)
        return float(loss.detach()), slope.double().numpy()

    first = np.concatenate([(start[0] / scale.double().numpy()).ravel(), start[1]])
    found = minimize(
        value,
        first,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": steps, "maxcor": 20, "ftol": 1e-9, "gtol": 1e-6},
    )
    weight_RC = found.x[:-outputs].reshape(directions, outputs) * scale.double().numpy()
    return Minimum(weight_RC, found.x[-outputs:], strength)


@torch.no_grad()
def _loss_on(examples: Examples, losses: Losses, found: Minimum) -> float:
    weight_RC = torch.from_numpy(found.weight_RC).to(examples.z_NR.dtype)
    bias_C = torch.from_numpy(found.bias_C).to(examples.z_NR.dtype)
    loss_N = losses(examples.z_NR @ weight_RC + bias_C, examples.targets_NC)
    return float(examples.weight_N @ loss_N.to(examples.weight_N.dtype))


def _folds(group_N: np.ndarray, seed: int) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """(other rows, rows of the fold) of each fold; none if all rows are equal."""
    groups = int(group_N.max()) + 1
    folds = min(FOLDS, groups)
    if folds < 2:
        return []
    fold_N = (np.random.default_rng(seed).permutation(groups) % folds)[group_N]
    return [(np.flatnonzero(fold_N != k), np.flatnonzero(fold_N == k)) for k in range(folds)]
