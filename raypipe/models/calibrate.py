"""Do scores mean what they say? Of images with a score of 0.8, about 80 % should be right.

Networks are usually too sure of themselves. Temperature scaling (Guo et al. 2017, "On Calibration
of Modern Neural Networks") divides the logits by one number that is fitted on validation images.
It changes no predicted label: the likeliest class stays the likeliest, and 0.5 stays 0.5.

A temperature of few images may be worse than none: where scores meant already what they say, one of
90 images made the calibration error larger in 70 of 100 cases. So it is kept only if it also helps
images that it was not fitted on: in a cross-validation, the cross-entropy of the images left out
has to fall by more than its standard error. Then it was 1 of 100 cases. The price: with 90 images,
scores that are half again as sure as they should be are mended in every second case only.

It works on scores, because they hold the logits: log p is the logit up to a constant that softmax
drops, and log p/(1-p) is the logit of a sigmoid.

Letters in names: N images, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypipe.models.labels import Kind

LOWEST, HIGHEST = 0.1, 10.0
"""A temperature outside says more about the validation images than about the model."""

BINS = 15  # as in Guo et al.
FOLDS = 10  # of a cross-validation
LEAST_IMAGES = 20  # of two images a temperature of 10 came out where scores were right
LEAST_GAIN = 0.001
"""In nats an image. A model that says 0.5 of everything gains a trace at any temperature."""

DRAWS = 1000  # of a bootstrap
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
class Temperature:
    """A temperature, and what cross-validation says of it."""

    kept: float
    """1 where `fitted` does not help: then scores stay as they are."""

    fitted: float
    gain: float
    """How much the cross-entropy of images falls that it was not fitted on; in nats an image."""

    gain_error: float
    """The standard error of `gain`; infinite of fewer than LEAST_IMAGES."""


@dataclass(frozen=True)
class Calibration:
    """How far scores are from what they say."""

    error: float
    """Expected calibration error: the mean of |confidence - right|, weighted by count; 0 to 1."""

    bins: tuple[Bin, ...]
    """Bins without images are left out."""


def choose_temperature(kind: Kind, scores_NC: np.ndarray, targets_NC: np.ndarray) -> Temperature:
    """The fitted temperature if it helps images that it was not fitted on, else 1.

    Of fewer than LEAST_IMAGES images it is always 1.
    The images are dealt into FOLDS parts, in the order in which they come, which is the same for
    the same images. Arguments and errors are fit_temperature's.
    """
    fitted = fit_temperature(kind, scores_NC, targets_NC)
    images = len(scores_NC)
    if images < LEAST_IMAGES:
        return Temperature(1.0, fitted, 0.0, math.inf)
    scores = torch.tensor(scores_NC, dtype=torch.float64)
    targets = torch.tensor(targets_NC, dtype=torch.float64)
    before_N = _cross_entropy(kind, scores, targets)
    # Images of one class may stand together, so that neighbours go into different parts.
    fold_N = np.arange(images) % FOLDS
    gain_N = np.zeros(images)
    for fold in range(FOLDS):
        out_N = fold_N == fold
        temperature = fit_temperature(kind, scores_NC[~out_N], targets_NC[~out_N])
        mended = tempered(kind, scores[out_N], temperature)
        gain_N[out_N] = before_N[out_N] - _cross_entropy(kind, mended, targets[out_N])
    gain = float(gain_N.mean())
    error = float(gain_N.std(ddof=1) / math.sqrt(images))
    helps = gain > max(error, LEAST_GAIN)
    return Temperature(fitted if helps else 1.0, fitted, gain, error)


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
        mended = tempered(kind, scores, float(np.exp(log_temperature)))
        return float(_cross_entropy(kind, mended, targets).mean())

    # Over the logarithm: halving and doubling the temperature are alike.
    bounds = (np.log(LOWEST), np.log(HIGHEST))
    best = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(best.x))


def _cross_entropy(kind: Kind, scores_NC: Tensor, targets_NC: Tensor) -> np.ndarray:
    """Of each image, in nats (N,); of several tags their sum."""
    p_NC = scores_NC.clamp_min(_SMALLEST)
    likelihood_NC = targets_NC * p_NC.log()
    if kind != "single_label":
        # A sigmoid also says how likely the tag is not set.
        rest_NC = (1 - p_NC).clamp_min(_SMALLEST)
        likelihood_NC = likelihood_NC + (1 - targets_NC) * rest_NC.log()
    return -likelihood_NC.sum(1).numpy()


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
    said_NK, right_NK = _sayings(kind, scores_NC, targets_NC)
    sums = _binned(said_NK, right_NK)
    bins = []
    for count, said, right in zip(*sums, strict=True):
        if count:
            bins.append(Bin(float(said / count), float(right / count), int(count)))
    return Calibration(_error(*sums), tuple(bins))


def change(
    kind: Kind, before_NC: np.ndarray, after_NC: np.ndarray, targets_NC: np.ndarray
) -> tuple[float, float]:
    """A 95 % interval of how much the calibration error grows from one scoring to another.

    Both are of the same images: a bootstrap draws images, and each draw gives both errors.
    """
    rng = np.random.default_rng(0)
    images = len(targets_NC)
    sayings = [_sayings(kind, scores, targets_NC) for scores in (before_NC, after_NC)]
    # Of each image once: a hundred tags of 100,000 images, binned in each draw, took minutes.
    before_NB, after_NB = (_gaps(*one) for one in sayings)
    said = sayings[0][0].size
    changes = []
    for _ in range(DRAWS):
        drawn_N = np.bincount(rng.integers(0, images, images), minlength=images)
        gaps = np.abs(drawn_N @ after_NB).sum() - np.abs(drawn_N @ before_NB).sum()
        changes.append(float(gaps / said))
    low, high = np.quantile(changes, [0.025, 0.975]).tolist()
    return low, high


def _sayings(
    kind: Kind, scores_NC: np.ndarray, targets_NC: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(said_NK, right_NK) float64: what each image's K scores say, and what came true of it."""
    _require_probabilities(kind)
    if not len(scores_NC):
        raise ValueError("calibration is measured on images, and there are none")
    if kind == "single_label":
        said_NK = scores_NC.max(1, keepdims=True)
        # A label that is none of the classes is a target of zeros: nothing is right.
        right_N = targets_NC[np.arange(len(scores_NC)), scores_NC.argmax(1)] >= 0.5
        return said_NK.astype(np.float64), right_N[:, None].astype(np.float64)
    return scores_NC.astype(np.float64), targets_NC.astype(np.float64)


