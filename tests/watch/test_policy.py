"""When checks call for a retrain: a table of cases, each with its reason."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.watch.policy import Checked, PolicyConfig, Tried, backed_off, retrain
from raypipe.watch.severity import Severity

NOW = datetime(2026, 11, 25, 3, tzinfo=UTC)
CALM, DRIFT = Checked(False), Checked(True)


def costs(points: float, width: float = 8, drift: bool = True) -> Checked:
    """A check with an estimated loss, of a champion that is right on 90 % at home."""
    accuracy = 0.9 - points / 100
    ends = accuracy - width / 200, accuracy + width / 200
    return Checked(drift, Severity(accuracy, *ends, 0.9))


UNKNOWN = Checked(True, Severity(why_not="the images are too unlike those the model knows"))
CALM_UNKNOWN = Checked(False, Severity(why_not="10 images are too few"))
FIVE = {"severity": 0.05}
LOSS = {"severity": 0.05, "counts": "loss"}
MANY = {"poly": 300}


def hours(ago: float, checks: int = 1, device_h: float = 0.0) -> Tried:
    return Tried(NOW - timedelta(hours=ago), checks, device_h)


@pytest.mark.parametrize(
    ("checks", "labels", "tried", "policy", "acts", "says"),
    [
        ([], MANY, [], {}, False, "No drift: the champion stays"),
        ([DRIFT, CALM], MANY, [], {}, False, "No drift: the champion stays"),
        ([CALM, DRIFT], MANY, [], {}, True, "Drift, and labels: 300 images of poly"),
        ([DRIFT], {"b": 30, "a": 9}, [], {}, True, "labels: 9 images of a, 30 images of b"),
        ([DRIFT], {}, [], {}, False, "no labelled images that the champion has not seen: waiting"),
        ([DRIFT], {"a": 19}, [], {}, False, "19 labelled images .* waiting for labels .20 are"),
        ([DRIFT], {"a": 20}, [], {}, True, "20 images of a"),
        # k of n
        ([DRIFT], MANY, [], {"k": 2, "of": 3}, False, "1 of the last 1 checks: .* 2 of 3"),
        ([DRIFT, CALM, DRIFT], MANY, [], {"k": 2, "of": 3}, True, "Drift, and labels"),
        ([DRIFT, CALM, DRIFT, CALM], MANY, [], {"k": 2, "of": 3}, False, "1 of the last 3"),
        ([DRIFT, DRIFT, CALM], MANY, [], {"k": 2, "of": 3}, True, "Drift, and labels"),
        # how often
        ([DRIFT], MANY, [hours(30, checks=1)], {"cooldown": 3}, False, "1 check since the last"),
        ([DRIFT], MANY, [hours(90, checks=3)], {"cooldown": 3}, True, "labels"),
        ([DRIFT], MANY, [hours(3)], {}, True, "labels"),
        ([DRIFT], MANY, [hours(3), hours(9)], {}, False, "2 retrains within a day: .* allows 2"),
        ([DRIFT], MANY, [hours(25), hours(26)], {}, True, "labels"),
        ([DRIFT], MANY, [hours(-3), hours(3)], {}, False, "2 retrains within a day"),
        ([DRIFT], MANY, [hours(99, 4, 2.5)], {"budget_h": 2}, False, "2.5 device hours .* is 2"),
        ([DRIFT], MANY, [hours(800, 40, 2.5)], {"budget_h": 2}, True, "labels"),
        # by p-value alone, whatever it costs
        ([costs(0)], MANY, [], {}, True, "^Drift, and labels"),
        ([costs(20, drift=False)], MANY, [], {}, False, "^No drift: the champion stays$"),
        ([UNKNOWN], MANY, [], {}, True, "^Drift, and labels"),
        # drift that costs enough
        ([costs(8)], MANY, [], FIVE, True, r"^Drift with an estimated loss of 8.0 .* \(4.0 to 12"),
        ([costs(5.1, 20)], MANY, [], FIVE, True, r"loss of 5.1 points .* \(-4.9 to 15.1\)"),
        ([costs(4)], MANY, [], FIVE, False, "^Drift, but an estimated loss of 4.0 .* 5 points$"),
        ([costs(-3)], MANY, [], FIVE, False, "^Drift, but an estimated loss of -3.0"),
        ([costs(20, drift=False)], MANY, [], FIVE, False, "^No drift: the champion stays$"),
        ([costs(8), costs(1)], MANY, [], FIVE, False, "loss of 1.0"),
        ([costs(8)], {}, [], FIVE, False, "^Drift with .*, but no labelled images"),
        ([costs(8)], MANY, [hours(1), hours(2)], FIVE, False, "^Drift with .*, but 2 retrains"),
        # no answer is not no loss
        ([UNKNOWN], MANY, [], FIVE, True, "^Drift of unknown cost .no estimate .* model knows"),
        ([UNKNOWN], MANY, [], LOSS, True, "^Drift of unknown cost .no estimate .* model knows"),
        ([DRIFT], MANY, [], FIVE, True, "unknown cost .no estimate of accuracy: none was asked"),
        ([CALM_UNKNOWN], MANY, [], FIVE, False, "^No drift: the champion stays$"),
        ([CALM_UNKNOWN], MANY, [], LOSS, False, "^No drift, and no estimate .* too few: the"),
        # numbers that no raypipe writes are no answer
        ([Checked(True, Severity(float("nan"), 0.1, 0.2, 0.9))], MANY, [], FIVE, True, "unknown"),
        ([Checked(True, Severity(0.9, None, None, 0.9))], MANY, [], LOSS, True, "unknown"),
        # a loss beyond chance, drift or not
        ([costs(8, 8, drift=False)], MANY, [], LOSS, True, "^An estimated loss of 8.0 .*, and lab"),
        (
            [costs(8, 20, drift=False)],
            MANY,
            [],
            LOSS,
            False,
            "^No drift, and .*5 points beyond cha",
        ),
        ([costs(8, 20)], MANY, [], LOSS, False, "^Drift, but .* points beyond chance$"),
        ([costs(3, 2)], MANY, [], LOSS, False, "^Drift, but an estimated loss of 3.0"),
        ([], MANY, [], LOSS, False, "^No drift"),
        # k of n
        (
            [costs(8), costs(1)],
            MANY,
            [],
            FIVE | {"k": 2, "of": 2},
            False,
            "^A loss of 5 .* 1 of the",
        ),
        ([costs(8), UNKNOWN], MANY, [], FIVE | {"k": 2, "of": 2}, True, "^Drift of unknown cost"),
        ([UNKNOWN, costs(7)], MANY, [], FIVE | {"k": 2, "of": 2}, True, "^Drift with .* 7.0"),
    ],
)
def test_every_decision_and_its_reason(
    checks: list[Checked],
    labels: dict[str, int],
    tried: list[Tried],
    policy: dict[str, Any],
    acts: bool,
    says: str,
) -> None:
    decision = retrain(checks, labels, tried, NOW, validate(PolicyConfig, policy))
    assert decision.act is acts
    assert re.search(says, decision.reason), decision.reason


def test_an_order_needs_nothing_else() -> None:
    decision = retrain([], {}, [hours(1)] * 9, NOW, PolicyConfig(), force=True)
    assert decision.act and decision.reason == "Retraining was asked for"


@pytest.mark.parametrize(
    "bad",
    [
        {"k": 3, "of": 2},
        {"k": 0},
        {"min_images": 0},
        {"budget_h": -1},
        {"counts": "loss"},
        {"severity": 0},
        {"severity": float("nan")},
    ],
)
def test_a_policy_that_says_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        validate(PolicyConfig, bad)


@pytest.mark.parametrize(("accuracy", "known", "severity"), [(0.93, 0.98, 0.05), (0.85, 0.95, 0.1)])
def test_a_loss_of_just_so_many_points_counts(
    accuracy: float, known: float, severity: float
) -> None:
    """0.98 - 0.93 is less than 0.05 in floating point, and 5.0 points in every message."""
    check = Checked(True, Severity(accuracy, accuracy - 0.02, accuracy + 0.02, known))
    policy = validate(PolicyConfig, {"severity": severity})
    assert retrain([check], MANY, [], NOW, policy).act


def test_what_fails_again_and_again_is_tried_less_and_less_often() -> None:
    def pause(failures: int, hours: float) -> str:
        last = NOW - timedelta(hours=hours)
        return backed_off([last - timedelta(days=1)] * (failures - 1) + [last], NOW)

    assert backed_off([], NOW) == pause(2, 0) == ""
    assert "failed 3 times, the last time at 02:30 UTC: it is tried again 1 hour" in pause(3, 0.5)
    assert pause(3, 1.1) == "" and "4 hours" in pause(5, 3.9) and pause(5, 4.1) == ""
    assert "24 hours" in pause(90, 23) and pause(90, 25) == ""
    assert pause(9, -1) == "", "the clock went back"


def test_a_loss_that_labels_measured_is_told_as_measured() -> None:
    measured = Checked(True, Severity(0.7, 0.62, 0.78, 0.9), by_labels=True)
    policy = validate(PolicyConfig, {"severity": 0.05})
    told = retrain([measured], MANY, [], NOW, policy).reason
    assert told.startswith("Drift with a measured loss of 20.0 points")
    small = Checked(True, Severity(0.88, 0.87, 0.89, 0.9), by_labels=True)
    assert "a measured loss of 2.0 points" in retrain([small], MANY, [], NOW, policy).reason
