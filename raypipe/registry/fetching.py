"""The package of a registered version: its files, from wherever MLflow keeps them, checked against
the version's seal."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from urllib.parse import urlparse

from raypipe.errors import DataError, one_line
from raypipe.registry import catalog, patience
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from raypipe.registry.versions import SEAL, ModelVersion


class Gone(DataError):
    """The files of a version are not where MLflow keeps them, or cannot be reached."""


class Away(Gone):
    """They are in another place than this machine: perhaps it cannot be reached for a while."""


def fetch(store: Store, version: ModelVersion) -> Package:
    """The package of a registered version, checked against the version's seal.

    What a remote store has is read from a temporary folder, which goes afterwards. Raises DataError
    for a package that is not the registered one, or that cannot be checked because the version has
    no seal.
    """
    # Unity Catalog has a copy of its own, elsewhere than the run's.
    address = "models:" if store.is_catalog else _download_uri(store, version)
    if urlparse(address).scheme in ("", "file"):
        return _package(_files(store, version, None), version, store.is_catalog)
    with tempfile.TemporaryDirectory(prefix="raypipe-") as temporary:
        package = _package(_files(store, version, temporary), version, store.is_catalog)
    package.folder = None  # all of its files are in memory
    return package


def _download_uri(store: Store, version: ModelVersion) -> str:
    return store.client.get_model_version_download_uri(version.name, str(version.version))


def _files(store: Store, version: ModelVersion, into: str | None) -> Path:
    """The folder of the version's MLflow model; a local one where it is, unless `into` is given."""
    import mlflow

    # MLflow looks for a version's logged model in its global store: another one may be open, too.
    mlflow.set_tracking_uri(store.address)
    # A version in Unity Catalog names the logged model that it was copied from, which may be gone.
    uri = f"models:/{version}" if store.is_catalog else version.uri
    try:
        with patience.told(store.address, store.registry):
            folder = mlflow.artifacts.download_artifacts(
                artifact_uri=uri,
                tracking_uri=store.address,
                registry_uri=store.registry,
                dst_path=into,
            )
    except MemoryError:
        raise
    except Exception as e:  # clients of S3, Azure and Google raise errors of their own
        # The disk that takes the files is full. MLflow tells of it in the text of another error.
        if os.strerror(errno.ENOSPC) in str(e):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), into) from e
        what = f"The files of {version} are not where MLflow keeps them: {one_line(e)}"
        # MLflow keeps absolute addresses: a store whose folder was moved names the old place.
        rule = "MLflow cannot read a folder of a run that was moved or deleted"
        fix = "Move run.dir back, or bring these files back from a backup; else use another version"
        if into is not None:
            rule = "They are in another place than this machine, which may be away for a while"
            fix = "Run the command again; if they were deleted there, delete this version in MLflow"
        kind = Gone if into is None else Away
        raise kind(what, got=str(version.uri), rule=rule, fix=fix) from e
    return Path(folder)


def _package(folder: Path, version: ModelVersion, is_catalog: bool) -> Package:
    """The package among the files of an MLflow model. Raises DataError; see `fetch`."""
    package = folder / "artifacts" / "package"
    # MLflow keeps the name of the folder that was logged.
    if not package.exists():
        package = next(folder.glob("artifacts/*"), package)
    if version.seal is None:
        seal = Package(package).seal
        tag = next(iter(catalog.written({SEAL: seal}))) if is_catalog else SEAL
        set_tag = (
            f"MlflowClient().set_model_version_tag({version.name!r}, '{version.version}', "
            f"'{tag}', '{seal}')"
        )
        raise DataError(
            f"The model version {version} has no seal, so its package cannot be checked",
            got=f"no tag {tag}: an earlier raypipe registered it",
            rule="raypipe loads a package only if its manifest has the sha256 "
            "that the registry keeps",
            fix="Train and register again; or, if you trust its files as they are, "
            f"give version {version.version} the tag: {set_tag}",
        )
    return Package(package, version.seal, str(version))
