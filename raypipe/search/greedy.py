"""A greedy ensemble: weights of models whose mean scores are better than the best model's alone.

Ensemble selection (Caruana et al. 2004, "Ensemble selection from libraries of models"): start with
the best model, and add, again and again, the model with which the mean of all that were added is
best. A model may be added several times, which is its weight. The best of these means counts, not
the last.

Selection looks at the validation images hundreds of times, so it may fit their noise. Four guards:

- Bags (Caruana et al. 2006, "Getting the most out of ensemble selection"): the selection is made
  BAGS times, each time among a random part of the models, and the weights are averaged.
- Two aims: what is best by the metric, and what is best by the loss. An accuracy counts whole
  images, and the most accurate of 500 models on 284 images is a lucky one; a loss is less noisy.
- A test by halves: HALVES times, an ensemble is chosen on one half of the images and compared with
  the best model of that half, both by the metric, on the other half. The aim counts that gains more
  there on average, if what it chooses passes the next guard; else the other one that gains. If none
  is left, the answer is the best model alone.
- On all validation images the answer is never worse than the best model by its own aim. One that
  was chosen by the loss may be one standard error less accurate there than the luckiest model.

Equal metrics are told apart by the loss, then by the order of the models. Nothing is random but the
bags and the halves, which depend on the seed alone: the same scores give the same weights.

Pure: it knows no trial, no file and no model. Letters in names: K models, N images, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypipe.models.tasks import Task
from raypipe.train.objective import judge
from raypipe.train.stopping import Mode

ROUNDS = 20
"""Additions at most: a weight is a multiple of one in twenty."""

BAGS = 8
SHARE = 0.6
"""Of the models, in each bag."""

HALVES = 10

MOST_SCORES = 500_000
"""Of a model, in the choice: images times classes. It judges thousands of means, which takes three
seconds for so many, and longer by another metric than val_accuracy. Of more images a drawn part
chooses, and all of them say whether the choice passes."""

_SMALLEST = 1e-12  # a score in a logarithm

Quality = tuple[float, float]
"""(the metric, minus the loss): the larger is the better one."""

Judge = Callable[[np.ndarray, np.ndarray], Quality]
"""(scores_NC, labels_N) -> their quality."""

Aim = Callable[[Quality], Quality]
"""What is compared of a quality: larger is better."""


def by_metric(quality: Quality) -> Quality:
    """The metric; the loss among equals."""
    return quality


def by_loss(quality: Quality) -> Quality:
    """The loss; the metric among equals."""
    return quality[1], quality[0]


AIMS: tuple[Aim, ...] = (by_metric, by_loss)


@dataclass(frozen=True)
class Bar:
    """What an ensemble must be on all validation images: better by its aim than `alone`, the best
    model by it, with a metric of `least` or more.
    """

    aim: Aim
    alone: Quality
    least: float

    def is_passed(self, quality: Quality) -> bool:
        return self.aim(quality) > self.aim(self.alone) and quality[0] >= self.least


@dataclass(frozen=True)
class Ensemble:
    """weights_K: of each model, in the given order; they sum to 1. A single model has weight 1."""

    weights_K: tuple[float, ...]
    quality: Quality
    """Of the weighted mean of the scores, on all validation images."""

    gain: float
    """How much better than the best model's its metric was on images that it was not chosen on, on
    average. 0: there was nothing to choose."""

    bar: Bar
    """What it has passed on all validation images, unless it is a single model."""

    @property
    def members(self) -> tuple[int, ...]:
        """The places of the models that have a weight."""
        return tuple(k for k, weight in enumerate(self.weights_K) if weight > 0)


def judge_by(task: Task, metric: str, mode: Mode) -> Judge:
    """Judges scores by a metric of the task (val_accuracy, …), and by the loss among equals."""
    sign = 1.0 if mode == "max" else -1.0

    def quality(scores_NC: np.ndarray, labels_N: np.ndarray) -> Quality:
        loss = _loss(task, scores_NC, labels_N)
        if metric == "val_loss":
            return sign * loss, -loss
        # The usual metric is counted here, because thousands of means are judged: `judge` takes
        # ten times as long for it.
        if (task.kind, metric) == ("single_label", "val_accuracy"):
            return sign * float((scores_NC.argmax(1) == labels_N).mean()), -loss
        value = judge(task, torch.from_numpy(scores_NC), torch.from_numpy(labels_N))[metric]
        # A half without different labels has no val_r2; there the loss decides alone.
        return (0.0 if np.isnan(value) else sign * value), -loss

    return quality


def choose(
    scores_KNC: Sequence[np.ndarray],
    labels_N: np.ndarray,
    quality: Judge,
    latency_ms_K: Sequence[float] | None = None,
    limit_ms: float | None = None,
    seed: int = 0,
    most: int | None = None,
) -> Ensemble | None:
    """The ensemble of these models, of `most` members at most; None if no model is usable.

    scores_KNC: each model's scores_NC on the same validation images, in the same order; labels_N:
    as the task encodes them. latency_ms_K: of each model; those of an ensemble's members are added,
    and their sum stays within limit_ms. Models with a score that is not finite never join.
    """
    latency_K = np.zeros(len(scores_KNC)) if latency_ms_K is None else np.asarray(latency_ms_K)
    limit = np.inf if limit_ms is None else limit_ms
    usable = [
        k
        for k, scores_NC in enumerate(scores_KNC)
        if latency_K[k] <= limit and np.isfinite(scores_NC).all()
    ]
    if not usable or not len(labels_N):
        return None
    scores = [scores_KNC[k] for k in usable]
    models = _Models(scores, labels_N, quality, latency_K[usable], limit, most or len(usable))

    def told(weights: np.ndarray, gain: float, bar: Bar) -> Ensemble:
        weights_K = np.zeros(len(scores_KNC))
        weights_K[usable] = weights
        return Ensemble(tuple(weights_K.tolist()), models.quality_of(weights), gain, bar)

    part = _part(models, seed)
    gains = [(_gain_on_others(part, aim, seed), aim) for aim in AIMS if len(usable) > 1]
    gains.sort(key=lambda one: -one[0])
    for gain, aim in gains:
        if gain <= 0:
            break
        weights, bar = _bagged(part, aim, seed), _bar(models, aim, seed)
        # The mean of several bags may be worse than each of them.
        if bar.is_passed(models.quality_of(weights)):
            return told(weights, gain, bar)
    alone = np.zeros(len(usable))
    alone[models.best(by_metric)] = 1.0
    return told(alone, gains[0][0] if gains else 0.0, _bar(models, by_metric, seed))


@dataclass(frozen=True)
class _Models:
    """Usable models, their scores on some images, and what they may take together."""

    scores: Sequence[np.ndarray]
    labels_N: np.ndarray
    judge: Judge
    latency_K: np.ndarray
    limit: float
    most: int

    def on(self, rows: np.ndarray) -> _Models:
        """The same models on a part of the images."""
        scores = [scores_NC[rows] for scores_NC in self.scores]
        labels_N = self.labels_N[rows]
        return _Models(scores, labels_N, self.judge, self.latency_K, self.limit, self.most)

    @functools.cached_property
    def qualities(self) -> list[Quality]:
        """Of each model alone."""
        return [self.judge(scores_NC, self.labels_N) for scores_NC in self.scores]

    def best(self, aim: Aim) -> int:
        """The first of the best models."""
        return max(range(len(self.scores)), key=lambda k: (aim(self.qualities[k]), -k))

    def quality_of(self, weights_K: np.ndarray) -> Quality:
        return self.judge(_mean(self.scores, weights_K), self.labels_N)


def _part(models: _Models, seed: int) -> _Models:
    """The models on so many images that their scores are no more than MOST_SCORES each."""
    images, scores = len(models.labels_N), models.scores[0].size
    if scores <= MOST_SCORES:
        return models
    most = max(2, MOST_SCORES * images // scores)
    rng = np.random.default_rng([seed, 3])
    return models.on(np.sort(rng.choice(images, most, replace=False)))


def _gain_on_others(models: _Models, aim: Aim, seed: int) -> float:
    """How much better than the best model an ensemble is, both by the metric, on images that
    neither was chosen on.
    """
    gains = []
    for chosen, others in _halves(models, seed):
        single = np.zeros(len(models.scores))
        single[chosen.best(by_metric)] = 1.0
        together = _greedy(chosen, aim, range(len(models.scores)))
        gains.append(others.quality_of(together)[0] - others.quality_of(single)[0])
    return float(np.mean(gains)) if gains else 0.0


def _bar(models: _Models, aim: Aim, seed: int) -> Bar:
    best = models.best(by_metric)
    least = models.qualities[best][0]
    if aim is by_loss:
        least -= _standard_error(models, best, seed)
    return Bar(aim, models.qualities[models.best(aim)], least)


def _standard_error(models: _Models, k: int, seed: int) -> float:
    """Of a model's metric on all images, by how its metrics on two halves differ: their difference
    has four times the variance.
    """
    apart = [
        one.judge(one.scores[k], one.labels_N)[0] - other.judge(other.scores[k], other.labels_N)[0]
        for one, other in _halves(models, seed)
    ]
    return float(np.sqrt(np.mean(np.square(apart)) / 4)) if apart else 0.0


def _halves(models: _Models, seed: int) -> Iterator[tuple[_Models, _Models]]:
    """The models on one half of the images and on the other, HALVES times, both ways round."""
    rng = np.random.default_rng([seed, 1])
    images = len(models.labels_N)
    for _ in range(HALVES):
        order = rng.permutation(images)
        one, other = order[: images // 2], order[images // 2 :]
        if len(one) and len(other):
            yield models.on(one), models.on(other)
            yield models.on(other), models.on(one)


def _bagged(models: _Models, aim: Aim, seed: int) -> np.ndarray:
    """The mean weights of the selections among random parts of the models, within the limit."""
    count = len(models.scores)
    part = max(1, round(SHARE * count))
    rng = np.random.default_rng([seed, 2])
    best = models.best(aim)
    bags = [_greedy(models, aim, range(count))]
    for _ in range(BAGS - 1):
        # The best model is in every bag: none of them is worse than it.
        drawn = set(rng.choice(count, part, replace=False).tolist()) | {best}
        bags.append(_greedy(models, aim, sorted(drawn)))
    mean: np.ndarray = np.mean(bags, axis=0)
    # Bags within the limits may be over them together: then the best bag counts.
    within = models.latency_K[mean > 0].sum() <= models.limit
    if not within or (mean > 0).sum() > models.most:
        return max(bags, key=lambda weights_K: aim(models.quality_of(weights_K)))
    return mean


def _greedy(models: _Models, aim: Aim, among: Sequence[int] | range) -> np.ndarray:
    """Weights by ensemble selection with replacement among some of the models."""
    counts_K = np.zeros(len(models.scores))
    sum_NC = np.zeros_like(models.scores[0], dtype=np.float64)
    best: Quality | None = None
    best_counts_K = counts_K.copy()
    for added in range(ROUNDS):
        found: tuple[Quality, int] | None = None
        for k in among:
            # Members' latencies count once, however often they were added.
            taken = models.latency_K[counts_K > 0].sum()
            if not counts_K[k] and (
                taken + models.latency_K[k] > models.limit or (counts_K > 0).sum() >= models.most
            ):
                continue
            quality = aim(models.judge((sum_NC + models.scores[k]) / (added + 1), models.labels_N))
            if found is None or quality > found[0]:
                found = quality, k
        if found is None:
            break
        counts_K[found[1]] += 1
        sum_NC += models.scores[found[1]]
        if best is None or found[0] > best:
            best, best_counts_K = found[0], counts_K.copy()
    return best_counts_K / best_counts_K.sum()


def _mean(scores: Sequence[np.ndarray], weights_K: np.ndarray) -> np.ndarray:
    mean_NC = np.zeros_like(scores[0], dtype=np.float64)
    for scores_NC, weight in zip(scores, weights_K.tolist(), strict=True):
        if weight:
            mean_NC += weight * scores_NC
    return mean_NC


def _loss(task: Task, scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
    """The mean loss of scores: cross-entropy, or for a regression the squared error."""
    if task.kind == "single_label":
        p_N = scores_NC[np.arange(len(labels_N)), labels_N]
        return -float(np.log(np.maximum(p_N, _SMALLEST)).mean())
    if task.kind == "regression":
        return float(np.square(scores_NC - labels_N).mean())
    log_p_NC = np.log(np.maximum(scores_NC, _SMALLEST))
    log_not_p_NC = np.log(np.maximum(1 - scores_NC, _SMALLEST))
    return -float((labels_N * log_p_NC + (1 - labels_N) * log_not_p_NC).mean())
