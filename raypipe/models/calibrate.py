"""Do scores mean what they say? Of images with a score of 0.8, about 80 % should be right.

Networks are usually too sure of themselves. Temperature scaling (Guo et al. 2017, "On Calibration
of Modern Neural Networks") divides the logits by one number that is fitted on validation images.
It changes no predicted label: the likeliest class stays the likeliest, and 0.5 stays 0.5.

It works on scores, because they hold the logits: log p is the logit up to a constant that softmax
drops, and log p/(1-p) is the logit of a sigmoid.

Letters in names: N images, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypipe.models.labels import Kind

LOWEST, HIGHEST = 0.1, 10.0
"""A temperature outside says more about the validation images than about the model."""

BINS = 15  # as in Guo et al.
_SMALLEST = 1e-12  # a score is at least this far from 0 and 1: its logit is finite


@dataclass(frozen=True)
class Bin:
    """The images whose scores lie in one part of 0 to 1."""

    confidence: float
    """Their mean score."""

    right: float
    """The share of them that is right; for the task probability their mean label."""

    count: int
    """How many; for several tags every tag of an image counts."""


@dataclass(frozen=True)
class Calibration:
    """How far scores are from what they say."""

    error: float
    """Expected calibration error: the mean of |confidence - right|, weighted by count; 0 to 1."""

    bins: tuple[Bin, ...]
    """Bins without images are left out."""


def fit_temperature(kind: Kind, scores_NC: np.ndarray, targets_NC: np.ndarray) -> float:
    """The temperature with the least cross-entropy, between LOWEST and HIGHEST.

    scores_NC: at temperature 1. targets_NC: as Task.targets gives them. Raises ValueError for a
    regression, whose scores are no probabilities, and without images.
    """
    # Not at the top: a served model needs no scipy.
    from scipy.optimize import minimize_scalar

    _require_probabilities(kind)
    if not len(scores_NC):
        raise ValueError("a temperature is fitted on images, and there are none")
    scores = torch.tensor(scores_NC, dtype=torch.float64)
    targets = torch.tensor(_smoothed(kind, targets_NC), dtype=torch.float64)

    def loss(log_temperature: float) -> float:
        p_NC = tempered(kind, scores, float(np.exp(log_temperature))).clamp_min(_SMALLEST)
        likelihood_NC = targets * p_NC.log()
        if kind != "single_label":
            # A sigmoid also says how likely the tag is not set.
            likelihood_NC = likelihood_NC + (1 - targets) * (1 - p_NC).clamp_min(_SMALLEST).log()
        return -float(likelihood_NC.sum(1).mean())

    # Over the logarithm: halving and doubling the temperature are alike.
    bounds = (np.log(LOWEST), np.log(HIGHEST))
    best = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(best.x))


def _smoothed(kind: Kind, targets_NC: np.ndarray) -> np.ndarray:
    """The targets, as if a few more images had other labels (Platt 1999).

    Without them a model that has all of N validation images right would become certain of
    everything. The share is 1 / (N + 2), after Laplace's rule of succession.
    """
    images, classes = targets_NC.shape
    share = 1 / (images + 2)
    if kind == "single_label":
        return (1 - share) * targets_NC + share * (1 - targets_NC) / max(classes - 1, 1)
    return (1 - share) * targets_NC + share * (1 - targets_NC)


def tempered(kind: Kind, scores_BC: Tensor, temperature: float) -> Tensor:
    """The scores that the model gives with its logits divided by `temperature`."""
    if temperature == 1:
        return scores_BC
    p_BC = scores_BC.clamp_min(_SMALLEST)
    if kind == "single_label":
        return (p_BC.log() / temperature).softmax(1)
    rest_BC = (1 - scores_BC).clamp_min(_SMALLEST)
    return ((p_BC.log() - rest_BC.log()) / temperature).sigmoid()


def calibration(kind: Kind, scores_NC: np.ndarray, targets_NC: np.ndarray) -> Calibration:
    """The calibration of scores against targets; raises ValueError as fit_temperature does.

    For one label the highest score counts, and whether that class is right. For several tags each
    score counts, and whether the tag is set.
    """
    _require_probabilities(kind)
    if not len(scores_NC):
        raise ValueError("calibration is measured on images, and there are none")
    if kind == "single_label":
        confidence = scores_NC.max(1)
        right = scores_NC.argmax(1) == targets_NC.argmax(1)
    else:
        confidence, right = scores_NC.ravel(), targets_NC.ravel()
    # Guo et al.: bins of equal width, each weighted by its images.
    confidence = confidence.astype(np.float64)
    right = right.astype(np.float64)

    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins = []
    error = 0.0
    for i in range(BINS):
        inside = place == i
        count = int(inside.sum())
        if count:
            found = Bin(float(confidence[inside].mean()), float(right[inside].mean()), count)
            bins.append(found)
            error += count / len(confidence) * abs(found.confidence - found.right)
    return Calibration(error, tuple(bins))


def _require_probabilities(kind: Kind) -> None:
    if kind == "regression":
        raise ValueError("the scores of a regression are numbers of any unit, not probabilities")
