"""Registered versions of a model: found by key or by number, and one more registered.

A key is registered once. Each version has a seal: the sha256 of its package's manifest, as a tag.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.errors import DataError
from raypipe.files import file_lock
from raypipe.registry import catalog, follow, mlflow_model, patience, uploads
from raypipe.registry.package import Package
from raypipe.registry.runs import KEY
from raypipe.registry.store import Store

SEAL = "raypipe.manifest"  # tag of a registered version: sha256 of its package's manifest
MOST_VERSIONS = 2**31 - 1  # a column of MLflow's
DECISION = "raypipe.decision"  # tag of a challenger: key of its comparison, and how it ended


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


def of_entity(entity: Any) -> ModelVersion:
    """From MLflow's own record of a version."""
    # What was decided later says nothing about the version itself.
    later = follow.APPLIED, follow.MOVED_AT, DECISION
    tags = catalog.read(entity.tags)
    tags = {k: v for k, v in tags.items() if not k.startswith(later)}
    return ModelVersion(entity.name, int(entity.version), str(entity.source), tags)


def find(store: Store, key: str) -> ModelVersion | None:
    """The first version that was registered with this key, or None.

    A version without a seal does not count: registering it again gives one that can be checked.
    """
    for entity in entities(store):
        version = of_entity(entity)
        if version.tags.get(KEY) == key and version.seal and _is_ready(entity):
            return version
    return None


def every(store: Store) -> list[ModelVersion]:
    """Every registered version whose files are there, oldest first."""
    return [of_entity(entity) for entity in entities(store) if _is_ready(entity)]


def entities(store: Store) -> Iterator[Any]:
    """MLflow's own records of all versions, oldest first."""
    from mlflow.exceptions import MlflowException

    numbers: dict[int, Any] = {}
    token = None
    while True:
        try:
            page = store.client.search_model_versions(f"name = '{store.model}'", page_token=token)
        except MlflowException as e:
            # Unity Catalog says so of a model that does not exist yet; others find nothing.
            if follow.says_not_there(e):
                return
            raise
        numbers |= {int(entity.version): entity for entity in page}
        token = page.token
        if not token:
            break
    for number in sorted(numbers):
        entity = numbers[number]
        # What Unity Catalog finds has no tags: each version is asked for, and may be gone by now.
        if store.is_catalog:
            entity = _entity(store, number)
        if entity is not None:
            yield entity


def _entity(store: Store, number: int) -> Any:
    """MLflow's own record of one version; None if there is none."""
    from mlflow.exceptions import MlflowException

    # SQLite and its driver end in an error of theirs.
    if not 0 < number <= MOST_VERSIONS:
        return None
    try:
        return store.client.get_model_version(store.model, str(number))
    except MlflowException as e:
        if follow.says_not_there(e):
            return None
        raise


def _is_ready(entity: Any) -> bool:
    """Are its files there? In Unity Catalog a version comes first; its writer may have died."""
    return entity.status == "READY"


def require(store: Store, number: int, fix: str) -> ModelVersion:
    """The version with this number. Raises DataError with this `fix` if there is none."""
    found = _entity(store, number)
    if found is not None and _is_ready(found):
        return of_entity(found)
    numbers = ", ".join(str(version.version) for version in every(store))
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
    mlflow.set_registry_uri(store.registry)
    with file_lock(store.folder / "register.lock"):
        before = find(store, key)
        if before is not None:
            return before
        # Opening checks the files against their manifest before anything is uploaded.
        opened = Package(package)
        mb, began = uploads.mb_of(package), time.monotonic()
        with patience.told(store.address, store.registry):
            logged = mlflow_model.log(run_id, opened)
        _ensure_name(store)
        marks = {KEY: key, SEAL: opened.seal} | tags
        created = store.client.create_model_version(
            store.model,
            source=logged.model_uri,
            run_id=run_id,
            tags=catalog.written(marks) if store.is_catalog else marks,
            model_id=logged.model_id,
        )
        # Unity Catalog has taken a copy of its own.
        took_s = time.monotonic() - began
        uploads.note(store.folder, uploads.place(store), mb, took_s)
        # The lock holds on hosts that share the folder. If a host that does not share it has
        # registered the same key meanwhile, the first version counts. In Unity Catalog that one may
        # become ready after this look: then both stay, and the first counts from then on.
        first = find(store, key)
        if first is not None and first.version < int(created.version):
            store.client.delete_model_version(store.model, created.version)
            return first
        return of_entity(created)


def tag_decision(store: Store, version: ModelVersion, decision: str, promoted: bool) -> None:
    """Note on a challenger how the comparison with the key `decision` ended."""
    said = f"{decision} {'promoted' if promoted else 'refused'}"
    tag = catalog.written({DECISION: said}) if store.is_catalog else {DECISION: said}
    for key, value in tag.items():
        store.client.set_model_version_tag(version.name, str(version.version), key, value)


def _ensure_name(store: Store) -> None:
    """Create the registered model, unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(store.model)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
