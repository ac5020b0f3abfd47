"""Unity Catalog through MLflow's own client, against a double that speaks its calls over HTTPS."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import mlflow
import numpy as np
import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError, DataError
from raypipe.failures import explain
from raypipe.registry import catalog, fetching, promote, runs, store_check, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from tests import forked
from tests.registry import unity_catalog
from tests.registry.unity_catalog import Double
from tests.serve import servers

UNITY = {"registry_uri": "databricks-uc"}


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Double]:
    with (
        unity_catalog.serving(tmp_path_factory.mktemp("double")) as double,
        patch.dict(os.environ, double.environment),
    ):
        yield double
    assert double.catalog.unknown == []


@pytest.fixture
def store(double: Double, shared_store: Store, request: pytest.FixtureRequest) -> Store:
    """Runs in SQLite, models in Unity Catalog."""
    model = f"main.default.{request.node.originalname[:60]}"
    client = mlflow.MlflowClient(shared_store.address, "databricks-uc")
    return dataclasses.replace(shared_store, client=client, registry="databricks-uc", model=model)


def register(store: Store, built: Package, key: str, **tags: str) -> versions.ModelVersion:
    with runs.run(store, key, "train", {}, None) as run_id:
        pass
    return versions.register(store, run_id, built.folder, key, tags)


def test_a_package_goes_there_and_back(
    store: Store, built: Package, double: Double, textured: Callable[..., bytes]
) -> None:
    tags = {"raypipe.table": "/cells@v3", "raypipe.prepared_from": "/raw@v1", "own": " x"}
    made = register(store, built, "k", **tags, **{"raypipe.metrics": "1" * 1001})
    assert made == versions.find(store, "k") == versions.require(store, 1, "")
    assert (made.tags["raypipe.table"], made.tags["raypipe.prepared_from"]) == (
        "/cells@v3",
        "/raw@v1",
    )
    assert made.seal == built.seal
    assert not {"raypipe.metrics", "own"} & set(made.tags), "what is too long is not cut"
    kept = double.catalog.versions[store.model][1]["tags"]
    assert set(kept) == {f"raypipe__{n}" for n in ("key", "manifest", "table", "prepared_from")}

    assert promote.champion(store) is None
    promote.promote(store, made, None)
    assert promote.require_champion(store) == made
    assert kept["raypipe__move__champion"] == "1"
    images = [textured(seed, 40) for seed in range(3)]
    fetched = fetching.fetch(store, made)
    np.testing.assert_array_equal(
        fetched.predict(images).scores_NC, built.predict(images).scores_NC
    )


def test_a_package_that_was_swapped_is_refused(
    store: Store, built: Package, double: Double
) -> None:
    made = register(store, built, "sealed")
    files = double.catalog.files
    folder = double.catalog.folder({"name": store.model, "version": 1})
    weights = next(p for p in files if p.startswith(folder) and p.endswith("weights.safetensors"))
    manifest = weights.replace("weights.safetensors", "manifest.json")
    files[weights] = files[weights][:-4] + b"\0\0\x80?"
    listed = json.loads(files[manifest]) | {
        "weights.safetensors": sha256(files[weights]).hexdigest()
    }
    files[manifest] = json.dumps(listed).encode()
    with pytest.raises(DataError, match=r"not the one that was registered as main\.default"):
        fetching.fetch(store, made)
    for path in [path for path in files if path.startswith(folder)]:
        del files[path]
    with pytest.raises(DataError):
        fetching.fetch(store, made)


def test_a_version_whose_writer_died_is_none(store: Store, built: Package, double: Double) -> None:
    """Unity Catalog has a version before its files, with the tags of a package that is none."""
    given = {"model": store.model, "package": str(built.folder), "sql": store.address}
    code = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "import mlflow\n"
        "from mlflow.store.artifact.presigned_url_artifact_repo import *\n"
        "from raypipe.config import RunConfig\n"
        "from raypipe.registry import runs, versions\n"
        "from raypipe.registry.store import open_store\n"
        "from raypipe.registry.tracking import RegistryConfig\n"
        "PresignedUrlArtifactRepository._upload_to_cloud = (\n"
        "    lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))\n"
        "given = json.loads(sys.argv[1])\n"
        "cfg = RegistryConfig(uri=given['sql'], registry_uri='databricks-uc',\n"
        "    model=given['model'], experiment='tests')\n"
        "store = open_store(RunConfig(dir=sys.argv[2]), cfg)\n"
        "with runs.run(store, 'dies', 'train', {}, None) as run_id: pass\n"
        "versions.register(store, run_id, Path(given['package']), 'dies', {})\n"
    )
    died = forked.run(code, json.dumps(given), built.folder.parent / "other")
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    [left] = double.catalog.versions[store.model].values()
    assert left["status"] == "PENDING_REGISTRATION" and left["tags"]["raypipe__key"] == "dies"

    assert versions.find(store, "dies") is None and versions.every(store) == []
    with pytest.raises(DataError, match="has no version 1"):
        versions.require(store, 1, "")
    again = register(store, built, "dies")
    assert again.version == 2 and versions.find(store, "dies") == again
    assert fetching.fetch(store, again).seal == built.seal


def test_all_versions_are_found_page_by_page(
    store: Store, built: Package, double: Double, tmp_path: Path
) -> None:
    assert versions.every(store) == [] and versions.find(store, "k0") is None
    made = register(store, built, "k0")
    kept = double.catalog.versions[store.model]
    for number in range(2, 8):
        kept[number] = kept[1] | {"version": number, "tags": {"raypipe__key": "k1"}}
    kept[5]["tags"] = {"raypipe__key": "k5", "raypipe__manifest": "s"}
    assert [v.version for v in versions.every(store)] == [1, 2, 3, 4, 5, 6, 7]
    found = versions.find(store, "k5")
    assert found is not None and found.version == 5 and versions.find(store, "k0") == made


@pytest.mark.parametrize(
    ("registry", "says"),
    [
        ({"model": "m"}, r"has three names.*registry\.model=main\.default\.m"),
        ({"model": "main.default"}, "has three names"),
        ({"model": "main.default.a.b"}, "has three names"),
        ({"model": "main..m"}, "has three names"),
        ({"model": "main.default.a b"}, "refuses this name"),
        ({"model": "`main`.`default`.`M`"}, r"without backticks.*registry\.model=main\.default\.m"),
        ({"model": "main.default.a\u200b"}, r"without backticks.*registry\.model=main\.default\.a"),
        ({"model": "main.default." + "x" * 256}, "refuses this name"),
        ({"model": "main.default.Solar"}, r"lower case.*registry\.model=main\.default\.solar"),
        ({"alias": "Champion"}, "alias cannot be kept"),
        ({"alias": "the-best"}, "alias cannot be kept"),
        ({"alias": "a__b"}, "alias cannot be kept"),
        ({"uri": "databricks-uc"}, r"keeps models, not runs.*registry\.uri=databricks "),
        ({"registry_uri": "databricks"}, r"no aliases.*registry_uri=databricks-uc"),
        ({"registry_uri": "databricks://p"}, r"no aliases.*registry_uri=databricks-uc://p"),
        ({"registry_uri": "env:NOT_SET"}, r"NOT_SET is not set.*registry\.registry_uri=env"),
        ({"uri": "databricks"}, r"path in the workspace.*experiment=/Shared/raypipe"),
        ({"uri": "databricks", "experiment": "/x"}, r"path in the workspace.*/Shared/x"),
        ({"uri": "databricks://p", "experiment": "/Shared/"}, "path in the workspace"),
    ],
)
def test_what_unity_catalog_refuses_is_refused_before_a_training(
    registry: dict[str, str], says: str, tmp_path: Path
) -> None:
    cfg = validate(RegistryConfig, UNITY | {"model": "main.default.m"} | registry)
    with pytest.raises(ConfigError, match=says):
        open_store(RunConfig(dir=str(tmp_path)), cfg)
    assert not list(tmp_path.rglob("*.db"))


def test_the_double_refuses_what_ours_did_before(store: Store, double: Double) -> None:
    """The words are Databricks' own, from a report of somebody who met them."""
    store.client.create_registered_model(store.model)
    with pytest.raises(mlflow.MlflowException, match=r"raypipe\.key contains .* reserved char"):
        store.client.set_registered_model_tag(store.model, "raypipe.key", "k")
    for filter in (f"name='{store.model}' and tags.a='b'", "run_id = 'x'", ""):
        with pytest.raises(mlflow.MlflowException, match="Unsupported filter"):
            store.client.search_model_versions(filter)
    with pytest.raises(mlflow.MlflowException, match="all three levels"):
        store.client.create_registered_model("m")
    with pytest.raises(mlflow.MlflowException, match="does not exist"):
        store.client.create_registered_model("main.nowhere.m")
    with pytest.raises(mlflow.MlflowException, match="unsupported"):
        store.client.transition_model_version_stage(store.model, "1", "Production")


