"""Versions whose files are right, and that were logged by nobody: quick to make, and to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlflow.models import Model

from raypipe.registry import catalog, mlflow_model, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store


def model(folder: Path, package: Package) -> Path:
    """The folder of an MLflow model with this package, as a version's source."""
    assert package.folder is not None
    shutil.copytree(package.folder, folder / "artifacts" / "package")
    # Unity Catalog takes no model without a signature.
    Model(signature=mlflow_model.signature()).save(folder / "MLmodel")
    return folder


def version(store: Store, source: object, seal: str, run_id: str | None = None) -> None:
    """The next version of the store's model, which exists. run_id: whose file the source is, where
    that is on a server."""
    tags = {versions.SEAL: seal}
    tags = catalog.written(tags) if store.is_catalog else tags
    store.client.create_model_version(store.model, str(source), run_id, tags=tags)