def _places(said_NK: np.ndarray) -> np.ndarray:
    """The bin of each score, of BINS of equal width."""
    return np.minimum((said_NK * BINS).astype(int), BINS - 1)


def _binned(said_NK: np.ndarray, right_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums in each bin: (counts, scores, rights)."""
    place = _places(said_NK).ravel()
    counts = np.bincount(place, minlength=BINS)
    said = np.bincount(place, said_NK.ravel(), BINS)
    right = np.bincount(place, right_NK.ravel(), BINS)
    return counts, said, right


def _gaps(said_NK: np.ndarray, right_NK: np.ndarray) -> np.ndarray:
    """gap_NB: what each image adds to a bin's scores less its rights."""
    images = len(said_NK)
    place = np.arange(images)[:, None] * BINS + _places(said_NK)
    gaps = np.bincount(place.ravel(), (said_NK - right_NK).ravel(), images * BINS)
    return gaps.reshape(images, BINS)


def _error(counts: np.ndarray, said: np.ndarray, right: np.ndarray) -> float:
    """Each bin's |mean score - share right|, weighted by its images (Guo et al.)."""
    return float(np.abs(said - right).sum() / counts.sum())


def _require_probabilities(kind: Kind) -> None:
    if kind == "regression":
        raise ValueError("the scores of a regression are numbers of any unit, not probabilities")
