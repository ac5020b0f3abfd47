"""Searches that are killed at random moments, by tests/chaos/kill_search.py.

The long run is a command: `python -m tests.chaos.kill_search --kills 50 --json`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe.search.settings import SearchConfig
from tests.chaos import kill_search

pytestmark = pytest.mark.chaos


def told(home: Path, *words: str) -> dict[str, Any]:
    """Run the command in a process of its own; it starts its clusters itself."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.chaos.kill_search", "--home", str(home), "--json"]
    command += ["--ledger", str(home / "ledger.jsonl")]
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
        timeout=900,
        check=False,
    )
    assert done.stdout, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.share
def test_a_killed_search_is_as_if_nobody_had_killed_it(tmp_path: Path) -> None:
    found = told(tmp_path, "--kills", "3", "--cases", "bohb", "--ways", "driver")
    assert found["kills"] == 3 and found["with_problems"] == [] == found["processes_left"]


@pytest.mark.parametrize("way", ["driver", "machine"])
def test_kills_of_every_kind_of_search_change_nothing(way: str, tmp_path: Path) -> None:
    found = told(tmp_path, "--kills", "15", "--ways", way)
    assert found["kills"] >= 15 and found["with_problems"] == [] == found["processes_left"]
    assert found["kills_by_case"].keys() == kill_search.CASES.keys()
    assert min(found["kills_by_case"].values()) >= 1


@pytest.mark.share
def test_each_case_is_killed_though_others_have_had_all_the_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first search of `b` ends before it is killed."""
    asked: list[tuple[str, int, int]] = []

    def killed(case: str, home: Path, alone: bool, seed: int, most: int, env: object) -> Any:
        asked.append((case, seed, most))
        return {"case": case, "way": "driver", "seed": seed, "kills": 0 if seed == 1 else most}

    monkeypatch.setattr(kill_search, "killed", killed)
    for _ in range(2):
        # The second time the ledger has all.
        kill_search._fill(tmp_path, tmp_path / "l.jsonl", ["a", "b"], "driver", 4, math.inf, {})
    assert asked == [("a", 0, 3), ("b", 1, 1), ("a", 2, 1), ("b", 3, 1)]


def test_a_trial_that_is_lost_or_trained_twice_is_seen(tmp_path: Path) -> None:
    """The negative control of the checks."""
    trials = [
        {"name": f"trial-{i}", "changes": {}, "metric": 0.1 * i, "epochs": 2} for i in range(3)
    ]
    whole = kill_search.Undisturbed(1.0, trials, {f"trial-{i}": 6 for i in range(3)}, {})

    def seen(trials: list[dict[str, Any]], steps: dict[str, int], kills: int = 1) -> list[str]:
        return kill_search.compared(whole, trials, steps, [], kills)

    assert seen(trials, whole.steps) == []
    assert seen(trials, {**whole.steps, "trial-1": 8}) == [], "a part of one epoch"
    assert any("9 steps" in said for said in seen(trials, {**whole.steps, "trial-1": 9}))
    assert any("5 steps" in said for said in seen(trials, {**whole.steps, "trial-1": 5}))
    assert any("undisturbed" in said for said in seen(trials[:2], whole.steps))
    assert any("twice" in said for said in seen([*trials, trials[0]], whole.steps))
    assert any("order" in said for said in seen(trials[::-1], whole.steps))
    assert any("7 steps" in said for said in seen(trials, {**whole.steps, "trial-1": 7}, 0))


@pytest.mark.share
def test_all_kinds_of_search_are_killed() -> None:
    """Of the schedulers and searchers there are, all but those with a reason."""
    not_killed = {
        "pasha": "the rule of asha, with another cap",
        "hyperband": "Tune's own, of which no state is saved",
        "median": "Tune's own, of which no state is saved",
        "none": "it keeps no state",
        "gp": "optuna_search.py restores it as it does tpe",
    }

    def of(setting: str, default: str) -> set[str]:
        changes = kill_search.CASES.values()
        killed = {case.get(f"search.{setting}", default) for case in changes}
        every = set(SearchConfig.model_fields[setting].annotation.__args__)
        assert every - not_killed.keys() <= killed <= every
        return every

    assert not_killed.keys() <= of("scheduler", "asha") | of("searcher", "random")
    assert set(kill_search.BY_CLOCK) <= kill_search.CASES.keys()
