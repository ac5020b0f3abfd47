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

A half whose labels are all alike says nothing of an R2, a balanced accuracy or an F1, and plays no
part. Where that is so of all validation images, there is no ensemble.

Equal metrics are told apart by the loss, then by the order of the models. Nothing is random but the
bags and the halves, which depend on the seed alone: the same scores give the same weights, unless
the caller's time is over before all halves and bags are done.

Pure: it knows no trial, no file and no model. Letters in names: K models, N images, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raypipe.search.quality import Judge, Quality

ROUNDS = 20
"""Additions at most: a weight is a multiple of one in twenty."""

BAGS = 8
SHARE = 0.6
"""Of the models, in each bag."""

HALVES = 10

MOST_SCORES = 500_000
"""Of a model, in the choice: images times classes. It judges thousands of means. Of more images a
drawn part chooses, and all of them say whether the choice passes."""

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


def choose(
    scores_KNC: Sequence[np.ndarray],
    labels_N: np.ndarray,
    quality: Judge,
    latency_ms_K: Sequence[float] | None = None,
    limit_ms: float | None = None,
    seed: int = 0,
    most: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
    networks_K: Sequence[str] | None = None,
) -> Ensemble | None:
    """The ensemble of these models, of `most` members at most; None if no model is usable.

    scores_KNC: each model's scores_NC on the same validation images, in the same order; labels_N:
    as the task encodes them. latency_ms_K: of each model; those of an ensemble's members are added,
    and their sum stays within limit_ms. Models with a score that is not finite never join. is_late:
    then no further half and no further bag is looked at. networks_K: models with the same one run
    it once; "": it is the model's own.
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
    if np.isnan(quality.metric(scores[0], labels_N)):
        quality = replace(quality, metric=lambda scores_NC, labels_N: 0.0)  # the loss decides
    networks = tuple((networks_K or [""] * len(scores_KNC))[k] for k in usable)
    most = most or len(usable)
    models = _Models(scores, labels_N, quality, latency_K[usable], limit, most, is_late, networks)

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
    is_late: Callable[[], bool] = lambda: False
    networks_K: tuple[str, ...] = ()

    def on(self, rows: np.ndarray) -> _Models:
        """The same models on a part of the images."""
        scores = [scores_NC[rows] for scores_NC in self.scores]
        return replace(self, scores=scores, labels_N=self.labels_N[rows])

    @property
    def are_told_apart(self) -> bool:
        """Do these images say anything of the metric?"""
        return not np.isnan(self.judge.metric(self.scores[0], self.labels_N))

    @functools.cached_property
    def read(self) -> list[np.ndarray]:
        """What the loss reads of each model's scores."""
        return [self.judge.read(scores_NC, self.labels_N) for scores_NC in self.scores]

    @functools.cached_property
    def qualities(self) -> list[Quality]:
        """Of each model alone."""
        return [self.judge(scores_NC, self.labels_N) for scores_NC in self.scores]

    def best(self, aim: Aim) -> int:
        """The first of the best models."""
        return max(range(len(self.scores)), key=lambda k: (aim(self.qualities[k]), -k))

    def quality_of(self, weights_K: np.ndarray) -> Quality:
        return self.judge(_mean(self.scores, weights_K), self.labels_N)

    def may_join(self, k: int, counts_K: np.ndarray) -> bool:
        """May the model be added to those that were added so often?"""
        # Members' latencies count once, however often they were added.
        members = np.flatnonzero(counts_K)
        if counts_K[k]:
            return True
        return len(members) < self.most and self.takes([*members.tolist(), k]) <= self.limit

    def takes(self, members: Sequence[int]) -> float:
        """The latency of these models together."""
        if np.isinf(self.limit):
            return 0.0  # nobody asks
        took: dict[str | int, float] = {}
        for k in members:
            # Of those that share a network, the slowest one.
            network = (self.networks_K[k] if self.networks_K else "") or k
            took[network] = max(took.get(network, 0.0), float(self.latency_K[k]))
        return sum(took.values())


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
        if models.is_late():
            break
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
    # A half has copies of all the scores that it is of: of all models they may be many GB.
    alone = replace(models, scores=[models.scores[k]])
    apart = [
        one.judge(one.scores[0], one.labels_N)[0] - other.judge(other.scores[0], other.labels_N)[0]
        for one, other in _halves(alone, seed)
    ]
    return float(np.sqrt(np.mean(np.square(apart)) / 4)) if apart else 0.0


