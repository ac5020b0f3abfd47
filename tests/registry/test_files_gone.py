"""Files of a version that cannot be had: the message says why, and what to do about that."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

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
