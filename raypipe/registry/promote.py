"""Registered versions and the champion alias.

The alias is moved by compare-and-set, because MLflow lets the last writer win. A promotion names
the champion that the challenger was compared with, takes the store's lock and reads the alias
again. It refuses if somebody else has moved the alias meanwhile.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from filelock import FileLock

from raypipe.errors import DataError, RaypipeError, one_line
from raypipe.registry import mlflow_model
from raypipe.registry.package import Package
from raypipe.registry.tracking import KEY, Store

SEAL = "raypipe.manifest"  # tag of a registered version: sha256 of its package's manifest


@dataclass(frozen=True)
class ModelVersion:
    """A registered model version. Predictions and drift checks record its name and number."""

    name: str
    version: int
    uri: str
    tags: dict[str, str]

    @property
    def seal(self) -> str | None:
        """sha256 of the registered package's manifest; None if an older raypipe registered it."""
        return self.tags.get(SEAL)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


def _model_version(entity: Any) -> ModelVersion:
    """From MLflow's own record of a version."""
    return ModelVersion(entity.name, int(entity.version), str(entity.source), dict(entity.tags))


def find(store: Store, key: str) -> ModelVersion | None:
    """The first version that was registered with this key, or None.

    A version without a seal does not count: registering it again gives one that can be checked.
    """
    for version in versions(store):
        if version.tags.get(KEY) == key and version.seal:
            return version
    return None


def versions(store: Store) -> list[ModelVersion]:
    """Every registered version, oldest first."""
    entities = store.client.search_model_versions(f"name = '{store.model}'")
    return sorted((_model_version(entity) for entity in entities), key=lambda v: v.version)


def require_version(store: Store, number: int, fix: str) -> ModelVersion:
    """The version with this number. Raises DataError with this `fix` if there is none."""
    known = versions(store)
    for version in known:
        if version.version == number:
            return version
    numbers = ", ".join(str(version.version) for version in known)
    raise DataError(
        f"The model {store.model!r} has no version {number}",
        got=store.uri,
        rule=f"Versions: {numbers or 'none'}",
        fix=fix,
    )


def register(
    store: Store, run_id: str, package: Path, key: str, tags: dict[str, str]
) -> ModelVersion:
    """Store the package as an MLflow model and register it with its seal.

    A key is registered once: if it is there already, its version is returned.
    """
    import mlflow

    # log_model takes its address from the process, which may have opened another store since.
    mlflow.set_tracking_uri(store.address)
    mlflow.set_registry_uri(store.address)
    with FileLock(store.folder / "register.lock"):
        before = find(store, key)
        if before is not None:
            return before
        # Opening checks the files against their manifest before anything is uploaded.
        opened = Package(package)
        logged = mlflow_model.log(run_id, opened)
        _ensure_name(store)
        created = store.client.create_model_version(
            store.model,
            source=logged.model_uri,
            run_id=run_id,
            tags={KEY: key, SEAL: opened.seal} | tags,
            model_id=logged.model_id,
        )
        # The lock holds on hosts that share the folder. If a host that does not share it has
        # registered the same key meanwhile, the first version counts.
        first = find(store, key)
        if first is not None and first.version < int(created.version):
            store.client.delete_model_version(store.model, created.version)
            return first
        return _model_version(created)


def champion(store: Store) -> ModelVersion | None:
    """The version that the alias points at, or None before the first promotion."""
    from mlflow.exceptions import MlflowException

    try:
        entity = store.client.get_model_version_by_alias(store.model, store.alias)
    except MlflowException as e:
        # No model of this name, or no such alias.
        if e.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    return _model_version(entity)


def require_champion(store: Store) -> ModelVersion:
    """The champion. Raises DataError if there is none."""
    version = champion(store)
    if version is None:
        raise DataError(
            f"There is no {store.alias} of {store.model!r}",
            got=store.uri,
            fix="Train and register one first: raypipe tune CONFIG",
        )
    return version


def promote(store: Store, challenger: ModelVersion, expected: int | None) -> None:
    """Point the alias at `challenger`, if it still points at version `expected`.

    `expected` is None if there was no champion. Raises RaypipeError if the alias has moved.
    """
    with FileLock(store.folder / "promote.lock"):
        # Compare, under the lock, then set.
        now = champion(store)
        current = now.version if now else None
        # Done already, perhaps by an earlier run of this command that was killed afterwards.
        if current == challenger.version:
            return
        if current != expected:
            raise RaypipeError(
                f"The {store.alias} of {store.model!r} changed "
                f"while version {challenger.version} was being compared",
                got=f"version {current}",
                rule=f"It was compared with version {expected}",
                fix="Run raypipe retrain again",
            )
        store.client.set_registered_model_alias(store.model, store.alias, str(challenger.version))


def fetch(store: Store, version: ModelVersion) -> Package:
    """The package of a registered version, checked against the version's seal.

    What a remote store has is read from a temporary folder, which goes afterwards. Raises DataError
    for a package that is not the registered one, or that cannot be checked because the version has
    no seal.
    """
    address = store.client.get_model_version_download_uri(version.name, str(version.version))
    if urlparse(address).scheme in ("", "file"):
        return _package(_files(store, version, None), version)
    with tempfile.TemporaryDirectory(prefix="raypipe-") as temporary:
        package = _package(_files(store, version, temporary), version)
    package.folder = None  # all of its files are in memory
    return package


def _files(store: Store, version: ModelVersion, into: str | None) -> Path:
    """The folder of the version's MLflow model; a local one where it is, unless `into` is given."""
    import mlflow

    try:
        folder = mlflow.artifacts.download_artifacts(
            artifact_uri=version.uri, tracking_uri=store.address, dst_path=into
        )
    except (OSError, mlflow.MlflowException) as e:
        # MLflow keeps absolute addresses: a store whose folder was moved names the old place.
        raise DataError(
            f"The files of {version} are not where MLflow keeps them: {one_line(e)}",
            got=str(version.uri),
            rule="A run's folder that was moved cannot be read by MLflow",
            fix="Move run.dir back, or train with another run.dir",
        ) from e
    return Path(folder)


def _package(folder: Path, version: ModelVersion) -> Package:
    """The package among the files of an MLflow model. Raises DataError; see `fetch`."""
    package = folder / "artifacts" / "package"
    # MLflow keeps the name of the folder that was logged.
    if not package.exists():
        package = next(folder.glob("artifacts/*"), package)
    if version.seal is None:
        seal = Package(package).seal
        set_tag = (
            f"MlflowClient().set_model_version_tag({version.name!r}, '{version.version}', "
            f"'{SEAL}', '{seal}')"
        )
        raise DataError(
            f"The model version {version} has no seal, so its package cannot be checked",
            got=f"no tag {SEAL}: an earlier raypipe registered it",
            rule="raypipe loads a package only if its manifest has the sha256 "
            "that the registry keeps",
            fix="Train and register again; or, if you trust its files as they are, "
            f"give version {version.version} the tag: {set_tag}",
        )
    return Package(package, version.seal, str(version))


def _ensure_name(store: Store) -> None:
    """Create the registered model, unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(store.model)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
