"""Label drift: is the champion wrong more often than it was on its held-out images?

Labels of checked images come later, or never (feedback_rows.py finds them). Two questions are asked
of those that came, both one-sided, because only a loss matters:

- `errors`: are more of them wrong? Fisher's exact test (1935) of right and wrong, here and on the
  held-out images. Of numbers, the Cramér-von Mises test of the absolute errors, where their mean is
  larger.
- `calibration`: are more of them wrong than the model's own confidence says? The same test within
  strata of equal confidence: their hypergeometric distributions, convolved (the exact form of
  Cochran-Mantel-Haenszel). It sees a loss that the confidence does not show. And it holds where
  images were chosen for a label by the model's confidence.

A batch of known domains, in any mixture, is no drift: some are harder than others. So each test is
made against every domain, and the largest p-value counts: the error of a mixture is no larger than
that of its worst domain. Within a stratum it may be larger, where one domain is worse when it is
sure and the other when it is not: so `calibration` and the test of numbers are made against
mixtures of two domains, too (measured: without them 58 of 100 such nights alarm at 0.05, with them
2).

`errors` takes the labelled images for a random draw of what was checked. Where they are less sure
or surer than the others of their windows, it is left out. Images that raypipe asked for, the
hardest ones, count in neither test, nor do those that the champion has learned from. What no test
can see: labels that come sooner for one class.

Images that chose the epoch or the trial look better than others: the best of 30 trials by 400
validation images raises 6 times as many false alarms as it should. With them no test is made.

Of images in groups (`watch.group`), one of each group is compared: their errors depend on each
other.

Letters in names: N images with labels; S strata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from raypipe.errors import one_line
from raypipe.models.intervals import interval
from raypipe.models.outcomes import Outcomes
from raypipe.watch import groups

DETECTOR = "labels"
LEAST = 20
"""Labelled images of a test, and held-out images of a domain."""
STRATA, MOST_STRATA = 10, 30
A_STRATUM = 50
"""Images of a stratum, where both sides have more than STRATA times as many: images that were
chosen by confidence differ within a wide one."""
MIXED = 6  # domains whose mixtures are tried: those with the largest p-values
SHARES = (0.25, 0.5, 0.75)  # of the first of two
SHOWN = 120  # characters of a domain's name
CHOSEN = 0.05
"""A p-value below which the labelled images are no random draw."""
LEAST_P = 1e-12  # a tail that far out is no evidence of its own size


@dataclass(frozen=True)
class Found:
    """One test: its p-value, and in words what it saw."""

    on: str
    statistic: float
    p_value: float
    detail: str


@dataclass(frozen=True)
class Seen:
    """How sure the champion is of some images, and the window that each is of."""

    sure_N: np.ndarray
    window_N: np.ndarray


NOBODY = Seen(np.empty(0), np.empty(0, int))


@dataclass(frozen=True)
class Feedback:
    """What the labels that came say of the champion.

    labelled: images that were compared. measured, low, high: the share that is right, 0 to 1, with
    its 95 % interval, and `known`, the share of the held-out images; where is_share is False, mean
    absolute errors in the labels' unit. sure, sure_known: the mean confidence of both; None for
    numbers. found: the tests. notes: what was left out, for people.
    """

    labelled: int = 0
    is_share: bool = True
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    known: float | None = None
    sure: float | None = None
    sure_known: float | None = None
    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In words, for people; "" where no label came."""
        if self.measured is None or self.known is None:
            return ""
        ends = (self.low, self.high)
        if not self.is_share:
            low, high = ("?" if end is None else f"{end:.3g}" for end in ends)
            return (
                f"mean absolute error {self.measured:.3g} ({low} to {high}) on {self.labelled} "
                f"images whose labels came, on held-out images {self.known:.3g}"
            )
        low, high = (f"{100 * (end or 0):.0f}" for end in ends)
        return (
            f"measured accuracy {100 * self.measured:.0f} % (95 % interval {low} to {high} %) on "
            f"{self.labelled} images whose labels came, on held-out images {100 * self.known:.0f} %"
        )


NOTHING = Feedback()
ACCURACY, ERROR = "accuracy", "mean absolute error"


def as_row(says: Feedback) -> dict[str, Any]:
    """The columns of a row of checks; all null where no label came."""
    came = says.measured is not None
    return {
        "labelled": says.labelled,
        "measured_as": (ACCURACY if says.is_share else ERROR) if came else None,
        "measured": says.measured,
        "measured_low": says.low,
        "measured_high": says.high,
        "measured_known": says.known,
        "sure": says.sure,
        "sure_known": says.sure_known,
    }


