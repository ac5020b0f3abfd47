"""Real MLflow on SQLite: a key has one run, and only a challenger that won is promoted.

What a promotion does is shown on `mlflow server` and on the double of Unity Catalog, too.
"""

# Starts no Ray cluster.

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import RegistryConfig, Store
from raypipe.tables.table import TableVersion
from tests.registry import stores
from tests.registry.stores import Address

VERSION = TableVersion("/data/cells", 17)


@pytest.fixture
def store(shared_store: Store, request: pytest.FixtureRequest) -> Store:
    return dataclasses.replace(shared_store, model=f"model of {request.node.name[:40]}")


@pytest.fixture(scope="module", params=stores.ALL)
def address(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Address]:
    with stores.address(request.param, tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@pytest.fixture
def promoting(address: Address, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """A store of each kind, for what a promotion does."""
    model = f"{address.before}{request.node.originalname[:40].lower()}"
    cfg = RegistryConfig(**address.settings, model=model)
    return tracking.open_store(RunConfig(dir=str(tmp_path / "run")), cfg)


def runs_with(store: Store, key: str) -> list[mlflow.entities.Run]:
    return store.client.search_runs([store.experiment_id], f"tags.`{tracking.KEY}` = '{key}'")


def test_a_run_keeps_config_metrics_dataset_and_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_COMMIT", "c0ffee")
    params = {"train": {"lr": 0.1, "stopping": {"patience": None}}, "long": "x" * 7000}
    with tracking.run(store, "one", "train", params, VERSION) as run_id:
        tracking.log_history(
            store,
            run_id,
            [{"val_loss": 0.5, "val_accuracy": 0.7}, {"val_loss": 0.4, "val_accuracy": 0.8}],
        )
        tracking.log_text(store, run_id, "hello", "note.txt")
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
    assert tracking.finished_run(store, "twice") is None
    with (
        pytest.raises(KeyboardInterrupt, match="power cut"),
        tracking.run(store, "twice", "train", {}, None),
    ):
        raise KeyboardInterrupt("power cut")
    assert [r.info.status for r in runs_with(store, "twice")] == ["FAILED"]
    assert tracking.finished_run(store, "twice") is None
    with tracking.run(store, "twice", "train", {}, None) as run_id:
        tracking.log_metrics(store, run_id, {"gain": 1.5})
    assert (
        [r.info.run_id for r in runs_with(store, "twice")]
        == [run_id]
        == [tracking.finished_run(store, "twice")]
    )


def test_a_rivals_running_run_is_left_alone(store: Store) -> None:
    """One from another folder may be alive; one from ours, whose lock we hold, is not."""
    tags = {tracking.KEY: "rival", "raypipe.owner": "elsewhere:/runs"}
    rival = store.client.create_run(store.experiment_id, tags=tags).info.run_id
    with tracking.run(store, "rival", "train", {}, None) as dead:
        pass
    store.client.update_run(dead, status="RUNNING")  # as after a kill
    with tracking.run(store, "rival", "train", {}, None) as run_id:
        pass
    assert {r.info.run_id: r.info.status for r in runs_with(store, "rival")} == {
        rival: "RUNNING",
        run_id: "FINISHED",
    }


def test_of_two_that_log_at_once_the_second_waits_and_finds(store: Store) -> None:
    start, filled, found = threading.Barrier(2), [], []

    def log_in() -> None:
        start.wait()
        found.append(tracking.once(store, "both", "drift", {"lr": 1}, None, filled.append))

    both = [threading.Thread(target=log_in) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert len(filled) == 1 and found == filled * 2
    assert [r.info.run_id for r in runs_with(store, "both")] == filled


def test_a_trials_run_lies_below_its_search(store: Store) -> None:
    with (
        tracking.run(store, "parent", "search", {}, None) as parent,
        tracking.run(store, "parent/0", "trial", {}, None, parent=parent) as child,
    ):
        pass
    assert store.client.get_run(child).data.tags["mlflow.parentRunId"] == parent


def test_a_store_that_cannot_be_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        ConfigError, match=r"MLflow store cannot be opened.*got 'sqlite:///.*Check registry\.uri"
    ):
        tracking.open_store(
            RunConfig(dir=str(tmp_path)), RegistryConfig(uri=f"sqlite:///{tmp_path}/file/mlflow.db")
        )


def register(store: Store, built: Package, key: str) -> ModelVersion:
    with tracking.run(store, key, "train", {}, VERSION) as run_id:
        pass
    return promote.register(store, run_id, built.folder, key, {"raypipe.table": str(VERSION)})


def test_a_registered_package_is_served_by_mlflow_and_holds_no_pickle(
    promoting: Store, built: Package, textured: Callable[..., bytes]
) -> None:
    store = promoting
    made = register(store, built, "served")
    again = promote.register(store, "no such run", built.folder, "served", {})
    assert again == made == promote.find(store, "served") and promote.versions(store) == [made]
    assert (made.version, made.tags["raypipe.table"], str(made)) == (
        1,
        "/data/cells@v17",
        f"{store.model}/1",
    )

    images = [textured(seed, 40) for seed in range(5)]
    served = mlflow.pyfunc.load_model(f"models:/{store.model}/1")
    said = served.predict(pd.DataFrame({"image": images}))
    mine = built.predict(images)
    assert said["label"].tolist() == mine.labels
    np.testing.assert_allclose(np.stack(said["scores"]), mine.scores_NC, atol=1e-5)
    np.testing.assert_allclose(said["score"], mine.scores_NC.max(1), atol=1e-5)
    assert [c.name for c in served.metadata.signature.inputs] == ["image"]

    fetched = promote.fetch(store, made)
    assert fetched.classes == built.classes and fetched.predict(images).labels == mine.labels
    kept = Path(mlflow.artifacts.download_artifacts(f"models:/{store.model}/1"))
    files = [p for p in kept.rglob("*") if p.is_file()]
    assert any(p.name == "weights.safetensors" for p in files)
    assert not [p for p in files if p.suffix in (".pkl", ".pickle", ".pt", ".pth", ".bin")]
    requirements = next(p for p in files if p.name == "requirements.txt").read_text()
    assert "torch==" in requirements and "ray" not in requirements.replace("raypipe", "")


def test_a_registered_version_whose_package_was_swapped_is_refused(
    store: Store, built: Package
) -> None:
    made = register(store, built, "sealed")
    assert made.seal == built.seal == promote.fetch(store, made).seal
    kept = Path(
        mlflow.artifacts.download_artifacts(artifact_uri=made.uri, tracking_uri=store.address)
    )
    weights = kept / "artifacts" / "package" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80?")  # one weight is 1.0 now
    manifest = weights.with_name("manifest.json")
    manifest.write_text(
        json.dumps(
            json.loads(manifest.read_text())
            | {weights.name: sha256(weights.read_bytes()).hexdigest()}
        )
    )
    Package(weights.parent)  # attests itself
    with pytest.raises(
        DataError,
        match=rf"not the one that was registered as {store.model}/1.*nothing altered is loaded",
    ):
        promote.fetch(store, made)


@pytest.mark.usefixtures("little_code")
def test_a_version_without_a_seal_is_refused_with_the_way_out(
    promoting: Store, built: Package
) -> None:
    store = promoting
    made = register(store, built, "unsealed")
    tag = "raypipe__manifest" if store.is_catalog else promote.SEAL
    store.client.delete_model_version_tag(store.model, "1", tag)
    bare = promote.versions(store)[0]
    assert (
        promote.find(store, "unsealed") is None
    )  # so that who registers again gets a version with a seal
    with pytest.raises(
        DataError, match=rf"{store.model}/1 has no seal.*set_model_version_tag.*{built.seal}"
    ) as refused:
        promote.fetch(store, bare)
    client = store.client
    exec(
        str(refused.value.fix).partition("the tag: ")[2].replace("MlflowClient()", "client"),
        {"client": client},
    )
    assert promote.fetch(store, promote.versions(store)[0]).seal == made.seal


@pytest.mark.usefixtures("little_code")
def test_the_alias_moves_only_from_where_the_comparison_saw_it(
    promoting: Store, built: Package
) -> None:
    store = promoting
    assert promote.champion(store) is None
    with pytest.raises(DataError, match=r"There is no champion of '.*raypipe tune CONFIG"):
        promote.require_champion(store)
    first, second, third = (register(store, built, f"{store.model}-{n}") for n in range(3))
    promote.promote(store, first, expected=None)
    assert promote.require_champion(store) == first
    promote.promote(store, second, expected=1)
    promote.promote(store, second, expected=1)  # carried out twice, once too many
    assert promote.require_champion(store).version == 2
    with pytest.raises(
        RaypipeError,
        match=r"changed while version 3.*got 'version 2'.*compared with version 1.*retrain again",
    ):
        promote.promote(store, third, expected=1)
    with pytest.raises(RaypipeError, match=r"changed while version 3.*compared with version None"):
        promote.promote(store, third, expected=None)
    assert promote.require_champion(store).version == 2


@pytest.mark.usefixtures("little_code")
def test_other_aliases_are_other_champions(promoting: Store, built: Package) -> None:
    store = promoting
    made = register(store, built, store.model)
    blue = dataclasses.replace(store, alias="blue")
    promote.promote(blue, made, expected=None)
    assert promote.champion(store) is None and promote.champion(blue) == made


@pytest.mark.parametrize(
    ("run", "registry", "says"),
    [
        ({"dir": "runs/a?b"}, {}, r"SQLite store cannot be in this folder .got .run.dir=.*a.b"),
        ({"dir": "runs/a%41b"}, {}, "SQLite store cannot be in this folder"),
        ({"name": "o'neil"}, {}, "cannot register a model under this name .got .o'neil"),
        ({"name": "a/b"}, {}, "cannot register a model under this name"),
        ({}, {"model": "a:b"}, "cannot register a model under this name"),
        ({}, {"alias": "latest"}, "cannot give a version this alias"),
        ({}, {"alias": "v1"}, "cannot give a version this alias"),
        ({}, {"alias": "the best"}, "cannot give a version this alias"),
    ],
)
def test_names_that_mlflow_refuses_are_refused_before_a_training(
    run: dict[str, str], registry: dict[str, str], says: str, tmp_path: Path
) -> None:
    named = RunConfig.model_validate(run | {"dir": str(tmp_path / run.get("dir", "run"))})
    with pytest.raises(ConfigError, match=says):
        tracking.open_store(named, RegistryConfig.model_validate(registry))
    assert not any(tmp_path.rglob("*.db"))


def test_metrics_and_parameters_keep_apart_names_that_users_chose(store: Store) -> None:
    """A slice `line+1` made every retrain end after its decision and before its promotion."""
    slices = ["line+1", "line 1", "line_1", "Werk 2 (Süd)", "a#b", "a/b", "../x", "a:b", "x" * 300]
    with tracking.run(store, "odd", "gate", {"mix": dict.fromkeys(slices, 1)}, None) as run_id:
        tracking.log_metrics(store, run_id, {f"gate.{name}": 1.0 for name in slices})
        tracking.log_history(store, run_id, [dict.fromkeys(slices, 2.0)])
    kept = store.client.get_run(run_id).data
    assert len(kept.metrics) == 2 * len(slices) and len(kept.params) == len(slices)
    assert kept.metrics["gate.line_1"] == 1.0 and "gate.line_1-" in " ".join(kept.metrics)
