"""Tests of labels that came: is the champion wrong more often than on its held-out images?

A batch of known domains, in any mixture, is no drift: some are harder than others. So each test is
made against every domain, and the largest p-value counts: the error of a mixture is no larger than
that of its worst domain. Within a stratum it may be larger, where one domain is worse when it is
sure and the other when it is not: so `calibration` and the test of numbers are made against
mixtures of two domains, too (measured: without them 58 of 100 such nights alarm at 0.05, with them
2).

Where every image that came names a domain that is known, like is compared with like instead: a
domain of 20 held-out images says nothing about the others then, and hides no loss of theirs.

Letters in names: N held-out images; M images that came; S strata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy

from raypipe.errors import one_line
from raypipe.models.outcomes import Outcomes

LEAST = 20
"""Labelled images of a test, and held-out images of a domain."""
STRATA, MOST_STRATA = 10, 30
A_STRATUM = 50
"""Images of a stratum, where both sides have more than STRATA times as many: images that were
chosen by confidence differ within a wide one."""
MIXED = 6  # domains whose mixtures are tried: those with the largest p-values
SHARES = (0.25, 0.5, 0.75)  # of the first of two
SHOWN = 120  # characters of a domain's name
LEAST_P = 1e-12  # a tail that far out is no evidence of its own size


@dataclass(frozen=True)
class Found:
    """One test: its p-value, and in words what it saw."""

    on: str
    statistic: float
    p_value: float
    detail: str


@dataclass(frozen=True)
class _Test:
    """What a test says against one domain, or one mixture of two."""

    name: str
    known: Outcomes
    statistic: float
    p_value: float

    @property
    def of(self) -> str:
        """The domain, for a sentence; "" where there is one only."""
        return f" of {self.name}" if self.name else ""


def errors(domains: Sequence[tuple[str, Outcomes]], came: Outcomes) -> Found:
    """Is it wrong more often than on every domain?"""

    def against(name: str, known: Outcomes) -> _Test:
        p_value = fisher([len(known)], [known.error_N.sum()], [len(came)], [came.error_N.sum()])
        return _Test(name, known, float(came.error_N.mean() - known.error_N.mean()), p_value)

    worst = _worst([against(*one) for one in domains])
    said = [f"{one.error_N.sum():.0f} of {len(one)}" for one in (came, worst.known)]
    detail = f"{said[0]} wrong, of held-out images{worst.of} {said[1]}"
    return Found("errors", worst.statistic, max(worst.p_value, LEAST_P), detail)


def of_numbers(
    domains: Sequence[tuple[str, Outcomes]], came: Outcomes, rng: np.random.Generator
) -> Found:
    """Is it wrong by more than on every domain, and on their mixtures?"""

    def against(name: str, known: Outcomes) -> _Test:
        return _Test(name, known, *_cramer(known.error_N, came.error_N))

    worst = _worst(_with_mixtures(domains, against, rng))
    said = [f"{np.median(one.error_N):.3g}" for one in (came, worst.known)]
    detail = f"median absolute error {said[0]}, of held-out images{worst.of} {said[1]}"
    return Found("errors", worst.statistic, max(worst.p_value, LEAST_P), detail)


def calibration(
    domains: Sequence[tuple[str, Outcomes]], came: Outcomes, rng: np.random.Generator
) -> Found:
    """Is it wrong more often than held-out images of equal confidence?"""

    def against(name: str, known: Outcomes) -> _Test:
        counts = _counts(known, came)
        return _Test(name, known, _excess(counts), fisher(*counts))

    worst = _worst(_with_mixtures(domains, against, rng))
    sure, right = 100 * came.sure_N.mean(), 100 * (1 - came.error_N.mean())
    known = worst.known
    before = f"{100 * known.sure_N.mean():.0f} % and {100 * (1 - known.error_N.mean()):.0f} %"
    detail = f"sure of {sure:.0f} %, right in {right:.0f} %; held-out images{worst.of}: {before}"
    return Found("calibration", worst.statistic, max(worst.p_value, LEAST_P), detail)


Pair = tuple[Outcomes, Outcomes]
Counts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def paired_by_domain(domains: Sequence[tuple[str, Outcomes]], came: Outcomes) -> list[Pair]:
    """(held-out, came) of each domain, where all that came name one that is known: then like is
    compared with like. [] where any does not."""
    by_name = {known.domains[0]: known for _, known in domains if len(set(known.domains)) == 1}
    if not came.domains or not by_name.keys() >= set(came.domains):
        return []
    names = np.array(came.domains, dtype=object)
    return [
        (by_name[name], came.only(np.flatnonzero(names == name)))
        for name in sorted(set(came.domains))
    ]


def errors_each(paired: Sequence[Pair]) -> Found:
    """Is it wrong more often than on held-out images of the same domains?"""
    known_S, came_S = (np.array([len(pair[side]) for pair in paired]) for side in (0, 1))
    known_wrong_S, came_wrong_S = (
        np.array([pair[side].error_N.sum() for pair in paired]) for side in (0, 1)
    )
    p_value = fisher(known_S, known_wrong_S, came_S, came_wrong_S)
    images, expected = came_S.sum(), float((came_S * known_wrong_S / known_S).sum())
    detail = (
        f"{came_wrong_S.sum():.0f} of {images} wrong, of as many held-out images of the same "
        f"domains {expected:.0f}"
    )
    statistic = float((came_wrong_S.sum() - expected) / images)
    return Found("errors", statistic, max(p_value, LEAST_P), detail)


def calibration_each(paired: Sequence[Pair]) -> Found:
    """Is it wrong more often than held-out images of the same domain and confidence?"""
    each = [_counts(*pair) for pair in paired]
    counts = tuple(np.concatenate(some) for some in zip(*each, strict=True))
    assert len(counts) == 4
    sure, right = of_all([came for _, came in paired], paired)
    known_sure, known_right = of_all([known for known, _ in paired], paired)
    detail = (
        f"sure of {100 * sure:.0f} %, right in {100 * right:.0f} %; held-out images of the same "
        f"domains: {100 * known_sure:.0f} % and {100 * known_right:.0f} %"
    )
    return Found("calibration", _excess(counts), max(fisher(*counts), LEAST_P), detail)


def of_all(some: Sequence[Outcomes], paired: Sequence[Pair]) -> tuple[float, float]:
    """(mean confidence, share that is right), each domain with its share of what came."""
    images = sum(len(came) for _, came in paired)
    shares = [len(came) / images for _, came in paired]
    return (
        sum(share * float(one.sure_N.mean()) for share, one in zip(shares, some, strict=True)),
        sum(
            share * (1 - float(one.error_N.mean())) for share, one in zip(shares, some, strict=True)
        ),
    )


def _counts(known: Outcomes, came: Outcomes) -> Counts:
    """(held-out images, wrong ones, images that came, wrong ones) of each stratum."""
    # Strata of both together: who is in which does not depend on who is wrong.
    pooled = np.concatenate([known.sure_N, came.sure_N])
    strata = int(np.clip(min(len(known), len(came)) // A_STRATUM, STRATA, MOST_STRATA))
    edges = np.quantile(pooled, np.linspace(0, 1, strata + 1)[1:-1])
    places = [np.searchsorted(edges, one.sure_N, side="right") for one in (known, came)]
    sizes = [np.bincount(place, minlength=strata) for place in places]
    wrong = [
        np.bincount(place, one.error_N, strata)
        for place, one in zip(places, (known, came), strict=True)
    ]
    return sizes[0], wrong[0], sizes[1], wrong[1]


def _excess(counts: Counts) -> float:
    """Errors more than both sides together have in equal strata, an image that came."""
    known_S, known_wrong_S, came_S, came_wrong_S = counts
    rates_S = (known_wrong_S + came_wrong_S) / np.maximum(known_S + came_S, 1)
    return float((came_wrong_S - rates_S * came_S).sum() / came_S.sum())


def _worst(tests: Sequence[_Test]) -> _Test:
    return max(tests, key=lambda one: one.p_value)


def _with_mixtures(
    domains: Sequence[tuple[str, Outcomes]],
    against: Callable[[str, Outcomes], _Test],
    rng: np.random.Generator,
) -> list[_Test]:
    """The tests against every domain, and against mixtures of two of them.

    A mixture is as many held-out images of both as have its shares.
    """
    alone = [against(*one) for one in domains]
    likely = sorted(alone, key=lambda one: -one.p_value)[:MIXED]
    mixed = []
    for one, other in combinations(likely, 2):
        for share in SHARES:
            images = min(len(one.known) / share, len(other.known) / (1 - share))
            drawn = [
                of.known.only(np.sort(rng.permutation(len(of.known))[: round(part * images)]))
                for of, part in ((one, share), (other, 1 - share))
            ]
            both = Outcomes(
                np.concatenate([part.error_N for part in drawn]),
                np.concatenate([part.sure_N for part in drawn]),
            )
            mixed.append(against(f"{one.name} and {other.name}", both))
    return alone + mixed


def fisher(
    known_S: Sequence[float] | np.ndarray,
    known_wrong_S: Sequence[float] | np.ndarray,
    came_S: Sequence[float] | np.ndarray,
    came_wrong_S: Sequence[float] | np.ndarray,
) -> float:
    """P(as many wrong among those that came, or more) if both sides err equally in each stratum.

    Counts of images and of wrong ones by stratum. One stratum: Fisher's exact test, one-sided.
    """
    chances = np.ones(1)
    counts = (np.asarray(one, np.int64) for one in (known_S, known_wrong_S, came_S, came_wrong_S))
    observed = 0
    for known, known_wrong, came, came_wrong in zip(*(c.tolist() for c in counts), strict=True):
        wrong, all_of = known_wrong + came_wrong, known + came
        observed += came_wrong
        if came and wrong:
            here = scipy.stats.hypergeom.pmf(np.arange(min(wrong, came) + 1), all_of, wrong, came)
            chances = np.convolve(chances, here)
    return float(min(1.0, chances[observed:].sum()))


def _cramer(known_N: np.ndarray, came_M: np.ndarray) -> tuple[float, float]:
    """(statistic, p); 1 where the errors are no larger than they were.

    Larger by rank: of two images, the one that came has the larger error more often. One error of a
    million would decide about means.
    """
    found = scipy.stats.cramervonmises_2samp(known_N, came_M)
    half = len(known_N) * len(came_M) / 2
    is_larger = scipy.stats.mannwhitneyu(came_M, known_N).statistic > half
    return float(found.statistic), float(found.pvalue) if is_larger else 1.0


def by_domain(known: Outcomes) -> Iterator[tuple[str, Outcomes]]:
    """Each known domain with LEAST images; small ones together, if they are as many."""
    if not known.domains:
        yield "", known
        return
    names = np.array(known.domains, dtype=object)
    sizes = {name: int((names == name).sum()) for name in dict.fromkeys(known.domains)}
    large = sorted(name for name, size in sizes.items() if size >= LEAST)
    if len(sizes) == 1 or not large:
        yield "", known
        return
    for name in large:
        yield one_line(name, SHOWN) or "(no name)", known.only(np.flatnonzero(names == name))
    rest = np.flatnonzero([sizes[name] < LEAST for name in known.domains])
    if len(rest) >= LEAST:
        yield "small domains", known.only(rest)
