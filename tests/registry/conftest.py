"""A package of a small model whose predictions vary, and a real MLflow store on SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.config import RunConfig
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import Package, Reference
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from tests.registry import stores
from tests.registry.stores import Address

CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")


@pytest.fixture(scope="module")
def model() -> ImageModel:
    torch.manual_seed(4)
    made = ImageModel(CFG, classes=3).eval()
    with torch.no_grad():
        seen = made.embed(
            torch.randint(0, 256, (1, 1, 1, 3)).expand(40, 32, 32, 3) * torch.rand(40, 1, 1, 1)
        )
        made.head.standardise_by(seen.mean(0), seen.std(0))
    torch.nn.init.normal_(made.head.linear.weight, std=0.3)
    return made


def small_package(model: ImageModel, folder: Path) -> Package:
    rng = np.random.default_rng(1)
    features, scores = rng.normal(size=(30, 64)), rng.dirichlet(np.ones(3), 30)
    reference = Reference(features, scores, tuple(f"image {i}" for i in range(30)))
    facts = {"table": {"uri": "/somewhere", "version": 3}, "metrics": {"val_accuracy": 0.9}}
    return Package(packing.build(folder, model, CFG, ("a", "b", "c"), reference, facts))


@pytest.fixture
def built(model: ImageModel, tmp_path: Path) -> Package:
    return small_package(model, tmp_path / "package")


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One database for the session: making its tables takes seconds. Tests use own model names."""
    return open_store(
        RunConfig(dir=str(tmp_path_factory.mktemp("mlflow"))), RegistryConfig(experiment="tests")
    )


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """One `mlflow server` for the session: its start takes ten seconds. Tests use own model
    names."""
    with stores.address("server", tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module", params=stores.ALL)
def address(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Address]:
    """A store of each kind."""
    if request.param == "server":
        yield request.getfixturevalue("mlflow_server")
        return
    with stores.address(request.param, tmp_path_factory.mktemp("mlflow")) as address:
        yield address
