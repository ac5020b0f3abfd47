"""How fast packages go to a store elsewhere: what is noted of it, and what is planned by that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.registry import mlflow_model, uploads, versions
from raypipe.registry.store import Store


class Page(list[Any]):
    """One of MLflow's, after which there is no other."""

    token = None


@pytest.mark.parametrize(
    ("location", "server", "place"),
    [
        ("/data/mlflow/artifacts/1", "", ""),
        ("file:///data/mlflow", "", ""),
        ("", "", ""),
        ("s3://bucket/a/b", "http://127.0.0.1:5000", "s3://bucket"),
        ("wasbs://box@account.blob.example/a", "", "wasbs://account.blob.example"),
        (
            "mlflow-artifacts:/7",
            "https://me:secret@mlflow.example:443",
            "mlflow-artifacts://mlflow.example",
        ),
        # It passes files on, but nothing says to where.
        ("mlflow-artifacts:/7", "http://localhost:5000", ""),
        ("dbfs:/databricks/mlflow-tracking/7", "databricks", "dbfs://"),
        ("s3://[bucket", "", ""),
    ],
)
def test_a_store_elsewhere_is_known_by_its_address(location: str, server: str, place: str) -> None:
    assert uploads.place_of(location, server) == place


def test_the_rate_of_the_last_upload_is_noted_by_its_place(tmp_path: Path) -> None:
    assert uploads.mb_per_s(tmp_path, "s3://a") is None
    uploads.note(tmp_path, "s3://a", 40.0, 20.0)
    uploads.note(tmp_path, "s3://b", 40.0, 4.0)
    uploads.note(tmp_path, "s3://a", 40.0, 10.0)
    # A few bytes say how fast a store answers, and a disk of this machine needs no note.
    uploads.note(tmp_path, "s3://a", 0.01, 10.0)
    uploads.note(tmp_path, "", 40.0, 10.0)
    assert (uploads.mb_per_s(tmp_path, "s3://a"), uploads.mb_per_s(tmp_path, "s3://b")) == (4, 10)
    assert set(json.loads((tmp_path / uploads.FILE).read_text())) == {"s3://a", "s3://b"}
    # By these an upload would take no time, or so long that no budget can be named.
    odd = (
        f'{{"s3://a": {rate}}}' for rate in ('"fast"', "Infinity", "NaN", "5e-324", "-1.0", "0.0")
    )
    for torn in ("", "{", "[]", *odd):
        (tmp_path / uploads.FILE).write_text(torn)
        assert uploads.mb_per_s(tmp_path, "s3://a") is None
    uploads.note(tmp_path, "s3://a", 1.0, 1e5)
    assert uploads.mb_per_s(tmp_path, "s3://a") == uploads.LEAST_RATE, "known, and no guess"
    # What cannot be noted ends nothing.
    uploads.note(tmp_path / "missing", "s3://a", 40.0, 10.0)


def test_a_registration_notes_how_fast_its_package_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, location = [0.0], ["s3://bucket/7"]

    def log(run_id: str, package: object) -> Any:
        now[0] += 8.0
        return SimpleNamespace(model_uri="models:/m", model_id="m")

    entity = SimpleNamespace(name="cells", version=1, source="", tags={}, status="READY")
    client: Any = SimpleNamespace(
        get_experiment=lambda number: SimpleNamespace(artifact_location=location[0]),
        create_registered_model=lambda name: None,
        create_model_version=lambda *given, **named: entity,
        search_model_versions=lambda query, page_token: Page(),
    )
    monkeypatch.setattr(mlflow_model, "log", log)
    monkeypatch.setattr(versions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(versions, "Package", lambda folder: SimpleNamespace(seal="seal"))
    package = tmp_path / "package"
    package.mkdir()
    (package / "weights.safetensors").write_bytes(bytes(4_000_000))

    def registered(folder: Path) -> float | None:
        folder.mkdir()
        address = f"sqlite:///{tmp_path}/mlflow.db"
        store = Store(client, address, "7", "cells", "champion", folder, address, address)
        versions.register(store, "run", package, "k", {})
        return uploads.mb_per_s(folder, "s3://bucket")

    assert registered(tmp_path / "far") == pytest.approx(0.5)
    location[0] = f"file://{tmp_path}"
    assert registered(tmp_path / "near") is None
    assert not (tmp_path / "near" / uploads.FILE).exists()
