"""What decided: the field that did, most; the field that did not, nothing."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.search.importance import FEWEST, importance
from raypipe.search.leaderboard import Trial


def trials(count: int, metric: str = "lr") -> list[Trial]:
    """The metric follows `lr` or `mode`; `seed` never matters. `frozen_blocks` is set under one mode only, and not where the
    mode decides: it would tell as much."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        changes = {"lr": float(10 ** rng.uniform(-4, -1)), "mode": ("frozen", "finetune")[i % 2], "seed": int(rng.integers(9))}
        if metric == "lr" and changes["mode"] == "finetune":
            changes["frozen_blocks"] = int(rng.integers(6))
        value = -abs(np.log10(changes["lr"]) + 2) if metric == "lr" else float(i % 2)
        made.append(Trial(f"trial-{i}", changes, value, 4, False, (), "checkpoint"))
    return made


@pytest.mark.parametrize("decides", ["lr", "mode"])
def test_what_decided_comes_first_and_shares_sum_to_one(decides: str) -> None:
    found = importance(trials(40, decides))
    assert next(iter(found)) == decides and found[decides] > 0.6
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) >= 0
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found == importance(trials(40, decides)), "the same trials say the same"


def test_few_trials_or_no_difference_say_nothing() -> None:
    assert importance(trials(FEWEST - 1)) == {}
    alike = [Trial(f"trial-{i}", {"lr": 0.1}, 0.5, 4, False, (), "checkpoint") for i in range(20)]
    assert importance(alike) == {}
    failed = [Trial(f"trial-{i}", {"lr": float(i)}, float("nan"), 0, False, (), None) for i in range(20)]
    assert importance(failed) == {}
