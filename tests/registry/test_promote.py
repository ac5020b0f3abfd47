"""Only a challenger that won is promoted, and what is served is what was registered.

What a promotion does is shown on SQLite, on `mlflow server` and on the double of Unity Catalog.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

import raypipe
from raypipe.config import RunConfig
from raypipe.errors import DataError, RaypipeError
from raypipe.registry import fetching, promote, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.tables.table import TableVersion
from tests.registry.stores import Address

VERSION = TableVersion("/data/cells", 17)


@pytest.fixture
def store(shared_store: Store, request: pytest.FixtureRequest) -> Store:
    return dataclasses.replace(shared_store, model=f"model of {request.node.name[:40]}")


@pytest.fixture
def promoting(address: Address, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """A store of each kind, for what a promotion does."""
    model = f"{address.before}{request.node.originalname[:40].lower()}"
    cfg = RegistryConfig(**address.settings, model=model)
    return open_store(RunConfig(dir=str(tmp_path / "run")), cfg)


def register(store: Store, built: Package, key: str) -> ModelVersion:
    with runs.run(store, key, "train", {}, VERSION) as run_id:
        pass
    return versions.register(store, run_id, built.folder, key, {"raypipe.table": str(VERSION)})


def test_a_registered_package_is_served_by_mlflow_and_holds_no_pickle(
    promoting: Store, built: Package, textured: Callable[..., bytes], tmp_path: Path
) -> None:
    store = promoting
    made = register(store, built, "served")
    again = versions.register(store, "no such run", built.folder, "served", {})
    assert again == made == versions.find(store, "served") and versions.every(store) == [made]
    assert (made.version, made.tags["raypipe.table"], str(made)) == (
        1,
        "/data/cells@v17",
        f"{store.model}/1",
    )

    images = [textured(seed, 40) for seed in range(5)]
    kept = tmp_path / "kept"
    kept.mkdir()
    served = mlflow.pyfunc.load_model(f"models:/{store.model}/1", dst_path=str(kept))
    said = served.predict(pd.DataFrame({"image": images}))
    mine = built.predict(images)
    assert said["label"].tolist() == mine.labels
    # The code in the model hides no raypipe that is installed.
    installed = PathFinder.find_spec("raypipe")
    assert installed is not None and installed.origin == raypipe.__file__
    assert any(path.endswith("raypipe.zip") for path in sys.path)
    np.testing.assert_allclose(np.stack(said["scores"]), mine.scores_NC, atol=1e-5)
    np.testing.assert_allclose(said["score"], mine.scores_NC.max(1), atol=1e-5)
    assert [c.name for c in served.metadata.signature.inputs] == ["image"]

    fetched = fetching.fetch(store, made)
    assert fetched.classes == built.classes and fetched.predict(images).labels == mine.labels
    files = [p for p in kept.rglob("*") if p.is_file()]
    assert any(p.name == "weights.safetensors" for p in files)
    assert len(files) < 20, "a server takes them one by one"
    assert not [p for p in files if p.suffix in (".pkl", ".pickle", ".pt", ".pth", ".bin")]
    requirements = next(p for p in files if p.name == "requirements.txt").read_text()
    assert "torch==" in requirements and "ray" not in requirements.replace("raypipe", "")


def test_a_registered_version_whose_package_was_swapped_is_refused(
    store: Store, built: Package
) -> None:
    made = register(store, built, "sealed")
    assert made.seal == built.seal == fetching.fetch(store, made).seal
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
        fetching.fetch(store, made)


def test_a_version_without_a_seal_is_refused_with_the_way_out(
    promoting: Store, built: Package
) -> None:
    store = promoting
    made = register(store, built, "unsealed")
    tag = "raypipe__manifest" if store.is_catalog else versions.SEAL
    store.client.delete_model_version_tag(store.model, "1", tag)
    bare = versions.every(store)[0]
    assert (
        versions.find(store, "unsealed") is None
    )  # so that who registers again gets a version with a seal
    with pytest.raises(
        DataError, match=rf"{store.model}/1 has no seal.*set_model_version_tag.*{built.seal}"
    ) as refused:
        fetching.fetch(store, bare)
    client = store.client
    exec(
        str(refused.value.fix).partition("the tag: ")[2].replace("MlflowClient()", "client"),
        {"client": client},
    )
    assert fetching.fetch(store, versions.every(store)[0]).seal == made.seal


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


def test_other_aliases_are_other_champions(promoting: Store, built: Package) -> None:
    store = promoting
    made = register(store, built, store.model)
    blue = dataclasses.replace(store, alias="blue")
    promote.promote(blue, made, expected=None)
    assert promote.champion(store) is None and promote.champion(blue) == made
