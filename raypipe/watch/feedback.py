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
that of its worst domain.

`errors` takes the labelled images for a random draw of what was checked. Where they are less sure
or surer than the others of their windows, it is left out. Images that raypipe asked for, the
hardest ones, count in neither test, nor do those that the champion has learned from. What no test
can see: labels that come sooner for one class.

Of images in groups (`watch.group`), one of each group is compared: their errors depend on each
other.

Letters in names: N images with labels; S strata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from raypipe.models.intervals import interval
from raypipe.models.outcomes import Outcomes

DETECTOR = "labels"
LEAST = 20
"""Labelled images of a test, and held-out images of a domain."""
STRATA = 10
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
            low, high = (f"{end:.3g}" for end in ends)
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
    others_sure_N: np.ndarray,
    is_share: bool,
    seed: int,
) -> Feedback:
    """Compare images whose labels came with held-out ones.

    others_sure_N: the confidence of images of the same windows without a label. is_share: errors
    are 0 or 1. Fewer than LEAST labelled images, or held-out ones, are judged by no test.
    """
    rng = np.random.default_rng(seed)
    notes: list[str] = []
    tested, held_out = _one_of_each_group(came, rng), _one_of_each_group(known, rng)
    if came.groups is not None and len(tested) < len(came):
        notes.append(f"labels: of {len(came)} images one of each group is compared, {len(tested)}")
    found: list[Found] = []
    if min(len(tested), len(held_out)) < LEAST:
        few = f"{len(tested)} labelled images and {len(held_out)} held-out ones"
        notes.append(f"labels: no test of {few}, {LEAST} of each are asked for")
    else:
        domains = list(_domains(held_out))
        chosen = _chosen(tested.sure_N, others_sure_N) if is_share else ""
        if chosen:
            notes.append(f"labels: {chosen}, so that accuracies are not compared")
        else:
            found.append(_errors(domains, tested, is_share))
        if is_share:
            found.append(_calibration(domains, tested))
    right_N = 1 - came.error_N if is_share else came.error_N
    low = high = None
    if len(came) > 1:
        _, of_group = np.unique(
            np.array(came.groups or range(len(came)), dtype=object).astype(str), return_inverse=True
        )
        low, high = interval(right_N, of_group, 0.05, is_share, rng)
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


def _errors(domains: Sequence[tuple[str, Outcomes]], came: Outcomes, is_share: bool) -> Found:
    """Is it wrong more often, or by more, than on every domain?"""
    worst: tuple[float, float, str] | None = None
    for name, known in domains:
        if is_share:
            p_value = fisher([len(known)], [known.error_N.sum()], [len(came)], [came.error_N.sum()])
            statistic = float(came.error_N.mean() - known.error_N.mean())
        else:
            statistic, p_value = _cramer(known.error_N, came.error_N)
        if worst is None or p_value > worst[1]:
            worst = statistic, p_value, name
    assert worst is not None
    statistic, p_value, name = worst
    known = dict(domains)[name]
    of = f" of {name}" if name else ""
    if is_share:
        said = [f"{one.error_N.sum():.0f} of {len(one)}" for one in (came, known)]
        detail = f"{said[0]} wrong, of held-out images{of} {said[1]}"
    else:
        said = [f"{one.error_N.mean():.3g}" for one in (came, known)]
        detail = f"mean absolute error {said[0]}, of held-out images{of} {said[1]}"
    return Found("errors", statistic, max(p_value, LEAST_P), detail)


def _calibration(domains: Sequence[tuple[str, Outcomes]], came: Outcomes) -> Found:
    """Is it wrong more often than held-out images of equal confidence, on every domain?"""
    worst: tuple[float, float, str] | None = None
    for name, known in domains:
        # Strata of both together: who is in which does not depend on who is wrong.
        pooled = np.concatenate([known.sure_N, came.sure_N])
        edges = np.quantile(pooled, np.linspace(0, 1, STRATA + 1)[1:-1])
        places = [np.searchsorted(edges, one.sure_N, side="right") for one in (known, came)]
        sizes = [np.bincount(place, minlength=STRATA) for place in places]
        wrong = [
            np.bincount(place, one.error_N, STRATA)
            for place, one in zip(places, (known, came), strict=True)
        ]
        p_value = fisher(sizes[0], wrong[0], sizes[1], wrong[1])
        rates_S = (wrong[0] + wrong[1]) / np.maximum(sizes[0] + sizes[1], 1)
        excess = float((wrong[1] - rates_S * sizes[1]).sum() / len(came))
        if worst is None or p_value > worst[1]:
            worst = excess, p_value, name
    assert worst is not None
    excess, p_value, name = worst
    sure, right = 100 * came.sure_N.mean(), 100 * (1 - came.error_N.mean())
    known = dict(domains)[name]
    before = f"{100 * known.sure_N.mean():.0f} % and {100 * (1 - known.error_N.mean()):.0f} %"
    of = f" of {name}" if name else ""
    detail = f"sure of {sure:.0f} %, right in {right:.0f} %; held-out images{of}: {before}"
    return Found("calibration", excess, max(p_value, LEAST_P), detail)


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
    """(statistic, p); 1 where the errors are no larger than they were."""
    found = stats.cramervonmises_2samp(known_N, came_M)
    is_larger = came_M.mean() > known_N.mean()
    return float(found.statistic), float(found.pvalue) if is_larger else 1.0


def _chosen(tested_sure_N: np.ndarray, others_sure_M: np.ndarray) -> str:
    """Why the labelled images are no random draw of what was checked; "" if they may be."""
    others_sure_M = others_sure_M[np.isfinite(others_sure_M)]
    if len(others_sure_M) < LEAST:
        return ""
    p_value = float(stats.mannwhitneyu(tested_sure_N, others_sure_M).pvalue)
    if p_value >= CHOSEN:
        return ""
    means = tested_sure_N.mean(), others_sure_M.mean()
    return (
        "the champion is surer of other images of the same windows "
        if means[0] < means[1]
        else "the champion is less sure of other images of the same windows "
    ) + f"({100 * means[0]:.0f} % of the labelled, {100 * means[1]:.0f} % of the others)"


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
        yield name or "no domain", _rows(known, np.flatnonzero(names == name))
    rest = np.flatnonzero([sizes[name] < LEAST for name in known.domains])
    if len(rest) >= LEAST:
        yield "small domains", _rows(known, rest)


def _one_of_each_group(one: Outcomes, rng: np.random.Generator) -> Outcomes:
    """One image of each group, drawn; a blank group is nobody's, so that its images stand alone."""
    if one.groups is None:
        return one
    kept: dict[object, int] = {}
    for row in rng.permutation(len(one)).tolist():
        kept.setdefault(one.groups[row] or row, row)
    return _rows(one, np.array(sorted(kept.values()), np.int64))


def _rows(one: Outcomes, rows: np.ndarray) -> Outcomes:
    return Outcomes(
        one.error_N[rows],
        one.sure_N[rows],
        tuple(one.domains[row] for row in rows.tolist()) if one.domains else (),
        tuple(one.groups[row] for row in rows.tolist()) if one.groups is not None else None,
        one.split,
    )
