"""Fits a head to frozen features without an epoch of steps (`train.solver`).

closed   ridge regression on the targets, and then one scale for the scores, so that they are logits
lbfgs    the minimum of the job's own loss

Both choose their strength by images that they leave out of the training set; validation images play
no part. A kernel head gets its landmarks and its width first; then both solvers fit a linear map of
its similarities.

Letters in names: N images, D features, M landmarks, R directions, C logits.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch
from torch import Tensor

from raypipe.errors import DataError
from raypipe.models.heads import Head, KernelHead
from raypipe.models.tasks import Kind
from raypipe.train.objective import Objective
from raypipe.train.settings import SolverName
from raypipe.train.solve import descent, nystrom, ridge

log = logging.getLogger("raypipe")

MOST_DOUBLE = 2e8
"""Numbers of features up to which L-BFGS computes in float64: 1.6 GB."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """What a head is fitted to. features_ND float32; labels_N as the task encodes them.

    weight_N: how often each image counts, relative to the others; None: equally often.
    """

    features_ND: np.ndarray
    labels_N: np.ndarray
    weight_N: np.ndarray | None = None


@torch.no_grad()
def fit(
    head: Head, examples: Examples, objective: Objective, solver: SolverName, seed: int
) -> None:
    """Fill in the weights of a head whose statistics are set.

    Raises DataError for weights of images that are not numbers from 0 up with a sum above 0.
    """
    started = time.perf_counter()
    x_ND = head.standard(torch.from_numpy(np.array(examples.features_ND))).double().numpy()
    targets_NC = objective.task.targets(torch.tensor(examples.labels_N)).double().numpy()
    if head.scaled:
        # The head scales what its linear part says. That is fitted to numbers of mean 0 and spread
        # 1: in the labels' unit, strengths and tolerances would be others in grams than in tonnes.
        targets_NC = (targets_NC - head.centre.double().numpy()) / head.spread.double().numpy()
        objective = dataclasses.replace(objective, mean=0.0, spread=1.0)
    weight_N = _weights(examples, objective, solver)

    # A kernel's similarities, made orthogonal; or the features as they are.
    back = None
    if isinstance(head, KernelHead):
        kernel = nystrom.choose(x_ND, targets_NC, weight_N, len(head.landmarks), seed)
        head.landmarks.copy_(torch.from_numpy(kernel.landmarks_MD))
        head.gamma.fill_(kernel.gamma)
        # What the head computes in float32 is what its linear part is fitted to.
        x_ND = _similarities(head, x_ND) @ kernel.whitening_MR
        back = kernel.whitening_MR
    if solver == "closed":
        weight_DC, bias_C, strength = _closed(x_ND, targets_NC, weight_N, objective, seed)
    else:
        weight_DC, bias_C, strength = _descended(x_ND, targets_NC, weight_N, objective, seed)
    if back is not None:
        weight_DC = back @ weight_DC
    head.linear.weight.copy_(torch.from_numpy(weight_DC.T))
    head.linear.bias.copy_(torch.from_numpy(bias_C))
    log.info(
        "Fitted a head to %d images in %.1f s (%s, strength %.2g)",
        len(x_ND),
        time.perf_counter() - started,
        solver,
        strength,
    )


def _weights(examples: Examples, objective: Objective, solver: SolverName) -> np.ndarray:
    """weight_N with mean 1: of the images, and for ridge regression of their classes, too."""
    images = len(examples.labels_N)
    weight_N = np.ones(images)
    if examples.weight_N is not None:
        weight_N = np.asarray(examples.weight_N, np.float64)
        bad_N = ~np.isfinite(weight_N) | (weight_N < 0)
        if bad_N.any() or not weight_N.sum() > 0:
            raise DataError(
                "Weights of images are numbers from 0 up, and not all of them are 0",
                got=f"{int(bad_N.sum())} of {images} are not",
                fix="Mend the column of feed.weights, or leave the rows out with table.where",
            )
    if solver == "closed" and objective.task.kind == "single_label":
        weight_N = weight_N * objective.weights_C.double().numpy()[examples.labels_N]
    return np.asarray(weight_N / weight_N.mean())


def _similarities(head: KernelHead, x_ND: np.ndarray) -> np.ndarray:
    parts = [
        head.similarities(torch.from_numpy(part_nD).float()).double().numpy()
        for part_nD in np.array_split(x_ND, max(1, len(x_ND) // 4096))
    ]
    return np.concatenate(parts)


def _closed(
    x_ND: np.ndarray,
    targets_NC: np.ndarray,
    weight_N: np.ndarray,
    objective: Objective,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(weight_DC, bias_C, strength) of a ridge regression; its scores are made logits."""
    found = ridge.fit(x_ND, targets_NC, weight_N, seed=seed)
    if objective.task.kind == "regression":
        return found.weight_DC, found.bias_C, found.strength
    # Scores of images that were left out: those of its own images are too good.
    rows_K, kind = found.rows_K, objective.task.kind
    # As the losses smooth: a class among all, a tag among two. No other class becomes the largest
    # by it, so it is the scale that changes.
    parts = targets_NC.shape[1] if kind == "single_label" else 2
    smooth_KC = (1 - objective.smoothing) * targets_NC[rows_K] + objective.smoothing / parts
    scale_C, shift_C = _as_logits(found.left_out_KC, smooth_KC, weight_N[rows_K], kind)
    return found.weight_DC * scale_C, found.bias_C * scale_C + shift_C, found.strength


