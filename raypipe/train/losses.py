"""Losses: pure functions of logits and soft targets to one number a sample. Class weights, label smoothing and the focal factor
are arguments of each, so they combine; mixed targets (mixup) need no case of their own.

Weights have mean 1 over the training set, and a batch is averaged over its samples rather than over its weights: so a weighted
loss has the scale of a plain one, and the mean over ranks is the mean over the global batch at any world size.

Sources: smoothing, C. Szegedy et al., "Rethinking the Inception architecture" (2016); focal loss, T.-Y. Lin et al., "Focal loss
for dense object detection" (2017): what the model is sure of counts (1 - p)^gamma; gamma 2 is theirs, 0 is cross-entropy.

Shapes: logits_BC, targets_BC float32; weights_C float32; losses_B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from raypipe.errors import ConfigError

ClassWeights = Literal["balanced"] | dict[str, float] | None


def softmax_loss(
    logits_BC: Tensor,
    targets_BC: Tensor,
    weights_C: Tensor,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Cross-entropy over classes of which one is right; targets are shares that sum to 1."""
    log_p_BC = logits_BC.log_softmax(1)
    smoothed_BC = targets_BC * (1 - smoothing) + smoothing / targets_BC.shape[1]
    return -(weights_C * smoothed_BC * _focal(log_p_BC, gamma) * log_p_BC).sum(1)


def sigmoid_loss(
    logits_BC: Tensor,
    targets_BC: Tensor,
    weights_C: Tensor,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Binary cross-entropy, its mean over the outputs; a weight counts for the presence of its tag, 1 for its absence."""
    log_p_BC, log_not_p_BC = logsigmoid(logits_BC), logsigmoid(-logits_BC)
    smoothed_BC = targets_BC * (1 - smoothing) + smoothing / 2
    present_BC = weights_C * smoothed_BC * _focal(log_p_BC, gamma) * log_p_BC
    absent_BC = (1 - smoothed_BC) * _focal(log_not_p_BC, gamma) * log_not_p_BC
    return -(present_BC + absent_BC).mean(1)


def squared_loss(logits_BC: Tensor, targets_BC: Tensor, spread: float) -> Tensor:
    """Squared error in units of the labels' spread: 1 is what predicting their mean costs."""
    return ((logits_BC - targets_BC) / spread).square().mean(1)


def class_weights(wanted: ClassWeights, classes: tuple[str, ...], labels_N: np.ndarray) -> Tensor:
    """weights_C. `balanced`: every class weighs alike in sum, and for tags (labels_NC) presence weighs what absence does.

    A mapping names every class; for single labels it is scaled to mean 1 over `labels_N`, so only its ratios count.
    """
    tagged = labels_N.ndim == 2
    if wanted is None:
        return torch.ones(len(classes))
    counts_C = (
        labels_N.sum(0, dtype=np.float64)
        if tagged
        else np.bincount(labels_N, minlength=len(classes)).astype(np.float64)
    )
    if isinstance(wanted, Mapping):
        check_weights(wanted, classes)
        weights_C = np.array([wanted[name] for name in classes])
    else:
        present_C = counts_C.clip(1)  # a class that only validation has: any weight does
        weights_C = ((len(labels_N) - counts_C) if tagged else len(labels_N)) / present_C
        weights_C = np.where(counts_C > 0, weights_C, 1.0)
    if not tagged:
        weights_C = weights_C * len(labels_N) / (weights_C * counts_C).sum()
    return torch.from_numpy(weights_C).float()


def check_weights(wanted: ClassWeights, classes: tuple[str, ...]) -> None:
    """Raise ConfigError for a mapping that lacks a class, names another, or weighs one by no positive number."""
    if not isinstance(wanted, Mapping):
        return
    wrong = {
        name: wanted.get(name) for name in classes if not 0 < wanted.get(name, 0) < float("inf")
    }
    wrong |= {name: weight for name, weight in wanted.items() if name not in classes}
    if wrong:
        raise ConfigError(
            "train.class_weights does not fit the classes",
            got=wrong,
            rule=f"It maps each of {', '.join(classes)} to a positive number, and nothing else",
        )


def _focal(log_p_BC: Tensor, gamma: float) -> Tensor | float:
    return (
        (-torch.expm1(log_p_BC)).clamp_min(1e-8) ** gamma if gamma else 1.0
    )  # the slope of x^gamma at 0 is infinite below 1
