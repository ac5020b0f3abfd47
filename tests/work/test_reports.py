"""Where reports look for what they tell of."""

from __future__ import annotations

from pathlib import Path

from raypipe.config import validate
from raypipe.job import Job
from raypipe.registry.store import open_store
from raypipe.registry.versions import DECISION
from raypipe.tables.table import append
from raypipe.watch import decisions
from raypipe.watch.decide import Decision
from raypipe.work import find, promotions


def test_reports_read_the_table_of_moves_that_promotions_write(tmp_path: Path) -> None:
    """With a registry on a server it lies below artifacts.uri: `report timeline` read another one,
    in the run's folder, and told of no move at all."""
    job = validate(
        Job,
        {
            "run": {"name": "cells", "dir": str(tmp_path / "run")},
            "table": {"uri": str(tmp_path / "t")},
            "artifacts": {"uri": str(tmp_path / "shared")},
            "registry": {"registry_uri": "databricks-uc", "model": "main.default.cells"},
        },
    )
    open_store(job.run, job.registry)
    assert find.looked_at(job).moves == f"{tmp_path / 'shared'}/raypipe-moves"


def test_the_gate_of_another_registry_s_model_is_not_this_one_s(tmp_path: Path) -> None:
    """A store that was made again has versions of the same names, and the table of decisions beside
    it has verdicts on the old ones: `raypipe promote` told them as this version's."""
    given = {"run": {"name": "m", "dir": str(tmp_path / "run")}, "table": {"uri": "t"}}
    job = validate(Job, given)
    store = open_store(job.run, job.registry)
    store.client.create_registered_model("m")
    for _ in range(2):
        store.client.create_model_version("m", source="s3://none/model")
    parts = ("m/1", "m/2", "t@v1")
    row = decisions.as_row("d", parts, (), None, Decision(True, "better"))
    append(job.watch.place(job.run, "decisions"), row, "gate")
    assert promotions._gate(job, store, 1) == "not compared"
    assert "nothing in this registry names the comparison d" in promotions._gate(job, store, 2)
    store.client.set_model_version_tag("m", "2", DECISION, "d promoted")
    assert promotions._gate(job, store, 2) == "against m/1: better"