def of_row(row: Mapping[str, Any]) -> Feedback:
    """What a row of checks says, without its tests, which are among the evidence."""
    if row.get("measured") is None or not row.get("labelled"):
        return NOTHING
    return Feedback(
        labelled=int(row["labelled"]),
        is_share=row.get("measured_as") != ERROR,
        measured=row["measured"],
        low=row.get("measured_low"),
        high=row.get("measured_high"),
        known=row.get("measured_known"),
        sure=row.get("sure"),
        sure_known=row.get("sure_known"),
    )


def judge(
    known: Outcomes,
    came: Outcomes,
    others: Seen,
    is_share: bool,
    seed: int,
    window_N: np.ndarray | None = None,
) -> Feedback:
    """Compare images whose labels came with held-out ones.

    others: the other images of the same windows. window_N: the window of each image that came;
    None: they are of one, numbered 0. is_share: errors
    are 0 or 1. Fewer than LEAST labelled images, or held-out ones, are judged by no test.
    """
    rng = np.random.default_rng(seed)
    notes: list[str] = []
    rows = _one_of_each_group(came, rng)
    tested, held_out = came.only(rows), known.only(_one_of_each_group(known, rng))
    if came.groups is not None and len(tested) < len(came):
        notes.append(f"labels: of {len(came)} images one of each group is compared, {len(tested)}")
    found: list[Found] = []
    if min(len(tested), len(held_out)) < LEAST:
        few = f"{len(tested)} labelled images and {len(held_out)} held-out ones"
        notes.append(f"labels: no test of {few}, {LEAST} of each are asked for")
    elif known.chose:
        notes.append(
            f"labels: no test, as the held-out images are of {known.split}, which chose the model: "
            "it looks better there than it is"
        )
    else:
        domains = list(_domains(held_out))
        without = len(held_out) - sum(len(one) for _, one in domains)
        if without:
            notes.append(
                f"labels: {without} held-out images are all that their domains have, too few to "
                "compare with: labels of these domains may look like a loss"
            )
        of = np.zeros(len(came), int) if window_N is None else window_N
        chosen = _chosen(Seen(tested.sure_N, of[rows]), others) if is_share else ""
        if chosen:
            notes.append(f"labels: {chosen}, so that accuracies are not compared")
        else:
            found.append(
                _errors(domains, tested) if is_share else _of_numbers(domains, tested, rng)
            )
        if is_share:
            found.append(_calibration(domains, tested, rng))
    right_N = 1 - came.error_N if is_share else came.error_N
    low = high = None
    if len(came) > 1:
        # A blank group is nobody's, here as in the tests.
        of_group = groups.codes(came.groups or [""] * len(came))
        low, high = interval(right_N, of_group, 0.05, is_share, rng)
        # Of a single group of errors nothing is known: the upper end is infinite.
        high = high if math.isfinite(high) else None
    held = 1 - known.error_N if is_share else known.error_N
    return Feedback(
        labelled=len(came),
        is_share=is_share,
        measured=float(right_N.mean()) if len(came) else None,
        low=low,
        high=high,
        known=float(held.mean()) if len(known) else None,
        sure=float(came.sure_N.mean()) if is_share and len(came) else None,
        sure_known=float(known.sure_N.mean()) if is_share and len(known) else None,
        found=tuple(found),
        notes=tuple(notes),
    )


def with_notes(says: Feedback, notes: Sequence[str]) -> Feedback:
    """The same with these notes before its own."""
    return replace(says, notes=(*notes, *says.notes))


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


def _errors(domains: Sequence[tuple[str, Outcomes]], came: Outcomes) -> Found:
    """Is it wrong more often than on every domain?"""

    def against(name: str, known: Outcomes) -> _Test:
        p_value = fisher([len(known)], [known.error_N.sum()], [len(came)], [came.error_N.sum()])
        return _Test(name, known, float(came.error_N.mean() - known.error_N.mean()), p_value)

    worst = _worst([against(*one) for one in domains])
    said = [f"{one.error_N.sum():.0f} of {len(one)}" for one in (came, worst.known)]
    detail = f"{said[0]} wrong, of held-out images{worst.of} {said[1]}"
    return Found("errors", worst.statistic, max(worst.p_value, LEAST_P), detail)


