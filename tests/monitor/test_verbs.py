"""Verbs with a sink of type azure_monitor: what they tell, and that it never fails them.

They train in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.monitor import streams
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig
from raypipe.search import telling
from raypipe.search.trials.standing import Standing
from raypipe.serve.online.tally import Tally
from raypipe.train.job import TrainJob
from raypipe.watch import events, sinks
from raypipe.watch.decide import Decision
from raypipe.watch.retrained import RetrainResult
from raypipe.work import told, verbs
from tests.conftest import Cli
from tests.ingestion_server import RULE, TOKEN, Answer, Running, running
from tests.watch.test_told import NEW, OLD, checked


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with running(tmp_path) as made:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.ca))
        monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
        yield made
        assert not made.service.wrong


def sink(server: Running, **more: Any) -> dict[str, Any]:
    given = {"type": "azure_monitor", "endpoint": server.endpoint, "rule": RULE}
    return given | {"token_env": "RAYPIPE_TEST_TOKEN", "within_s": 2} | more


@pytest.fixture
def config(photos: Path, tmp_path: Path, server: Running, cli: Cli) -> Path:
    file = tmp_path / "a.yaml"
    ingest = {"images": str(photos), "labels": str(photos / "labels.csv")}
    tree = {
        "table": {"uri": str(tmp_path / "table")},
        "run": {"name": "cells", "dir": str(tmp_path / "run")},
        "cluster": {"address": "none"},
        "ingest": {"from": ingest, "workers": 0, "splits": {"train": 0.6, "val": 0.4}},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {"epochs": 3, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
        "watch": {"sinks": [{"type": "log"}, sink(server)]},
    }
    file.write_text(json.dumps(tree))
    code, _, err = cli("ingest", file)
    assert code == 0, err
    return file


def test_a_training_tells_its_epochs(config: Path, server: Running, cli: Cli) -> None:
    code, _, err = cli("train", config)
    assert code == 0, err
    *epochs, last = server.service.of(streams.TRAINING)
    assert [r["Epoch"] for r in epochs] == [1, 2, 3] and {r["Kind"] for r in epochs} == {"epoch"}
    assert last["Kind"] == "finished" and last["MetricValue"] is not None
    assert len({r["RunId"] for r in server.service.of(streams.TRAINING)}) == 1
    assert {r["RunName"] for r in epochs} == {"cells"} and epochs[0]["Model"] == "small_cnn"
    assert epochs[0]["Metrics"]["train_loss"] == epochs[0]["TrainLoss"]
    # The run of the records is the training's key, which MLflow and its folder have, too.
    assert (config.parent / "run" / "train" / last["RunId"]).is_dir()


def test_a_training_goes_on(config: Path, server: Running, cli: Cli) -> None:
    said = "Monitoring Metrics Publisher"
    server.service.always = Answer(403)
    code, _, err = cli("train", config, "train.epochs=2")
    assert code == 0 and err.count(said) == 1, err
    assert err.count("Azure Monitor") <= 2
    server.service.always = None
    # Any other verb with these sinks delivers what is left, also one that fails.
    code, _, _ = cli("drift", config)
    assert code == 2
    kinds = [r["Kind"] for r in server.service.of(streams.TRAINING)]
    assert kinds == ["epoch", "epoch", "finished"]


def test_a_missing_package_is_named_before_the_work(
    config: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "azure.identity", None)
    code, _, err = cli("train", config)
    assert code == 2 and "pip install 'raypipe[azure]'" in err
    assert not (config.parent / "run" / "train").exists()


def test_one_sink_twice_is_refused_before_the_work(config: Path, server: Running, cli: Cli) -> None:
    tree = json.loads(config.read_text())
    tree["watch"]["sinks"] = [sink(server), sink(server, every_s=1)]
    config.write_text(json.dumps(tree))
    code, _, err = cli("train", config)
    assert code == 2 and "one endpoint and rule" in err
    assert not server.service.asked and not (config.parent / "run" / "train").exists()


def test_events_are_records(server: Running, tmp_path: Path) -> None:
    run = RunConfig(name="cells", dir=str(tmp_path))
    cfg = validate(AzureMonitorConfig, sink(server))
    monitor = Monitor(run, cfg, "retrain")
    tell = sinks.opened(run, [cfg], [monitor])
    name, happened = told.of_check(checked("2 checks"))
    won = RetrainResult(OLD, NEW, Decision(True, "better"), (), key="t")
    moved = told.of_retrain(name, won, NEW)
    tell.send(*happened, events.state(name, "started"), *moved, events.heartbeat(name, "retrain"))
    # After a kill the same night tells the same again: the ids are the same.
    tell.send(*happened)
    monitor.close()
    records = server.service.of(streams.DRIFT)
    kinds = ["missed", "check", "retrain", "decision", "promotion", "retrain", "heartbeat"]
    assert sorted(r["Kind"] for r in records) == sorted(kinds)
    assert {r["RunId"] for r in records} == {"abc"}
    (check,) = [r for r in records if r["Kind"] == "check"]
    assert check["Drifted"] is True and check["Model"] == "cells/1" and check["Images"] == 200
    assert check["PValue"] == 1e-4 and check["Facts"]["table"]
    assert datetime.fromisoformat(check["TimeGenerated"]).tzinfo is not None
    (decision,) = [r for r in records if r["Kind"] == "decision"]
    assert decision["Act"] is True and decision["Model"] == "cells/1"
    assert server.service.ids(streams.DRIFT)[check["RecordId"]] == 2


def test_reports_of_trials(server: Running, tmp_path: Path) -> None:
    run = RunConfig(name="cells", dir=str(tmp_path))
    monitor = Monitor(run, validate(AzureMonitorConfig, sink(server)), "tune")
    heard: list[int] = []
    job = validate(TrainJob, {"table": {"uri": "t"}, "train": {"epochs": 3}})
    listener = telling.standings([monitor], job, lambda done, total, now: heard.append(done))
    first = Standing("a", {"train.lr": 0.1}, float("nan"), 1, "running")
    listener(0, 2, [first])
    listener(0, 2, [first, Standing("b", {"train.lr": 0.2}, 0.5, 1, "running")])
    listener(1, 2, [Standing("a", {"train.lr": 0.1}, 0.7, 2, "stopped")])
    drawn = {"model.name": "small_cnn", "model.mode": "finetune", "train.epochs": 9}
    listener(1, 3, [Standing("c", drawn, 0.6, 4, "running")])
    head = {"model.mode": "frozen", "train.solver": "closed"}
    listener(1, 3, [Standing("first-answer-1", head, 0.6, 1, "fitted")])
    monitor.close()
    records = server.service.of(streams.TRAINING)
    *records, drew, fitted = records
    # A record is of the trial's own model; it named the job's, and epochs as 4 of 3.
    asked = ("Model", "Mode", "Epoch", "Epochs")
    assert [drew[name] for name in asked] == ["small_cnn", "finetune", 4, 9]
    assert [fitted[name] for name in asked] == [job.model.name, "frozen", 1, 1]
    assert [records[0][name] for name in asked] == [job.model.name, job.model.mode, 1, 3]
    assert [(r["Trial"], r["Epoch"]) for r in records] == [("a", 1), ("b", 1), ("a", 2)]
    assert records[0]["MetricValue"] is None and records[2]["Stopped"] == "stopped"
    assert heard == [0, 0, 1, 1, 1]


def test_requests_are_counted_by_model(server: Running, tmp_path: Path) -> None:
    run = RunConfig(name="cells", dir=str(tmp_path))
    monitor = Monitor(run, validate(AzureMonitorConfig, sink(server)), "serve")
    tally = Tally([monitor.keeping], "host:1", every_s=60)
    for number in range(5000):
        tally.answered("cells/1", 200)
        tally.predicted("cells/1", 0.001 * (1 + number % 100))
    tally.answered("cells/1", 503)
    tally.answered("cells/2", 422)
    tally.close()
    tally.close()
    monitor.close()
    first, second = server.service.of(streams.SERVING)
    assert (first["Requests"], first["Errors"], first["Images"]) == (5001, 1, 5000)
    assert first["Statuses"] == {"200": 5000, "503": 1}
    assert abs(first["LatencyMeanMs"] - 50.5) < 0.01 and first["LatencyMaxMs"] == 100
    assert 45 < first["LatencyP50Ms"] < 56 and 94 <= first["LatencyP99Ms"] <= 100
    assert (second["Model"], second["Refused"], second["Images"]) == ("cells/2", 1, 0)
    assert "LatencyMeanMs" not in second


def test_a_check_is_told_of_before_the_policy_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its alarm was lost if the policy's tables could not be read: the next check is of other
    images."""
    heard: list[str] = []

    class Sink:
        def send(self, *happened: events.Event) -> None:
            heard.extend(event.kind for event in happened)

    def away(*given: object) -> None:
        raise DataError("The table of retrains cannot be read")

    monkeypatch.setattr(verbs, "_check", lambda job, show: checked(""))
    monkeypatch.setattr(verbs, "_call", away)
    job: Any = None
    show: Any = None
    tell: Any = Sink()
    with pytest.raises(DataError, match="table of retrains"):
        verbs._drift(job, show, tell)
    assert heard == ["check"]