def test_addresses_and_profiles() -> None:
    assert catalog.default_registry("databricks") == "databricks-uc"
    assert catalog.default_registry("databricks://p") == "databricks-uc://p"
    assert catalog.default_registry("http://databricks") == "http://databricks"
    tags = {"raypipe.key": "1", "raypipe.move.a_b": "2", "mine__x": "3"}
    assert catalog.read(catalog.written(tags)) == tags


def test_doctor_finds_it_well(double: Double, tmp_path: Path) -> None:
    """MLflow refuses a catalog as a store of runs, and doctor called each one silent."""
    for uri in ("databricks-uc", "databricks-uc://double"):
        found = store_check.examine(uri, str(tmp_path), "registry.registry_uri")
        assert found["kind"] == "server"


@pytest.mark.parametrize(
    ("of", "uri", "says"),
    [
        ("registry.uri", "databricks-uc", r"keeps models, not runs.*Set registry\.uri=databricks "),
        ("registry.uri", "databricks-uc://double", r"keeps models, not runs.*databricks-uc://doub"),
        ("registry.registry_uri", "databricks", r"own model registry has no aliases"),
    ],
)
def test_doctor_refuses_the_addresses_that_every_verb_refuses(
    of: str, uri: str, says: str, tmp_path: Path
) -> None:
    """It asked another server for runs, and said that this one answers."""
    with pytest.raises(ConfigError, match=says):
        store_check.examine(uri, str(tmp_path), of)


