"""What Tune hears of an epoch whose weights are lost: finite numbers, and the worst metric there
is.
"""

from __future__ import annotations

import json
import math

import pytest

from raypipe.search.trials.epoch_result import UNUSABLE, metric_of_result, result_of

GOOD = {"val_accuracy": 0.6, "val_loss": 0.5, "train_loss": 0.4}


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["val_loss", "train_loss", "val_accuracy"])
def test_a_lost_epoch_is_worse_than_any_other(name: str, lost: float) -> None:
    result = result_of(GOOD | {name: lost}, 3, True, "val_accuracy", "max")
    assert (
        result["val_accuracy"] < -1e30
        and math.isnan(metric_of_result(result, "val_accuracy"))
        and result[UNUSABLE]
    )
    assert (
        result_of(GOOD | {name: lost}, 3, True, "val_loss", "min")["val_loss"] > 1e30
        or name == "val_accuracy"
    )
    json.loads(json.dumps(result), parse_constant=lambda constant: pytest.fail(constant))


def test_a_usable_epoch_is_told_as_it_is() -> None:
    result = result_of(GOOD, 2, False, "val_accuracy", "max")
    assert (
        result == GOOD | {"epoch": 2, "ended": False}
        and metric_of_result(result, "val_accuracy") == 0.6
    )
    beside = result_of(
        GOOD | {"val_r2": math.nan}, 2, False, "val_accuracy", "max"
    )  # labels that do not vary have no R2
    assert beside == result
