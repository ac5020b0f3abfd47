"""The benchmarks measure what a search does by default, and call work what is work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import curve_tables, halving, thaw, trials
from raypipe.config import validate
from raypipe.job import Job
from raypipe.search.leaderboard import Trial
from raypipe.search.schedulers import tune_schedulers


def test_tables_of_curves_need_no_ray() -> None:
    """Ray reads its switches at import: trials.py sets them first, and its cluster was refused."""
    code = "import sys, benchmarks.search; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["asha", "pasha"])
def test_the_simulated_rule_is_the_one_that_a_search_runs_by_default(name: str) -> None:
    """Grace 1 needs a third fewer epochs on the same table than the 3 that a search has."""
    job = validate(
        Job,
        {"table": {"uri": "unused"}, "train": {"epochs": 27}, "search": {"scheduler": name}},
    )
    real, simulated = (
        tune_schedulers.scheduler(job.search, job.train, 128),
        halving.rules()[name](27, 128, "max"),
    )
    assert isinstance(real, tune_schedulers.HalvingScheduler) and simulated is not None
    assert vars(simulated) == vars(real.rule)


def test_a_search_of_more_trials_than_a_table_has_is_one_of_all() -> None:
    of = curve_tables.table("emoji", None)
    first, order = thaw.search_of(of, 3, len(of.values) + 9)
    assert order == list(range(len(of.values))) == list(range(len(first.values)))
    assert first.values == [of.values[i] for i in thaw.orders_of(of, 3)]


def test_work_is_training_steps_alone() -> None:
    """Four epochs of 10 steps of 20 ms are 0.8 s, whatever the trial spent on validation and
    checkpoints.
    """
    history = tuple({"step_s": 0.02} for _ in range(4))
    made = [Trial(f"t{i}", {}, 0.5, 4, False, history, "x", seconds=99.0) for i in range(3)]
    assert trials.steps_s(made, 10 * trials.BATCH) == pytest.approx(3 * 0.8)


@pytest.mark.parametrize("measured_s", [0.2, 0.5, 1.0, 2.0])
def test_a_trial_has_about_the_second_of_work_that_was_asked_for(measured_s: float) -> None:
    images = trials.images_for(1.0, measured_s)
    assert images % trials.BATCH == 0
    assert measured_s * images / trials.CALIBRATION == pytest.approx(1.0, abs=0.11)
