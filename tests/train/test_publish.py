"""What a publication may leave out when its time is over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config import RunConfig, validate
from raypipe.registry import runs
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableVersion
from raypipe.train import publish
from raypipe.train.job import TrainJob, TrainResult


@pytest.mark.usefixtures("heard")
def test_no_further_trial_gets_a_run_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four trials of ten seconds each, and the time is over after fifteen."""
    now, real = [100.0], runs.log_metrics

    def slow(*given: Any) -> None:
        now[0] += 10
        real(*given)

    monkeypatch.setattr(publish, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(runs, "log_metrics", slow)
    store = open_store(RunConfig(dir=str(tmp_path)), RegistryConfig())
    model = {"name": "small_cnn", "mode": "finetune", "pretrained": False}
    job = validate(TrainJob, {"table": {"uri": "-"}, "model": model})
    history = ({"val_loss": 1.0},)
    version = TableVersion("/data/cells", 1)
    result = TrainResult("k", version, ("a", "b"), history[0], history, 0, "", 0.0)
    names = [f"trial-{number}" for number in range(4)]
    children = [(name, {"train.lr": 0.1}, history, {"cost.seconds": 1.0}) for name in names]

    run_id = publish._log(store, job, result, "search", {}, children, {}, until=115.0)
    below = f"tags.`mlflow.parentRunId` = '{run_id}'"
    logged = store.client.search_runs([store.experiment_id], below)
    assert sorted(one.info.run_name for one in logged) == names[:2], "the best ones"
    assert {one.info.status for one in logged} == {"FINISHED"}
    assert runs.finished_run(store, "k") == run_id
    assert "2 of 4 trials have no run of their own in MLflow" in caplog.text