def _halves(models: _Models, seed: int) -> Iterator[tuple[_Models, _Models]]:
    """The models on one half of the images and on the other, HALVES times, both ways round."""
    rng = np.random.default_rng([seed, 1])
    images = len(models.labels_N)
    for _ in range(HALVES):
        order = rng.permutation(images)
        one, other = order[: images // 2], order[images // 2 :]
        if not len(one) or not len(other):
            continue
        first, second = models.on(one), models.on(other)
        if first.are_told_apart and second.are_told_apart:
            yield first, second
            yield second, first


def _bagged(models: _Models, aim: Aim, seed: int) -> np.ndarray:
    """The mean weights of the selections among random parts of the models, within the limit."""
    count = len(models.scores)
    part = max(1, round(SHARE * count))
    rng = np.random.default_rng([seed, 2])
    best = models.best(aim)
    bags = [_greedy(models, aim, range(count))]
    for _ in range(BAGS - 1):
        if models.is_late():
            break
        # The best model is in every bag: none of them is worse than it.
        drawn = set(rng.choice(count, part, replace=False).tolist()) | {best}
        bags.append(_greedy(models, aim, sorted(drawn)))
    mean: np.ndarray = np.mean(bags, axis=0)
    # Bags within the limits may be over them together: then the best bag counts.
    within = models.takes(np.flatnonzero(mean).tolist()) <= models.limit
    if not within or (mean > 0).sum() > models.most:
        return max(bags, key=lambda weights_K: aim(models.quality_of(weights_K)))
    return mean


def _greedy(models: _Models, aim: Aim, among: Sequence[int] | range) -> np.ndarray:
    """Weights by ensemble selection with replacement among some of the models."""
    counts_K = np.zeros(len(models.scores))
    sum_NC = np.zeros_like(models.scores[0], dtype=np.float64)
    best: Quality | None = None
    best_counts_K = counts_K.copy()
    for added in range(1, ROUNDS + 1):
        joining = [k for k in among if models.may_join(k, counts_K)]
        if not joining:
            break
        found: tuple[Quality, int] | None = None
        for k in _foremost(models, aim, counts_K, sum_NC, joining):
            quality = aim(models.judge((sum_NC + models.scores[k]) / added, models.labels_N))
            if found is None or quality > found[0]:
                found = quality, k
        assert found is not None, "of some models one is the best"
        counts_K[found[1]] += 1
        sum_NC += models.scores[found[1]]
        if best is None or found[0] > best:
            best, best_counts_K = found[0], counts_K.copy()
    return best_counts_K / best_counts_K.sum()


def _foremost(
    models: _Models, aim: Aim, counts_K: np.ndarray, sum_NC: np.ndarray, joining: Sequence[int]
) -> list[int]:
    """The models with which the mean is best by what the aim compares first.

    Most of the time goes here, and only equals need the other half of a quality. A loss of single
    labels reads one score an image, so the others need no mean.
    """
    added, labels_N = counts_K.sum() + 1, models.labels_N
    if aim is by_loss:
        read = models.read
        sum_ = models.judge.read(sum_NC, labels_N)
        values = [-models.judge.loss((sum_ + read[k]) / added, labels_N) for k in joining]
    else:
        scores = models.scores
        values = [models.judge.metric((sum_NC + scores[k]) / added, labels_N) for k in joining]
    best = max(values)
    return [k for k, value in zip(joining, values, strict=True) if value == best]


def _mean(scores: Sequence[np.ndarray], weights_K: np.ndarray) -> np.ndarray:
    mean_NC = np.zeros_like(scores[0], dtype=np.float64)
    for scores_NC, weight in zip(scores, weights_K.tolist(), strict=True):
        if weight:
            mean_NC += weight * scores_NC
    return mean_NC