def _of_numbers(
    domains: Sequence[tuple[str, Outcomes]], came: Outcomes, rng: np.random.Generator
) -> Found:
    """Is it wrong by more than on every domain, and on their mixtures?"""

    def against(name: str, known: Outcomes) -> _Test:
        return _Test(name, known, *_cramer(known.error_N, came.error_N))

    worst = _worst(_with_mixtures(domains, against, rng))
    said = [f"{np.median(one.error_N):.3g}" for one in (came, worst.known)]
    detail = f"median absolute error {said[0]}, of held-out images{worst.of} {said[1]}"
    return Found("errors", worst.statistic, max(worst.p_value, LEAST_P), detail)


def _calibration(
    domains: Sequence[tuple[str, Outcomes]], came: Outcomes, rng: np.random.Generator
) -> Found:
    """Is it wrong more often than held-out images of equal confidence?"""

    def against(name: str, known: Outcomes) -> _Test:
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
        p_value = fisher(sizes[0], wrong[0], sizes[1], wrong[1])
        rates_S = (wrong[0] + wrong[1]) / np.maximum(sizes[0] + sizes[1], 1)
        excess = float((wrong[1] - rates_S * sizes[1]).sum() / len(came))
        return _Test(name, known, excess, p_value)

    worst = _worst(_with_mixtures(domains, against, rng))
    known = worst.known
    sure, right = 100 * came.sure_N.mean(), 100 * (1 - came.error_N.mean())
    before = f"{100 * known.sure_N.mean():.0f} % and {100 * (1 - known.error_N.mean()):.0f} %"
    detail = f"sure of {sure:.0f} %, right in {right:.0f} %; held-out images{worst.of}: {before}"
    return Found("calibration", worst.statistic, max(worst.p_value, LEAST_P), detail)


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
            here = stats.hypergeom.pmf(np.arange(min(wrong, came) + 1), all_of, wrong, came)
            chances = np.convolve(chances, here)
    return float(min(1.0, chances[observed:].sum()))


def _cramer(known_N: np.ndarray, came_M: np.ndarray) -> tuple[float, float]:
    """(statistic, p); 1 where the errors are no larger than they were.

    Larger by rank: of two images, the one that came has the larger error more often. One error of a
    million would decide about means.
    """
    found = stats.cramervonmises_2samp(known_N, came_M)
    half = len(known_N) * len(came_M) / 2
    is_larger = stats.mannwhitneyu(came_M, known_N).statistic > half
    return float(found.statistic), float(found.pvalue) if is_larger else 1.0


def _chosen(came: Seen, others: Seen) -> str:
    """Why the labelled images are no random draw of what was checked; "" if they may be.

    Ranks are compared within each window (van Elteren 1960): a night of surer images that are
    labelled sooner than those of another night is still a random draw of its own.
    """
    drawn = np.isfinite(others.sure_N)
    if drawn.sum() < LEAST:
        return ""
    away = variance = 0.0
    ours = theirs = 0.0
    images = 0
    for window in np.unique(came.window_N):
        mine_N = came.sure_N[came.window_N == window]
        other_N = others.sure_N[drawn & (others.window_N == window)]
        n, m = len(mine_N), len(other_N)
        if not m:
            continue
        all_of = n + m
        ranks = stats.rankdata(np.concatenate([mine_N, other_N]))
        # Equal ranks, of a model that is always sure, vary less.
        _, tied = np.unique(ranks, return_counts=True)
        ties = float((tied.astype(float) ** 3 - tied).sum()) / (all_of * (all_of - 1))
        away += (ranks[:n].sum() - n * (all_of + 1) / 2) / (all_of + 1)
        variance += n * m / 12 * (all_of + 1 - ties) / (all_of + 1) ** 2
        images += n
        ours += mine_N.sum()
        theirs += n * other_N.mean()
    if variance <= 0 or 2 * stats.norm.sf(abs(away) / variance**0.5) >= CHOSEN:
        return ""
    return (
        f"the champion is {'surer' if away < 0 else 'less sure'} of other images of the same "
        f"windows ({100 * ours / images:.0f} % of the labelled, {100 * theirs / images:.0f} % of "
        "the others)"
    )


def _domains(known: Outcomes) -> Iterator[tuple[str, Outcomes]]:
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


def _one_of_each_group(one: Outcomes, rng: np.random.Generator) -> np.ndarray:
    """Rows: one of each group, drawn; a blank group is nobody's, so that its images stand alone."""
    if one.groups is None:
        return np.arange(len(one))
    kept: dict[object, int] = {}
    for row in rng.permutation(len(one)).tolist():
        kept.setdefault(one.groups[row] or row, row)
    return np.array(sorted(kept.values()), np.int64)
