"""What a drift costs: the champion's accuracy on a window, estimated without labels.

The estimate is models/severity.py's, with what the champion's package was calibrated with when it
was registered. A drift check keeps it beside its p-values, and `watch.policy` may ask for it.

No answer is never "no loss". A window so far away that nothing is known about it, as of garbage,
has the largest losses of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.models.severity import Calibration, estimate

MOST_IMAGES = 20_000
"""Of a larger window so many are drawn: their chance is below half a point."""
EARLIER = "the check was made by an older raypipe"


@dataclass(frozen=True)
class Severity:
    """An estimate of the accuracy on a window, 0 to 1, with its interval; or why there is none.

    known: the accuracy on held-out images of the nearest mixture of known domains: of validation,
    or of the test split if validation was trained on. The four numbers are None without an
    estimate.
    """

    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    known: float | None = None
    why_not: str = ""

    @property
    def loss(self) -> tuple[float, float, float] | None:
        """(loss of accuracy, its lower end, its upper end); a negative one is a gain."""
        numbers = (self.accuracy, self.low, self.high, self.known)
        if any(one is None or not math.isfinite(one) for one in numbers):
            return None
        accuracy, low, high, known = (float(one or 0) for one in numbers)
        return known - accuracy, known - high, known - low

    def __str__(self) -> str:
        """In words, for people."""
        loss = self.loss
        if loss is None:
            return f"no estimate of accuracy: {self.why_not or 'its numbers are not known'}"
        accuracy, low, high, known = (
            f"{100 * float(one or 0):.0f}"
            for one in (self.accuracy, self.low, self.high, self.known)
        )
        return (
            f"estimated accuracy {accuracy} % (interval {low} to {high} %), "
            f"on held-out images {known} %"
        )


NOT_ASKED = Severity(why_not="none was asked for")


def severity(
    calibration: Calibration | str, scores_MC: np.ndarray, features_MD: np.ndarray, seed: int
) -> Severity:
    """What the champion's calibration says of a window; of a text, that there is none.

    Raises DataError for scores or features of another model, and for numbers that are not finite.
    """
    if isinstance(calibration, str):
        return Severity(why_not=calibration)
    if len(scores_MC) > MOST_IMAGES:
        rng = np.random.default_rng(seed)
        some = np.sort(rng.choice(len(scores_MC), MOST_IMAGES, replace=False))
        scores_MC, features_MD = scores_MC[some], features_MD[some]
    found = estimate(calibration, scores_MC, features_MD)
    if found.abstains:
        return Severity(why_not=found.abstains)
    return Severity(found.accuracy, found.low, found.high, found.known)


def of_row(row: Mapping[str, Any]) -> Severity:
    """What a row of checks says; rows of an older raypipe, and foreign ones, say nothing."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "accuracy_known")
    numbers = [row.get(name) for name in names]
    # NaN is in no range.
    shares = [n for n in numbers if isinstance(n, float) and 0 <= n <= 1]
    if len(shares) < len(numbers):
        return Severity(why_not=str(row.get("no_estimate") or EARLIER))
    accuracy, low, high, known = shares
    return Severity(accuracy, low, high, known)


def as_row(found: Severity) -> dict[str, Any]:
    """The columns of a row of checks."""
    return {
        "accuracy": found.accuracy,
        "accuracy_low": found.low,
        "accuracy_high": found.high,
        "accuracy_known": found.known,
        "no_estimate": found.why_not or None,
    }
