"""A training on Azure: its package, card and log go to Blob storage (Azurite), its epochs to Azure
Monitor (a service of the documented protocol).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from raypipe.artifacts.bundle import MANIFEST
from raypipe.monitor import streams
from raypipe.tables.objects import Objects
from tests.conftest import Cli
from tests.ingestion_server import RULE, TOKEN, running

from .conftest import ACCOUNT, Store

pytestmark = pytest.mark.cloud


@pytest.mark.parametrize("scheme", ["az", "abfss"])
def test_a_training_leaves_everything_on_azure(
    azure: Store,
    cli: Cli,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
) -> None:
    uri = azure.uri("runs")
    if scheme == "abfss":
        uri = uri.replace("az://images", f"abfss://images@{ACCOUNT}.dfs.core.windows.net")
    with running(tmp_path) as made:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.ca))
        monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
        ingest = {"images": str(photos), "labels": str(photos / "labels.csv")}
        sink = {"type": "azure_monitor", "endpoint": made.endpoint, "rule": RULE}
        tree = {
            "table": {"uri": str(tmp_path / "table")},
            "run": {"name": "cells", "dir": str(tmp_path / "run")},
            "cluster": {"address": "none"},
            "ingest": {"from": ingest, "workers": 0, "splits": {"train": 0.6, "val": 0.4}},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": 1, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
            "artifacts": {"uri": uri, "storage_options": azure.options},
            "watch": {"sinks": [sink | {"token_env": "RAYPIPE_TEST_TOKEN"}]},
        }
        file = tmp_path / "a.yaml"
        file.write_text(json.dumps(tree))
        for verb in ("ingest", "train"):
            code, _, err = cli(verb, file)
            assert code == 0 and "Artifacts: " in err, err
        assert not made.service.wrong
        epoch, last = made.service.of(streams.TRAINING)
    assert epoch["Epoch"] == 1 and last["Kind"] == "finished"
    store = Objects(uri, azure.options)
    place = f"cells/train-{last['RunId']}"
    found = json.loads(store.read(f"{place}/{MANIFEST}") or b"{}")
    assert found["facts"]["status"] == "finished" and not found.get("missing")
    names = found["files"]
    assert any(name.startswith("package/") for name in names), sorted(names)
    assert any(name.startswith("logs/") for name in names)
    for name, entry in names.items():
        data = store.read(f"{place}/{name}")
        assert data is not None and hashlib.sha256(data).hexdigest() == entry["sha256"], name
        assert azure.secret.encode() not in data
