"""What the nodes did, in MLflow: under its own names, by node, and never at the run's cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest

from raypipe.cluster.node_reader import CPU, SECONDS, Size
from raypipe.cluster.usage import AT, Node, Nodes
from raypipe.config import RunConfig
from raypipe.registry import runs, system_metrics
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from tests.cluster.cut import Proxy
from tests.registry.stores import Address

RECEIVED = "network_receive_megabytes"


def nodes(*names: str, samples: int = 3) -> Nodes:
    found = {}
    for name in names:
        values = [
            {AT: 100.0 + i, SECONDS: 1.0, CPU: 10.0 * i, RECEIVED: 2.0} for i in range(samples)
        ]
        found[name] = Node(Size(2.0, "host", 1000.0, "host"), values)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield open_store(RunConfig(dir=str(tmp_path / "run")), RegistryConfig())


def test_one_node_has_mlflows_own_names(store: Store) -> None:
    with runs.run(store, "key", "train", {}, None) as run_id:
        system_metrics.log(store, run_id, nodes("host-7"))
    run = store.client.get_run(run_id)
    assert set(run.data.metrics) == {f"system/{CPU}", f"system/{RECEIVED}"}
    history = store.client.get_metric_history(run_id, f"system/{CPU}")
    assert [(m.value, m.timestamp, m.step) for m in history] == [
        (0.0, 100_000, 0),
        (10.0, 101_000, 1),
        (20.0, 102_000, 2),
    ]
    moved = store.client.get_metric_history(run_id, f"system/{RECEIVED}")
    assert [m.value for m in moved] == [2.0, 4.0, 6.0], "MLflow counts from the beginning"


def test_several_nodes_have_their_names_whatever_these_are(store: Store) -> None:
    odd = ["ip-10-0-0-1.ec2", "knöten/β 1", "..", "a" * 300, "a:b"]
    with runs.run(store, "key", "train", {}, None) as run_id:
        system_metrics.log(store, run_id, nodes(*odd))
    names = store.client.get_run(run_id).data.metrics
    found = {name.split("/")[1] for name in names}
    assert "ip-10-0-0-1.ec2" in found and len(found) == len(odd)
    assert all(name.startswith("system/") and name.count("/") == 2 for name in names)


def test_no_nodes_and_many_samples(store: Store) -> None:
    with runs.run(store, "key", "train", {}, None) as run_id:
        system_metrics.log(store, run_id, {})
        assert not store.client.get_run(run_id).data.metrics
        # More than one call to the REST API may take.
        system_metrics.log(store, run_id, nodes("a", samples=900))
    assert len(store.client.get_metric_history(run_id, f"system/{CPU}")) == 900


def test_a_server_that_dies_costs_these_metrics_and_one_warning(
    mlflow_server: Address,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    proxy = Proxy(urlparse(mlflow_server.uri).port or 0)
    run = RunConfig(dir=str(tmp_path / "run"))
    store = open_store(run, RegistryConfig(uri=f"http://127.0.0.1:{proxy.port}"))
    run_id = store.client.create_run(store.experiment_id).info.run_id
    proxy.cut()
    caplog.set_level(logging.WARNING, logger="raypipe")
    system_metrics.log(store, run_id, nodes("a", "b", samples=900))
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "raypipe"]
    assert "MLflow did not take what the nodes did" in warning and "usage.json" in warning
