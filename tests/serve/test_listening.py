"""What a replica does on its port: whom it shares it with, whom it counts, how it stops."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from raypipe.errors import ConfigError
from raypipe.serve.online import replica
from raypipe.serve.online.limits import Refused, Room
from raypipe.serve.online.replica import Replica
from raypipe.serve.online.settings import ServeConfig

from .servers import free_port


async def app(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[Any]],
    send: Callable[[Any], Awaitable[None]],
) -> None:
    """Answers with the address of the client; /slow after a second and a half."""
    import asyncio

    if scope["path"] == "/slow":
        await asyncio.sleep(1.5)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["client"][0].encode()})


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listening(port: int) -> Iterator[replica._Listening]:
    made = replica._listen(app, "127.0.0.1", port, 5.0, "one")
    yield made
    made.stop()


def asked(port: int, path: str = "/", **headers: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return str(answer.read().decode())
        except ConnectionError:
            assert time.monotonic() < deadline


def test_a_client_on_this_machine_may_not_say_that_it_is_another(
    listening: replica._Listening, port: int
) -> None:
    """With X-Forwarded-For it had a new rate with every request."""
    assert asked(port, **{"X-Forwarded-For": "192.0.2.7"}) == "127.0.0.1"


def test_replicas_of_one_server_share_a_port_and_those_of_another_are_refused(
    listening: replica._Listening, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both listened on the node, and each request went to one of two models."""
    replica._listen(app, "127.0.0.1", port, 5.0, "one").stop()
    monkeypatch.setattr(replica, "BIND_S", 0.3)
    rule = rf"another raypipe serve has it on this node.*127\.0\.0\.1:{port}.*Set serve\.port"
    with pytest.raises(ConfigError, match=rule):
        replica._listen(app, "127.0.0.1", port, 5.0, "another")
    assert asked(port) == "127.0.0.1"


def test_running_requests_have_their_time_when_a_server_stops(port: int) -> None:
    """They had 10 s, where serve.timeout_s gives 30."""
    cfg = ServeConfig()
    listening = replica._listen(app, "127.0.0.1", port, replica.drain_s(cfg), "one")
    given = listening._uvicorn.config.timeout_graceful_shutdown
    assert given is not None and given > cfg.timeout_s
    assert replica.grace_s(cfg) >= given + replica.WRITE_S
    asked(port)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asked, port, "/slow")
        time.sleep(0.3)
        began = time.monotonic()
        listening.stop()
        assert running.result() == "127.0.0.1"
    # It waits for requests, and not for the whole of their time.
    assert not listening.thread.is_alive() and time.monotonic() - began < 10
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pytest.fail("it still listens")


def test_a_replica_that_stops_takes_no_more_requests_and_is_not_ready() -> None:
    """Room.closed was never set: the answer "The server is stopping" could not come."""
    one = object.__new__(Replica)
    one.room = Room(4, 2**20)
    one.__del__()
    with pytest.raises(Refused, match="The server is stopping"), one.room.hold(1):
        pytest.fail("it took the request")
