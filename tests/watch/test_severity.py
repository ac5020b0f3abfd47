"""What a check keeps of an estimate, and what it reads back from its table."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raypipe.watch.severity import NOT_ASKED, Severity, as_row, of_row, severity

ROW = {"accuracy": 0.8, "accuracy_low": 0.7, "accuracy_high": 0.9, "accuracy_known": 0.95}


def test_a_row_says_what_was_estimated() -> None:
    found = of_row(ROW)
    assert as_row(found) == ROW | {"no_estimate": None} and of_row(as_row(found)) == found
    assert found.loss == pytest.approx((0.15, 0.05, 0.25))
    text = "estimated accuracy 80 % (interval 70 to 90 %), on held-out images 95 %"
    assert str(found) == text
    unknown = Severity(why_not="25 images are too few")
    assert of_row(as_row(unknown)) == unknown and unknown.loss is None
    assert str(unknown) == "no estimate of accuracy: 25 images are too few"


@pytest.mark.parametrize(
    "changes",
    [
        {"accuracy": None},
        {"accuracy": math.nan},
        {"accuracy_low": math.inf},
        {"accuracy_known": 2.0},
        {"accuracy_high": "0.9"},
    ],
)
def test_a_row_of_anybody_else_is_no_estimate(changes: dict[str, Any]) -> None:
    found = of_row(ROW | changes)
    assert found.loss is None and "older raypipe" in str(found)
    assert of_row({}).loss is None and NOT_ASKED.loss is None
    assert of_row(ROW | changes | {"no_estimate": "far away"}).why_not == "far away"


def test_a_package_without_calibration_says_why() -> None:
    import numpy as np

    found = severity("the task is ordinal", np.ones((1, 1)), np.ones((1, 1)), 0)
    assert found == Severity(why_not="the task is ordinal")
