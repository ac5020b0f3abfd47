"""Label drift: is the champion wrong more often than it was on its held-out images?

Labels of checked images come later, or never (feedback_rows.py finds them). Two questions are asked
of those that came, both one-sided, because only a loss matters:

- `errors`: are more of them wrong? Fisher's exact test (1935) of right and wrong, here and on the
  held-out images. Of numbers, the Cramér-von Mises test of the absolute errors, where they are
  larger by rank.
- `calibration`: are more of them wrong than the model's own confidence says? The same test within
  strata of equal confidence: their hypergeometric distributions, convolved (the exact form of
  Cochran-Mantel-Haenszel). It sees a loss that the confidence does not show. And it holds where
  images were chosen for a label by the model's confidence.

The tests are error_tests.py. `errors` takes the labelled images for a random draw of what was
checked. Where they are less sure or surer than the others of their windows (chosen.py), it is left
out. Images that raypipe asked for, the hardest ones, count in neither test, nor do those that the
champion has learned from. What no test can see: labels that come sooner for one class.

Images that chose the epoch or the trial look better than others: the best of 30 trials by 400
validation images raises 6 times as many false alarms as it should. With them no test is made.

Of images in groups (`watch.group`), one of each group is compared: their errors depend on each
other.

Letters in names: N images with labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypipe.models.intervals import interval
from raypipe.models.outcomes import Outcomes
from raypipe.watch import chosen, error_tests, groups
from raypipe.watch.chosen import Seen
from raypipe.watch.error_tests import Found

DETECTOR = "labels"


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
        low, high = ("?" if end is None else f"{100 * end:.0f}" for end in ends)
        return (
            f"measured accuracy {100 * self.measured:.0f} % (95 % interval {low} to {high} %) on "
            f"{self.labelled} images whose labels came, on held-out images {100 * self.known:.0f} %"
        )


NOTHING = Feedback()
ACCURACY, ERROR = "accuracy", "mean absolute error"


def as_row(says: Feedback) -> dict[str, Any]:
    """The columns of a row of checks; null, and none labelled, where no label came."""
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
    """What a row of checks says, without its tests, which are among the evidence.

    Rows of an older raypipe, and foreign ones, say nothing.
    """
    is_share = row.get("measured_as") != ERROR

    def number(name: str) -> float | None:
        value = row.get(name)
        # NaN is in no range.
        most = 1.0 if is_share or name.startswith("sure") else math.inf
        return value if isinstance(value, float) and 0 <= value <= most else None

    labelled, measured = row.get("labelled"), number("measured")
    if measured is None or not isinstance(labelled, int) or labelled < 1:
        return NOTHING
    return Feedback(
        labelled=labelled,
        is_share=is_share,
        measured=measured,
        low=number("measured_low"),
        high=number("measured_high"),
        known=number("measured_known"),
        sure=number("sure"),
        sure_known=number("sure_known"),
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
    None: they are of one, numbered 0. is_share: errors are 0 or 1. Fewer than LEAST labelled
    images, or held-out ones, are judged by no test.
    """
    rng = np.random.default_rng(seed)
    notes: list[str] = []
    rows = _one_of_each_group(came, rng)
    tested, held_out = came.only(rows), known.only(_one_of_each_group(known, rng))
    if came.groups is not None and len(tested) < len(came):
        notes.append(f"labels: of {len(came)} images one of each group is compared, {len(tested)}")
    found: list[Found] = []
    if min(len(tested), len(held_out)) < error_tests.LEAST:
        few = f"{len(tested)} labelled images and {len(held_out)} held-out ones"
        notes.append(f"labels: no test of {few}, {error_tests.LEAST} of each are asked for")
    elif known.chose:
        notes.append(
            f"labels: no test, as the held-out images are of {known.split}, which chose the model: "
            "it looks better there than it is"
        )
    else:
        domains = list(error_tests.by_domain(held_out))
        without = len(held_out) - sum(len(one) for _, one in domains)
        if without:
            notes.append(
                f"labels: {without} held-out images are all that their domains have, too few to "
                "compare with: labels of these domains may look like a loss"
            )
        of = np.zeros(len(came), int) if window_N is None else window_N
        why = chosen.why_not_drawn(Seen(tested.sure_N, of[rows]), others) if is_share else ""
        if why:
            notes.append(f"labels: {why}, so that accuracies are not compared")
        paired = error_tests.paired_by_domain(domains, tested)
        if not is_share:
            found.append(error_tests.of_numbers(domains, tested, rng))
        elif paired:
            found += [] if why else [error_tests.errors_each(paired)]
            found.append(error_tests.calibration_each(paired))
        else:
            found += [] if why else [error_tests.errors(domains, tested)]
            found.append(error_tests.calibration(domains, tested, rng))
    right_N = 1 - came.error_N if is_share else came.error_N
    low = high = None
    if len(came) > 1:
        # A blank group is nobody's, here as in the tests.
        of_group = groups.codes(came.groups or [""] * len(came))
        low, high = interval(right_N, of_group, 0.05, is_share, rng)
        # Of a single group of errors nothing is known: the upper end is infinite.
        high = high if math.isfinite(high) else None
    known_sure, known_mean = _of_held_out(known, came, is_share)
    return Feedback(
        labelled=len(came),
        is_share=is_share,
        measured=float(right_N.mean()) if len(came) else None,
        low=low,
        high=high,
        known=known_mean,
        sure=float(came.sure_N.mean()) if is_share and len(came) else None,
        sure_known=known_sure,
        found=tuple(found),
        notes=tuple(notes),
    )


def _of_held_out(
    known: Outcomes, came: Outcomes, is_share: bool
) -> tuple[float | None, float | None]:
    """(confidence, accuracy or error) of held-out images: of the domains of what came, where all
    name one that is known; else of all."""
    if not len(known):
        return None, None
    if not is_share:
        return None, float(known.error_N.mean())
    paired = error_tests.paired_by_domain(list(error_tests.by_domain(known)), came)
    if paired:
        return error_tests.of_all([one for one, _ in paired], paired)
    return float(known.sure_N.mean()), 1 - float(known.error_N.mean())


def with_notes(says: Feedback, notes: Sequence[str]) -> Feedback:
    """The same with these notes before its own."""
    return replace(says, notes=(*notes, *says.notes))


def _one_of_each_group(one: Outcomes, rng: np.random.Generator) -> np.ndarray:
    """Rows: one of each group, drawn; a blank group is nobody's, so that its images stand alone."""
    if one.groups is None:
        return np.arange(len(one))
    kept = groups.apart(rng.permutation(len(one)).tolist(), one.groups)
    return np.array(kept, np.int64)
