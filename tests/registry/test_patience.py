"""A registry that is offline: one line after some seconds, a bounded wait, one message."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.registry import patience
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig


@pytest.fixture(params=["refuses", "is silent"])
def offline(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that refuses connections, or takes them and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            taken.listen(50)
        yield f"http://user:sesame@127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(patience.RETRIES, raising=False)
    monkeypatch.delenv(patience.TIMEOUT_S, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.3)
    monkeypatch.setattr(patience, "OPENING", {patience.RETRIES: "2", patience.TIMEOUT_S: "1"})


def waits(log: pytest.LogCaptureFixture) -> list[str]:
    return [said for said in log.messages if "Waiting for MLflow" in said]


@pytest.mark.usefixtures("hurried")
def test_an_offline_registry_is_said_and_ends(
    offline: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the environment may hold an address with a password.
    monkeypatch.setenv("OUR_MLFLOW", offline)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "raypipe"),
        pytest.raises(
            ConfigError, match=r"MLflow's server at 127\.0\.0\.1:\d+ does not answer"
        ) as raised,
    ):
        open_store(RunConfig(dir=str(tmp_path)), RegistryConfig(uri="env:OUR_MLFLOW"))
    assert time.monotonic() - began < 20
    assert len(waits(caplog)) == 1 and "127.0.0.1:" in waits(caplog)[0], caplog.messages
    said = str(raised.value)
    assert "sesame" not in said + caplog.text
    assert "registry.uri" in said and patience.RETRIES in said
    assert patience.RETRIES not in os.environ and patience.TIMEOUT_S not in os.environ


def test_what_the_user_has_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.RETRIES, "6")
    monkeypatch.delenv(patience.TIMEOUT_S, raising=False)
    with patience.opening():
        assert os.environ[patience.RETRIES] == "6"
        assert os.environ[patience.TIMEOUT_S] == patience.OPENING[patience.TIMEOUT_S]
    assert os.environ[patience.RETRIES] == "6" and patience.TIMEOUT_S not in os.environ


@pytest.mark.parametrize("offline", ["refuses"], indirect=True)
@pytest.mark.usefixtures("hurried")
def test_a_server_that_goes_away_later_is_said_too(
    offline: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv(patience.RETRIES, "2")
    monkeypatch.setenv(patience.TIMEOUT_S, "1")
    client = patience.Told(MlflowClient(offline, offline), offline, offline)
    with (
        caplog.at_level(logging.WARNING, "raypipe"),
        pytest.raises(Exception, match="failed with"),
    ):
        client.search_registered_models()
    assert len(waits(caplog)) == 1, caplog.messages


@pytest.mark.parametrize("offline", ["refuses"], indirect=True)
@pytest.mark.usefixtures("hurried")
def test_a_registry_apart_from_the_runs_is_asked_as_shortly(
    offline: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_MODELS", offline)
    cfg = RegistryConfig(registry_uri="env:OUR_MODELS")
    store = open_store(RunConfig(dir=str(tmp_path)), cfg)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "raypipe"), pytest.raises(Exception, match="failed with"):
        store.client.search_registered_models()
    assert time.monotonic() - began < 20
    [said] = waits(caplog)
    assert "127.0.0.1:" in said and "sesame" not in said
    assert store.client.search_runs([store.experiment_id]) == [] and len(waits(caplog)) == 1


def test_a_store_that_answers_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.0)
    store = open_store(RunConfig(dir=str(tmp_path)), RegistryConfig())
    assert store.client.search_registered_models() == []
    assert waits(caplog) == []


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("sqlite:////somewhere/mlflow.db", ""),
        ("sqlite+pysqlite:///file:/somewhere/mlflow.db?uri=true", ""),
        ("http://me:secret@there:5000/path", "there:5000"),
        ("databricks://profile", "profile"),
        ("databricks", "databricks"),
        ("postgresql://me:secret@db/mlflow", "db"),
        ("http://there:port", "http://there:port"),
    ],
)
def test_hosts_are_named_without_passwords(address: str, host: str) -> None:
    assert patience.host_of(address) == host
