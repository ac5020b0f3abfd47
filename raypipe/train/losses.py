"""Losses: pure functions of logits and soft targets that give one number per sample.

Class weights, label smoothing and the focal factor are arguments of each loss, so they combine.
Soft targets include mixed ones (mixup).

Weights have mean 1 over the training set, and a batch is averaged over its samples, not over its
weights. So a weighted loss has the scale of an unweighted one, and the mean over ranks is the mean
over the global batch at any world size.

Sources: smoothing, C. Szegedy et al., "Rethinking the Inception architecture" (2016); focal loss,
T.-Y. Lin et al., "Focal loss for dense object detection" (2017): a prediction with probability p
counts (1 - p)^gamma. The paper uses gamma 2; 0 is cross-entropy.

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
    """Cross-entropy over classes of which one is right; targets sum to 1."""
    log_p_BC = logits_BC.log_softmax(1)
    classes = targets_BC.shape[1]
    smoothed_BC = targets_BC * (1 - smoothing) + smoothing / classes
    # From left to right: another order would round in another way.
    weighted_BC = weights_C * smoothed_BC * _focal(log_p_BC, gamma)
    return -(weighted_BC * log_p_BC).sum(1)


def sigmoid_loss(
    logits_BC: Tensor,
    targets_BC: Tensor,
    weights_C: Tensor,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Binary cross-entropy, averaged over the outputs.

    A weight multiplies the term of its tag's presence; the term of its absence has weight 1.
    """
    log_p_BC = logsigmoid(logits_BC)
    log_not_p_BC = logsigmoid(-logits_BC)
    # A tag is present or absent: two classes share the smoothing.
    smoothed_BC = targets_BC * (1 - smoothing) + smoothing / 2
    weighted_BC = weights_C * smoothed_BC * _focal(log_p_BC, gamma)
    present_BC = weighted_BC * log_p_BC
    absent_BC = (1 - smoothed_BC) * _focal(log_not_p_BC, gamma) * log_not_p_BC
    return -(present_BC + absent_BC).mean(1)


def squared_loss(logits_BC: Tensor, targets_BC: Tensor, spread: float) -> Tensor:
    """Squared error in units of the labels' spread: always predicting their mean costs 1."""
    return ((logits_BC - targets_BC) / spread).square().mean(1)


def class_weights(wanted: ClassWeights, classes: tuple[str, ...], labels_N: np.ndarray) -> Tensor:
    """weights_C of a training set.

    `balanced`: every class has the same sum of weights; for tags (labels_NC), presence weighs as
    much as absence. A mapping names every class; for single labels it is scaled to mean 1 over
    labels_N, so only its ratios count.
    """
    if wanted is None:
        return torch.ones(len(classes))
    tagged = labels_N.ndim == 2
    if tagged:
        counts_C = labels_N.sum(0, dtype=np.float64)
    else:
        counts_C = np.bincount(labels_N, minlength=len(classes)).astype(np.float64)
    if isinstance(wanted, Mapping):
        check_weights(wanted, classes)
        weights_C = np.array([wanted[name] for name in classes])
    else:
        # For tags, presence is weighed against absence; for classes, against all images.
        others_C = len(labels_N) - counts_C if tagged else len(labels_N)
        weights_C = others_C / counts_C.clip(1)
        # A class that only validation has: any weight does. With 0, a tag that all images have
        # would not be learned.
        weights_C = np.where((counts_C > 0) & (others_C > 0), weights_C, 1.0)
    if not tagged:
        # Mean 1 over the images.
        sum_over_images = (weights_C * counts_C).sum()
        weights_C = weights_C * len(labels_N) / sum_over_images
    return torch.from_numpy(weights_C).float()


def check_weights(wanted: ClassWeights, classes: tuple[str, ...]) -> None:
    """Raise ConfigError unless a mapping gives each class, and no other, a positive number."""
    if not isinstance(wanted, Mapping):
        return
    wrong = {}
    for name in classes:
        if not 0 < wanted.get(name, 0) < float("inf"):
            wrong[name] = wanted.get(name)
    for name, weight in wanted.items():
        if name not in classes:
            wrong[name] = weight
    if wrong:
        raise ConfigError(
            "train.class_weights does not fit the classes",
            got=wrong,
            rule=f"It maps each of {', '.join(classes)} to a positive number, and nothing else",
        )


def _focal(log_p_BC: Tensor, gamma: float) -> Tensor | float:
    """(1 - p)^gamma."""
    if not gamma:
        return 1.0
    # Not below 1e-8: for gamma below 1, the slope of x^gamma at 0 is infinite.
    return (-torch.expm1(log_p_BC)).clamp_min(1e-8) ** gamma
