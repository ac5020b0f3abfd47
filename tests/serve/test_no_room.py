"""A server whose CPUs others hold: it says that it waits, and SIGTERM ends the wait."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from raypipe.registry.versions import ModelVersion
from raypipe.serve.online import server
from raypipe.serve.online.server import Server
from raypipe.serve.signals import Stop

from .conftest import Registered

ROOT = Path(__file__).parents[2]


@pytest.fixture
def held(ray_session: str) -> Iterator[None]:
    """Both CPUs of the cluster are somebody else's."""
    import ray

    @ray.remote(num_cpus=1)
    class Holder:
        def ready(self) -> bool:
            return True

    holders = [Holder.remote() for _ in range(2)]
    assert all(ray.get([each.ready.remote() for each in holders]))
    yield
    for each in holders:
        ray.kill(each)


@pytest.mark.usefixtures("held")
def test_sigterm_ends_a_server_that_waits_for_room(registered: Registered, tmp_path: Path) -> None:
    """It was not heard. Whoever killed the verb left replicas that began to serve later."""
    import ray
    from ray import serve

    tree = {
        "run": {"name": "mixed", "dir": str(registered.store.folder.parent)},
        "table": {"uri": str(tmp_path / "none")},
        "serve": {"port": 0, "cpus": 1, "keep": 0},
    }
    config = tmp_path / "mine.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "raypipe", "serve", str(config)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as verb:
        said: list[str] = []
        assert verb.stderr is not None
        reader = threading.Thread(target=said.extend, args=(verb.stderr,), daemon=True)
        reader.start()
        try:
            # Its replica exists for Ray Serve, and waits.
            wait_for(lambda: any(_waits(each) for each in _applications(serve)), said)
            verb.send_signal(signal.SIGTERM)
            began = time.monotonic()
            code = verb.wait(30)
        finally:
            verb.kill()
        seconds = time.monotonic() - began
        reader.join(10)
    told = "".join(said)
    assert code == 1 and seconds < 20, (seconds, told)
    assert "the server waits for room: serve.replicas=1, with 1 CPUs each; free on" in told
    assert "asked to end before its replicas had started" in told and "DEPLOYING" in told
    assert "Traceback" not in told
    # Neither replicas nor Ray Serve itself are left: they would outlive the verb.
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [each["name"] for each in named if each["namespace"] == "serve"] == []


def _applications(serve: Any) -> list[Any]:
    return list(serve.status().applications.values())


def _waits(application: Any) -> bool:
    deployment = application.deployments.get("replica")
    return deployment is not None and "STARTING" in deployment.replica_states


def wait_for(happens: Callable[[], bool], said: list[str]) -> None:
    until = time.monotonic() + 90
    while not happens():
        assert time.monotonic() < until, "".join(said)
        time.sleep(0.2)


class Clock(Stop):
    """Whoever waits is told at once that the time has passed."""

    now = 0.0

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def test_a_server_that_does_not_start_says_why_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one of two replicas started, `raypipe serve` waited for ever without a word."""
    from ray import serve

    clock = Clock()

    def condition(name: str) -> str:
        assert clock.now >= server.STARTS_S, "a start takes some seconds"
        return f"DEPLOYING; {'no room' if clock.now < 45 else 'no model'}"

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(serve, "run_many", lambda targets, **how: ["the handle"])
    monkeypatch.setattr(
        server, "_status", lambda name: "DEPLOYING" if clock.now < 60 else "RUNNING"
    )
    monkeypatch.setattr(server, "_condition", condition)
    with caplog.at_level(logging.WARNING):
        assert server._deployed(None, "raypipe-x", clock) == "the handle"
    said = [record.getMessage() for record in caplog.records if record.name == "raypipe"]
    assert said == [
        "The server has not started yet: DEPLOYING; no room",
        "The server has not started yet: DEPLOYING; no model",
    ]


def test_a_refusal_of_a_replica_keeps_its_own_way_out() -> None:
    """A port in use was said to be free with fewer CPUs."""
    port = "The port cannot be used: another has it. Set serve.port to another one"
    text = str(server._not_started(f"DEPLOY_FAILED; raypipe.errors.ConfigError: {port}"))
    assert port in text and "serve.cpus" not in text
    assert "Set serve.cpus" in str(server._not_started("DEPLOY_FAILED; killed"))


class Deaf(Server):
    """Its replicas report by a script: True is one that answers, False none, None an error."""

    script: list[bool | None]

    def __init__(self, script: list[bool | None], follow_s: float = 0.0) -> None:
        model = ModelVersion("m", 1, "models:/m/1", {})
        super().__init__("raypipe-x", "http://h:1", model, "requests", False, None, None, follow_s)
        object.__setattr__(self, "script", script)

    def reports(self) -> dict[str, Any]:
        answers = self.script.pop(0)
        if answers is None:
            raise ConnectionError("the registry starts again")
        return {"one": {"champion": str(self.model)}} if answers else {}

    def condition(self) -> str:
        return "UNHEALTHY; no room"


class Until(Stop):
    """Set when the script of a server is at its end."""

    now = 0.0

    def __init__(self, server: Deaf) -> None:
        super().__init__()
        self.server = server

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return not self.server.script


def test_a_server_without_replicas_says_so_once_and_when_one_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the last replica was lost, `raypipe serve` stood there without a word."""
    monkeypatch.setattr(server, "SILENT_S", 0.0)
    said: list[str] = []
    deaf = Deaf([True, False, None, False, True, True, None, True])
    server.wait(deaf, said.append, Until(deaf))
    gone = "replicas: none answers any more. UNHEALTHY; no room"
    assert said == [gone, "replicas: one answers again"] * 2
    # A moment is no silence: a replica is replaced within seconds.
    monkeypatch.setattr(server, "SILENT_S", 60.0)
    said.clear()
    deaf = Deaf([True, False, None, True])
    server.wait(deaf, said.append, Until(deaf))
    assert said == []


@pytest.mark.parametrize("silent_s", [20, 100])
def test_replicas_that_follow_rarely_are_not_said_to_be_gone(
    silent_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that starts again hears of its replicas serve.follow_s later."""
    deaf = Deaf([True, *[False] * silent_s, True], follow_s=60)
    until = Until(deaf)
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: until.now))
    said: list[str] = []
    server.wait(deaf, said.append, until)
    assert len(said) == (2 if silent_s > 70 else 0), said
