"""A real search within a budget, from the command to the registered model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.config import save, validate
from raypipe.job import Job

from ..conftest import Cli
from .test_refit import cells
from .test_tuner import Searches

__all__ = ["cells"]
BUDGET = {
    "search.preset": "good",
    "search.budget_s": 25,
    "search.space": {"train.lr": "loguniform(1e-4, 1e-2)"},
    "search.refit": {"train.epochs": 40},
    "registry.severity_images": 20,
}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_trials_refit_and_registration_share_a_budget_and_a_rerun_reads_them(
    cells: object, searches: Searches, cli: Cli, tmp_path: Path
) -> None:
    table = {"table.uri": cells.uri}  # type: ignore[attr-defined]
    asked = searches(tmp_path, **BUDGET, **table, **{"search.samples": 1000})
    where = save(validate(Job, asked.model_dump()), tmp_path / "job.yaml")
    code, out, err = cli("tune", str(where), "--json")
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    phases = told["budget"]["phases"]
    assert "the budget of 25 s" in err and told["trials"] < 1000
    assert {"start", "reading", "trials", "ending"} <= set(phases)
    assert phases["trials"]["planned_s"] < 25 and "images/s trained" in phases["trials"]["evidence"]
    assert told["test"]["test_accuracy"] >= 0 and told["model"]
    if told["refitted"]:
        assert phases["refit"]["planned_s"] < 25 and "epochs of" in phases["refit"]["evidence"]
    else:  # on a host that is too busy for it, the best trial stays
        assert any(note.startswith("No refit") for note in told["budget"]["notes"])

    code, out, err = cli("tune", str(where), "--json")
    again = json.loads(out.splitlines()[-1])
    assert code == 0 and again["trials"] == told["trials"]
    # Time counts anew: a refit that did not fit before may fit now.
    assert again["model"] == told["model"] or again["refitted"] > told["refitted"]
