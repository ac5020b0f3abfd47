"""What decided: the field that did, most; the field that did not, nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.search.importance import LEAST_TRIALS, importance
from raypipe.search.leaderboard import Trial


def trial(i: int, changes: dict[str, Any], *values: float) -> Trial:
    """One with these values, an epoch each."""
    history = tuple({"val_accuracy": value} for value in values)
    return Trial(
        f"trial-{i}",
        changes,
        max(values, default=float("nan")),
        len(values),
        False,
        history,
        "checkpoint",
    )


def shares(trials: list[Trial]) -> dict[str, float]:
    return importance(trials, "val_accuracy", "max")


def trials(count: int, metric: str = "lr") -> list[Trial]:
    """The metric follows `lr` or `mode`; `seed` never matters. `frozen_blocks` is set under one
    mode only, and not where the mode decides: it would tell as much.
    """
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        changes = {
            "lr": float(10 ** rng.uniform(-4, -1)),
            "mode": ("frozen", "finetune")[i % 2],
            "seed": int(rng.integers(9)),
        }
        if metric == "lr" and changes["mode"] == "finetune":
            changes["frozen_blocks"] = int(rng.integers(6))
        value = -abs(np.log10(changes["lr"]) + 2) if metric == "lr" else float(i % 2)
        made.append(trial(i, changes, value))
    return made


@pytest.mark.parametrize("decides", ["lr", "mode"])
def test_what_decided_comes_first_and_shares_sum_to_one(decides: str) -> None:
    found = shares(trials(40, decides))
    assert next(iter(found)) == decides and found[decides] > 0.6
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) >= 0
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found == shares(trials(40, decides)), "the same trials say the same"


def test_few_trials_or_no_difference_say_nothing() -> None:
    assert shares(trials(LEAST_TRIALS - 1)) == {}
    alike = [trial(i, {"lr": 0.1}, 0.5) for i in range(20)]
    assert shares(alike) == {}
    failed = [trial(i, {"lr": float(i)}) for i in range(20)]
    assert shares(failed) == {}


def test_more_epochs_are_no_hyperparameter() -> None:
    """What a scheduler let run longer got better by that alone; after two epochs `lr` decided, and
    `mode` did nothing.
    """
    made = []
    for i in range(40):
        lr, lucky = (i % 4) / 10, i % 8 >= 4
        made.append(
            trial(
                i,
                {"lr": lr, "mode": str(lucky)},
                lr,
                lr + 0.01,
                *([0.9 + lr / 100] if lucky else []),
            )
        )
    found = shares(made)
    assert next(iter(found)) == "lr" and found["lr"] > 0.9


def test_it_does_not_depend_on_the_unit_of_the_metric() -> None:
    """Labels in metres instead of nanometres had no importance."""

    small = [trial(i, one.changes, 1e-12 * one.metric) for i, one in enumerate(trials(40))]
    found = shares(small)
    assert next(iter(found)) == "lr" and found["lr"] > 0.6
