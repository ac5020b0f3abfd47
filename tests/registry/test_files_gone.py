"""Files of a version that cannot be had: the message says why, and what to do about that."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from azure.core.exceptions import ServiceRequestError
from botocore.exceptions import NoCredentialsError

from raypipe.registry import fetching, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion


@pytest.fixture
def made(shared_store: Store, built: Package) -> tuple[Store, ModelVersion]:
    store = replace(shared_store, model="files that are gone")
    with runs.run(store, "gone", "train", {}, None) as run_id:
        pass
    return store, versions.register(store, run_id, built.folder, "gone", {})


def test_a_full_disk_for_a_copy_is_no_folder_that_was_moved(
    made: tuple[Store, ModelVersion], small_disk: Path
) -> None:
    with pytest.raises(OSError, match="No space"), (small_disk / "full").open("wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()
    with pytest.raises(OSError, match="No space") as raised:
        fetching._files(*made, str(small_disk))
    assert raised.value.errno == errno.ENOSPC


def test_a_store_that_is_away_is_no_folder_that_was_moved(
    made: tuple[Store, ModelVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store, version = made
    away = replace(version, uri="http://127.0.0.1:9/api/2.0/mlflow-artifacts/artifacts/a")
    with pytest.raises(fetching.Gone, match=r"may be away for a while\. Run the command again"):
        fetching._files(store, away, str(tmp_path))
    # Of a folder of this machine it is said as before.
    moved = replace(version, uri=(tmp_path / "old place").as_uri())
    with pytest.raises(fetching.Gone, match=r"was moved or deleted.*Move run\.dir back"):
        fetching._files(store, moved, None)


@pytest.mark.parametrize("error", [NoCredentialsError(), ServiceRequestError("away")])
def test_a_client_of_a_bucket_that_fails_says_that_it_is_away(
    error: Exception,
    made: tuple[Store, ModelVersion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are no OSError: a rollback without credentials was "a mistake of raypipe's"."""

    def fails(**given: object) -> None:
        raise error

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", fails)
    with pytest.raises(fetching.Away, match="Run the command again"):
        fetching._files(*made, str(tmp_path))
