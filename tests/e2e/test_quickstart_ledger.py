"""The benchmark of the quickstart: no seed is run twice, none is lost, and the pooled figures are
what they say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.quickstart import done, paired, pooled, run_all, summary


def line(seed: int, won: int = 6, lost: int = 3, **other: Any) -> dict[str, Any]:
    """A seed with 100 mono test cells, every other one a cell of its neighbour too."""
    tested = [f"{seed * 50 + i:012x}" for i in range(100)]
    slices = {"mono": {"challenger": 0.9}, "poly": {"challenger": 0.85}}
    facts: dict[str, Any] = {
        "seed": seed,
        "promoted": True,
        "decision": "Promoted",
        "slices": slices,
        "seconds": 300.0,
    }
    facts["alarms"] = {"control": False, "poly": True}
    return facts | {"mono": {"tested": tested, "won": tested[:won], "lost": tested[-lost:]}} | other


def test_a_seed_of_the_same_commit_is_not_run_again_and_one_that_failed_is(tmp_path: Path) -> None:
    ledger, ran = tmp_path / "deep" / "ledger.jsonl", list[int]()

    def once(seed: int) -> dict[str, Any]:
        ran.append(seed)
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        failed = {"error": "exit code 1"} if seed == 2 and ran.count(2) == 1 else {}
        return line(seed) | {"folder": str(folder)} | failed

    first = run_all([1, 2, 1], ledger, "a", once)
    assert ran == [1, 2] and "error" in first[1]
    assert not (tmp_path / "seed-1").exists() and (tmp_path / "seed-2").exists(), (
        "what failed is kept to be looked at"
    )
    with ledger.open("a") as file:
        file.write('{"seed": 3, "commit": "a", "sec')  # killed while it wrote
    told = run_all([1, 2, 3], ledger, "a", once)
    assert ran == [1, 2, 2, 3] and [t["seed"] for t in told] == [1, 2, 3]
    assert sorted(done(ledger, "a")) == [1, 2, 3] and not done(ledger, "b")
    run_all([3], ledger, "b", once)
    assert ran[-1] == 3 and sorted(done(ledger, "b")) == [3], (
        "another commit is another measurement"
    )
    assert all(json.loads(text) for text in ledger.read_text().splitlines() if text.endswith("}"))


def test_the_same_cells_in_every_seed_make_no_narrower_interval_than_in_one() -> None:
    once = line(1)["mono"]
    one, (low, high), _ = pooled([once])
    ten, (low_of_ten, high_of_ten), by_seeds = pooled([once] * 10)
    assert one == ten == pytest.approx(0.03)
    assert (low_of_ten, high_of_ten) == pytest.approx((low, high))
    assert by_seeds == pytest.approx((0.03, 0.03)), (
        "seeds that are all alike say nothing of cells: the wider interval counts"
    )
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.09 - 0.03**2) / 10, rel=0.01)


def test_other_cells_in_every_seed_narrow_it() -> None:
    seeds = [line(2 * n)["mono"] for n in range(10)]
    _, (low, high), _ = pooled(seeds)
    _, (low_of_one, high_of_one), _ = pooled(seeds[:1])
    assert (high_of_one - low_of_one) / (high - low) == pytest.approx(np.sqrt(10), rel=0.02)


def test_the_targets_are_met_only_by_seeds_that_meet_them() -> None:
    good = [line(n) for n in range(10)]
    assert all(summary(good)["met"].values())
    bad = summary(
        [
            *good[2:],
            line(10, won=1, lost=9, promoted=False),
            line(11, promoted=False, seconds=500.0),
        ]
    )
    assert not bad["met"]["promoted"] and not bad["met"]["seconds"] and bad["promoted"] == 8
    assert summary([{"seed": 1, "error": "x"}]) == {"seeds": [], "failed": [1]}
    assert summary([line(1)])["met"]["mono"] is False, "one seed says nothing of seeds"


def test_the_ledger_tells_on_which_cells_the_two_models_differ(tmp_path: Path) -> None:
    rows = {
        "id": ["a" * 64, "b" * 64, "c" * 64, "d" * 64],
        "group": ["mono", "mono", "mono", "poly"],
    }
    hits = {"model_0": [True, False, True, False], "model_1": [False, True, True, True]}
    pq.write_table(pa.table(rows | hits), tmp_path / "judged.parquet")
    found = paired(tmp_path / "judged.parquet", "mono")
    assert found == {"tested": [x * 12 for x in "abc"], "won": ["b" * 12], "lost": ["a" * 12]}