def test_a_profile_and_a_token_that_is_not_known(
    double: Double, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """databricks-uc://PROFILE reads its own host and token."""
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-not-known-012345")
    with pytest.raises(mlflow.MlflowException, match="token is not known"):
        store.client.create_registered_model(store.model)
    # A token that expires while a verb runs: it says so, and never that there is no champion.
    with pytest.raises(mlflow.MlflowException) as raised:
        promote.require_champion(store)
    code, text = explain(raised.value)
    assert code == 1 and "does not know who asks" in text and "mistake" not in text
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    profile = mlflow.MlflowClient(store.address, "databricks-uc://double")
    profile.create_registered_model(store.model)
    assert store.model in double.catalog.models


@pytest.mark.slow
def test_runs_in_a_workspace_and_models_in_its_catalog(
    built: Package, tmp_path: Path, textured: Callable[..., bytes]
) -> None:
    """MLflow's clients of runs and of models; a real `mlflow server` behind the double."""
    arguments = ("server", "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/s.db")
    arguments += ("--default-artifact-root", unity_catalog.ROOT, "--no-serve-artifacts")
    with (
        servers.mlflow(*arguments, ready="/health", log=tmp_path / "log") as server,
        unity_catalog.serving(tmp_path / "double", server) as double,
        patch.dict(os.environ, double.environment),
    ):
        cfg = RegistryConfig(
            uri="databricks", experiment="/Shared/solar", model="main.default.solar"
        )
        store = open_store(RunConfig(dir=str(tmp_path / "run")), cfg)
        assert store.registry == "databricks-uc" and not store.is_shared
        made = register(store, built, "k")
        assert runs.finished_run(store, "k") and versions.find(store, "k") == made
        promote.promote(store, made, None)
        champion = promote.require_champion(store)
        images = [textured(seed, 40) for seed in range(3)]
        assert (
            fetching.fetch(store, champion).predict(images).labels == built.predict(images).labels
        )
        experiment = store.client.get_experiment_by_name("/Shared/solar")
        assert experiment is not None and experiment.artifact_location.startswith("dbfs:/")
        assert double.catalog.unknown == []