def _as_logits(
    scores_KC: np.ndarray, targets_KC: np.ndarray, weight_K: np.ndarray, kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """(scale_C, shift_C) that make scores the likeliest logits.

    Classes share one scale and no shift, so that no predicted class changes. A tag, and a
    probability, has a scale and a shift of its own (Platt 1999).
    """
    from scipy.optimize import minimize

    classes = scores_KC.shape[1]
    scores, weight = torch.from_numpy(scores_KC), torch.from_numpy(weight_K / weight_K.sum())
    # As if a few more images had other labels: nothing is ever certain.
    share = 1 / (len(scores_KC) + 2)
    others = (1 - targets_KC) / max(classes - 1, 1) if kind == "single_label" else 1 - targets_KC
    targets = torch.from_numpy((1 - share) * targets_KC + share * others)

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            parameters = torch.from_numpy(flat).requires_grad_()
            if kind == "single_label":
                losses_K = -(targets * (scores * parameters.exp()).log_softmax(1)).sum(1)
            else:
                logits = scores * parameters[:classes].exp() + parameters[classes:]
                losses_K = torch.nn.functional.binary_cross_entropy_with_logits(
                    logits, targets, reduction="none"
                ).sum(1)
            # A trace of a prior: where the scores say nothing, the scale stays.
            loss = weight @ losses_K + 1e-6 * parameters.square().sum()
            (slope,) = torch.autograd.grad(loss, parameters)
        return float(loss.detach()), slope.numpy()

    # Scores are about 0 or 1, and logits a few units apart.
    first = np.array([1.5]) if kind == "single_label" else np.array([1.5, -2.0]).repeat(classes)
    bounds = [(-7.0, 7.0)] * (1 if kind == "single_label" else classes)
    bounds += [(-1e3, 1e3)] * (len(first) - len(bounds))
    found = minimize(value, first, jac=True, method="L-BFGS-B", bounds=bounds).x
    if kind == "single_label":
        return np.full(classes, np.exp(found[0])), np.zeros(classes)
    return np.exp(found[:classes]), found[classes:]


def _descended(
    x_ND: np.ndarray,
    targets_NC: np.ndarray,
    weight_N: np.ndarray,
    objective: Objective,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(weight_DC, bias_C, strength) of the least loss."""
    found = ridge.spectrum(x_ND, weight_N)
    dtype = torch.float64 if x_ND.size <= MOST_DOUBLE else torch.float32

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(dtype)

    examples = descent.Examples(
        tensor(found.coordinates(x_ND)), tensor(targets_NC), tensor(weight_N), found.energy_R
    )
    with torch.enable_grad():
        made = descent.fit(
            examples,
            objective.losses,
            ridge.groups(x_ND),
            seed,
            _first_bias(targets_NC, weight_N, objective),
        )
    weight_DC = found.directions_DR @ made.weight_RC
    return weight_DC, made.bias_C - found.mean_D @ weight_DC, made.strength


def _first_bias(targets_NC: np.ndarray, weight_N: np.ndarray, objective: Objective) -> np.ndarray:
    """The logits that say of every image what the training set says on average."""
    mean_C = weight_N @ targets_NC / weight_N.sum()
    if objective.task.kind == "regression":
        return np.asarray(mean_C)
    p_C = np.clip(mean_C, 1e-4, 1 - 1e-4)
    if objective.task.kind == "single_label":
        return np.asarray(np.log(p_C))
    return np.asarray(np.log(p_C / (1 - p_C)))
