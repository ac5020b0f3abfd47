"""Runs in a real MLflow on SQLite: a key has one run, whoever is killed or comes at once."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import mlflow
import pytest

from raypipe.config import validate
from raypipe.registry import runs
from raypipe.registry.store import Store
from raypipe.tables.table import TableVersion
from raypipe.train import publish
from raypipe.train.job import TrainJob, TrainResult

VERSION = TableVersion("/data/cells", 17)


@pytest.fixture
def store(shared_store: Store, request: pytest.FixtureRequest) -> Store:
    return dataclasses.replace(shared_store, model=f"model of {request.node.name[:40]}")


def runs_with(store: Store, key: str) -> list[mlflow.entities.Run]:
    return store.client.search_runs([store.experiment_id], f"tags.`{runs.KEY}` = '{key}'")


def test_a_run_keeps_config_metrics_dataset_and_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_COMMIT", "c0ffee")
    params = {"train": {"lr": 0.1, "stopping": {"patience": None}}, "long": "x" * 7000}
    with runs.run(store, "one", "train", params, VERSION) as run_id:
        runs.log_history(
            store,
            run_id,
            [{"val_loss": 0.5, "val_accuracy": 0.7}, {"val_loss": 0.4, "val_accuracy": 0.8}],
        )
        runs.log_text(store, run_id, "hello", "note.txt")
    found = store.client.get_run(run_id)
    assert (
        found.info.status == "FINISHED" and found.data.tags["mlflow.source.git.commit"] == "c0ffee"
    )
    assert (
        found.data.params["train.lr"] == "0.1"
        and found.data.params["train.stopping.patience"] == "None"
    )
    assert [m.value for m in store.client.get_metric_history(run_id, "val_accuracy")] == [0.7, 0.8]
    dataset = found.inputs.dataset_inputs[0].dataset
    assert dataset.source_type == "delta_table" and dataset.name == "cells"
    assert '"/data/cells"' in dataset.source and "17" in dataset.source
    assert "note.txt" in [f.path for f in store.client.list_artifacts(run_id)]


def test_one_key_is_one_run_even_after_a_failure(store: Store) -> None:
    assert runs.finished_run(store, "twice") is None
    with (
        pytest.raises(KeyboardInterrupt, match="power cut"),
        runs.run(store, "twice", "train", {}, None),
    ):
        raise KeyboardInterrupt("power cut")
    assert [r.info.status for r in runs_with(store, "twice")] == ["FAILED"]
    assert runs.finished_run(store, "twice") is None
    with runs.run(store, "twice", "train", {}, None) as run_id:
        runs.log_metrics(store, run_id, {"gain": 1.5})
    assert (
        [r.info.run_id for r in runs_with(store, "twice")]
        == [run_id]
        == [runs.finished_run(store, "twice")]
    )


def test_a_rivals_running_run_is_left_alone(store: Store) -> None:
    """One from another folder may be alive; one from ours, whose lock we hold, is not."""
    tags = {runs.KEY: "rival", "raypipe.owner": "elsewhere:/runs"}
    rival = store.client.create_run(store.experiment_id, tags=tags).info.run_id
    with runs.run(store, "rival", "train", {}, None) as dead:
        pass
    store.client.update_run(dead, status="RUNNING")  # as after a kill
    with runs.run(store, "rival", "train", {}, None) as run_id:
        pass
    assert {r.info.run_id: r.info.status for r in runs_with(store, "rival")} == {
        rival: "RUNNING",
        run_id: "FINISHED",
    }


def test_of_two_that_log_at_once_the_second_waits_and_finds(store: Store) -> None:
    start, filled, found = threading.Barrier(2), [], []

    def log_in() -> None:
        start.wait()
        found.append(runs.once(store, "both", "drift", {"lr": 1}, None, filled.append))

    both = [threading.Thread(target=log_in) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert len(filled) == 1 and found == filled * 2
    assert [r.info.run_id for r in runs_with(store, "both")] == filled


def test_a_trials_run_lies_below_its_search(store: Store) -> None:
    with (
        runs.run(store, "parent", "search", {}, None) as parent,
        runs.run(store, "parent/0", "trial", {}, None, parent=parent) as child,
    ):
        pass
    assert store.client.get_run(child).data.tags["mlflow.parentRunId"] == parent


def test_metrics_of_no_epoch_are_one_request(store: Store) -> None:
    """Each cost of a trial was a request of its own, and a search has hundreds of trials."""
    asked: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store.client, name)

    counted = dataclasses.replace(store, client=Counted())  # type: ignore[arg-type]
    with runs.run(store, "costs", "trial", {}, None) as run_id:
        runs.log_metrics(counted, run_id, {"cost.seconds": 2.0, "cost.usd": 0.5})
        runs.log_metrics(counted, run_id, {})
    assert asked == ["log_batch"]
    kept = store.client.get_run(run_id).data.metrics
    assert kept == {"cost.seconds": 2.0, "cost.usd": 0.5}


def test_metrics_and_parameters_keep_apart_names_that_users_chose(store: Store) -> None:
    """A slice `line+1` made every retrain end after its decision and before its promotion."""
    slices = ["line+1", "line 1", "line_1", "Werk 2 (Süd)", "a#b", "a/b", "../x", "a:b", "x" * 300]
    with runs.run(store, "odd", "gate", {"mix": dict.fromkeys(slices, 1)}, None) as run_id:
        runs.log_metrics(store, run_id, {f"gate.{name}": 1.0 for name in slices})
        runs.log_history(store, run_id, [dict.fromkeys(slices, 2.0)])
    kept = store.client.get_run(run_id).data
    assert len(kept.metrics) == 2 * len(slices) and len(kept.params) == len(slices)
    assert kept.metrics["gate.line_1"] == 1.0 and "gate.line_1-" in " ".join(kept.metrics)


def test_the_values_of_a_run_are_those_of_the_epoch_that_is_registered(store: Store) -> None:
    """MLflow lists a run with the last value of each metric. The best epoch was earlier, so a run
    of val_accuracy 0.68 had a model of 0.70."""
    epochs = [{"val_accuracy": value} for value in (0.6, 0.7, 0.68)]
    found = TrainResult("best", VERSION, ("a", "b"), epochs[1], tuple(epochs), 0, "/w", 0.0)
    job = validate(TrainJob, {"table": {"uri": VERSION.uri}})
    run_id = publish._log(store, job, found, "train", {}, [], {})
    assert store.client.get_run(run_id).data.metrics == {"val_accuracy": 0.7}
    logged = store.client.get_metric_history(run_id, "val_accuracy")
    assert [m.value for m in logged] == [0.6, 0.7, 0.68, 0.7]
