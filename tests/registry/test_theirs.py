"""What somebody does with MLflow in the same process, as in a notebook, stays theirs."""

from __future__ import annotations

from dataclasses import replace

import mlflow
import pytest
from mlflow.tracking import fluent

from raypipe.registry import runs, theirs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MLflow's state for the process is given back after the test."""
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")


@pytest.mark.usefixtures("notebook")
def test_an_active_run_and_its_experiment_are_no_obstacle(
    shared_store: Store, built: Package
) -> None:
    """Both ended a training in a traceback when its model was registered."""
    store = replace(shared_store, model="beside a notebook")
    mlflow.set_tracking_uri(store.address)
    own = mlflow.set_experiment("somebody's own")
    with mlflow.start_run() as active:
        with runs.run(store, "beside", "train", {}, None) as run_id:
            pass
        made = versions.register(store, run_id, built.folder, "beside", {})
        assert mlflow.active_run().info.run_id == active.info.run_id
        mlflow.log_metric("theirs", 1.0)
    assert store.client.get_run(active.info.run_id).data.metrics == {"theirs": 1.0}
    assert fluent._active_experiment_id == own.experiment_id != store.experiment_id
    # The model is in our experiment, and our run has ended.
    logged = store.client.get_logged_model(made.uri.rpartition("/")[2])
    assert (logged.experiment_id, logged.source_run_id) == (store.experiment_id, run_id)
    assert store.client.get_run(run_id).info.status == "FINISHED"


def test_a_store_that_was_set_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    for name in (theirs.TRACKING, theirs.REGISTRY):
        monkeypatch.setenv(name, "")
    try:
        for own in ("sqlite:///own.db", None):
            mlflow.set_tracking_uri(own)  # type: ignore[arg-type]
            mlflow.set_registry_uri(None)  # type: ignore[arg-type]
            monkeypatch.delenv(theirs.REGISTRY, raising=False)
            expected = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
            with pytest.raises(ZeroDivisionError), theirs.addresses_kept():
                mlflow.set_tracking_uri("sqlite:///ours.db")
                mlflow.set_registry_uri("sqlite:///ours.db")
                raise ZeroDivisionError
            assert (mlflow.get_tracking_uri(), mlflow.get_registry_uri()) == expected
            assert "ours.db" not in "".join(expected)
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
