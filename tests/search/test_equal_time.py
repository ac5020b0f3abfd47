"""What the comparison in equal wall time says of its lines, and which methods it has.

# Starts no Ray cluster.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import equal_time, our_tune, plain_tune
from benchmarks.ledger import LEDGERS
from benchmarks.ranks import interval, ranks, summary
from raypipe.config import validate
from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.search.presets import PRESETS


def line(method: str, test: float | None, task: str = "a", **more: Any) -> dict[str, Any]:
    told = {"task": task, "seed": 1, "budget_s": 60.0, "method": method, "val": 0.8, "test": test}
    return {**told, "curve": [[9.0, 0.8]], **more}


def test_ranks_are_by_test_and_times_by_validation() -> None:
    slow = [[5.0, 0.70], [20.0, 0.895], [30.0, 0.90]]
    lines = [line("ours", 0.80, val=0.90, curve=slow), line("random", 0.85)]
    told = summary(lines, ["ours", "random"])["60 s"]
    assert (told["ours"]["mean_rank"], told["random"]["mean_rank"]) == (2, 1)
    assert told["ours"]["median_s_to_99"] == 20.0 and told["random"]["median_s_to_99"] == 60.0
    assert told["random"]["ours_better_by"] == -0.05
    assert ranks([line("x", 0.5), line("y", 0.5), line("z", 0.7)]) == [2.5, 2.5, 1]


def test_only_full_races_count() -> None:
    """Ours has measured the race that it wins alone: that flatters nobody."""
    lines = [line("ours", 0.1, "a"), line("random", 0.9, "a"), line("ours", 0.9, "b")]
    lines += [line("ours", 0.9, "c"), line("random", None, "c")]
    told = summary(lines, ["ours", "random"])["60 s"]
    assert told["races"] == 1 and told["left_out"] == {"b 1": "no random", "c 1": "no random"}
    assert told["ours"]["mean_rank"] == 2 and told["ours"]["mean_test"] == 0.1
    # A race is full with the methods that are asked for.
    assert summary(lines, ["ours"])["60 s"]["races"] == 3
    assert summary(lines, ["ours", "optuna"])["60 s"]["races"] == 0


def test_a_model_after_the_budget_is_last() -> None:
    late, worse = line("ours", 0.9, model_s=60.1), line("random", 0.1)
    told = summary([late, worse], ["ours", "random"])["60 s"]
    assert (told["ours"]["mean_rank"], told["ours"]["late"]) == (2, 1)
    assert ranks([line("ours", 0.9, model_s=59.9), worse]) == [1, 2]


def test_the_interval_of_a_mean_rank_covers_and_narrows() -> None:
    few = [line(m, t, f"t{i}") for i in range(4) for m, t in [("ours", i % 2), ("random", 0.5)]]
    low, high = summary(few, ["ours", "random"])["60 s"]["ours"]["mean_rank_95"]
    assert low == 1 < 1.5 < 2 == high
    many = [line(m, t, f"t{i}") for i in range(100) for m, t in [("ours", i % 2), ("random", 0.5)]]
    low, high = summary(many, ["ours", "random"])["60 s"]["ours"]["mean_rank_95"]
    assert 1.35 < low < 1.45 and 1.55 < high < 1.65  # 1.96 x .05 from the mean
    assert interval(np.array([1.0]), 2) is None


def test_every_method_is_first_in_as_many_races() -> None:
    cells = equal_time.cells_of(["a", "b", "c"], [1, 2], ["x", "y", "z"], 60.0)
    races = [list(race) for _, race in itertools.groupby(cells, lambda c: (c.seed, c.task))]
    assert [race[0].method for race in races] == ["x", "y", "z"] * 2
    assert all({cell.method for cell in race} == {"x", "y", "z"} for race in races)


def test_ours_is_the_preset_that_users_are_told(tmp_path: Path) -> None:
    takes_s = PRESETS["budget_s"]
    for budget_s, preset in ((60, "fast"), (180, "fast"), (600, "good"), (1200, "good")):
        assert our_tune.default_of(budget_s) == {"preset": preset, "budget_s": budget_s}
        assert takes_s[preset] >= budget_s
    assert our_tune.default_of(9000)["preset"] == "best"
    # Docs say the same.
    assert "search.preset=good search.budget_s=600" in Path("docs/search.md").read_text()
    for method in ("ours", "first", "whole"):
        sections = our_tune.settings({"method": method, "budget_s": 600.0})
        job = validate(Job, {"table": {"uri": "x"}, **sections})
        assert job.search.budget_s == 600 and job.search.preset == "good"
        assert job.train.model_fields_set == set(), "a user sets nothing else"


def test_each_method_has_somebody_who_measures_it() -> None:
    assert set(equal_time.METHODS) - set(equal_time.OURS) == set(plain_tune.PEERS)


def test_the_curve_ends_with_the_budget() -> None:
    curve = our_tune.Curve("max", began=0.0, budget_s=1e12)
    for value in (0.5, 0.4, 0.7, 0.7):
        curve.note(value)
    assert [value for _, value in curve.told()["curve"]] == [0.5, 0.7] and curve.told()[
        "val"
    ] == 0.7
    over = our_tune.Curve("max", began=-1e12, budget_s=1.0)
    over.note(0.9)
    with pytest.raises(RaypipeError, match="No model was there within the budget"):
        over.told()


def test_a_try_without_tests_cannot_go_into_the_committed_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["equal_time", "--no-test", "--cells", "0"])
    with pytest.raises(SystemExit):
        equal_time.main()
    assert "Name another --ledger" in capsys.readouterr().err
    assert LEDGERS.parent.name == "results"
