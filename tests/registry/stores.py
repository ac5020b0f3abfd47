"""Stores that promotions are tested on: SQLite, `mlflow server`, the double of Unity Catalog."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.registry import unity_catalog
from tests.registry.unity_catalog import Catalog
from tests.serve import servers

ALL = ["sqlite", "server", pytest.param("unity", marks=pytest.mark.slow)]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("server", "unity")]
# For what is about the table of moves, and not about what MLflow keeps.
sqlite_first = pytest.mark.parametrize("address", ["sqlite", *SLOW], indirect=True)
# For what two processes do at once: the slower store gives them more time for it.
server_first = pytest.mark.parametrize(
    "address",
    ["server", *(pytest.param(k, marks=pytest.mark.slow) for k in ("sqlite", "unity"))],
    indirect=True,
)


@dataclass(frozen=True)
class Address:
    """registry.uri and registry.registry_uri of a store, and how models are called there."""

    uri: str
    registry_uri: str | None = None
    before: str = ""  # a model's name: its catalog and schema
    catalog: Catalog | None = None

    @property
    def settings(self) -> dict[str, str | None]:
        return {"uri": self.uri, "registry_uri": self.registry_uri}


@contextmanager
def address(kind: str, folder: Path) -> Iterator[Address]:
    sqlite = f"sqlite:///{folder}/store.db"
    if kind == "sqlite":
        yield Address(sqlite)
    elif kind == "server":
        arguments = ("server", "--workers", "1", "--backend-store-uri", sqlite)
        # Without it they go into the current folder, which is the checkout.
        arguments += ("--artifacts-destination", str(folder / "artifacts"))
        with servers.mlflow(*arguments, ready="/health", log=folder / "log") as url:
            yield Address(url)
    else:
        # Runs are in SQLite: Unity Catalog has models alone.
        with (
            unity_catalog.serving(folder / "double") as double,
            patch.dict(os.environ, double.environment),
        ):
            yield Address(sqlite, "databricks-uc", "main.default.", double.catalog)
        assert double.catalog.unknown == [], "calls that Unity Catalog does not have"
