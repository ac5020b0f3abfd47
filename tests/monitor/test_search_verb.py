"""A search and its refit with a sink of type azure_monitor, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.monitor import streams
from tests.conftest import Cli
from tests.ingestion_server import RULE, TOKEN, running


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_trials_and_the_refit_tell_what_joins_them(
    photos: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as server:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.ca))
        monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
        sink = {"type": "azure_monitor", "endpoint": server.endpoint, "rule": RULE}
        sink |= {"token_env": "RAYPIPE_TEST_TOKEN"}
        splits = {"train": 0.5, "val": 0.3, "test": 0.2}
        labelled = {"images": str(photos), "labels": str(photos / "labels.csv")}
        tree = {
            "table": {"uri": str(tmp_path / "table")},
            "run": {"name": "cells", "dir": str(tmp_path / "run")},
            "ingest": {"from": labelled, "workers": 0, "splits": splits},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": 2, "batch_size": 16, "precision": "fp32"},
            "search": {"samples": 2, "refit": {"train.epochs": 3}},
            "watch": {"sinks": [sink]},
        }
        file = tmp_path / "a.yaml"
        file.write_text(json.dumps(tree))
        code, _, err = cli("ingest", file)
        assert code == 0, err
        code, _, err = cli("tune", file)
        assert code == 0, err
        told = server.service.of(streams.TRAINING)
        assert not server.service.wrong
    trials = [r for r in told if r["Kind"] == "trial"]
    epochs = [r for r in told if r["Kind"] == "epoch"]
    (last,) = [r for r in told if r["Kind"] == "finished"]
    assert len({r["Trial"] for r in trials}) == 2 and all(r["MetricValue"] for r in trials)
    assert [r["Epoch"] for r in epochs] == [1, 2, 3]
    # The refit is one training, and its folder has its name.
    assert {r["RunId"] for r in epochs} == {last["RunId"]}
    assert (tmp_path / "run" / "train" / last["RunId"]).is_dir()
    # One call of a verb is one process.
    assert len({r["Process"] for r in told}) == 1 and len({r["RunId"] for r in trials}) == 1
