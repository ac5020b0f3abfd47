"""`cluster.address=auto` joins a cluster of `ray start`, and no program's private cluster."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raypipe.cluster import connect, watch
from raypipe.errors import ClusterError

from .joined import Joined, joined

ROOT = Path(__file__).parents[2]


def test_another_programs_cluster_is_left_alone(ray_session: str, own_cluster: Joined) -> None:
    """The session's cluster is alive on this host and private. A second process starts its own,
    tells every worker which one that is, and forgets it after stopping it."""
    (first,) = own_cluster.seen
    assert first[0] != ray_session and first == [first[0]] * 3
    assert own_cluster.after == ""


@pytest.mark.slow
def test_a_process_starts_one_cluster_after_the_other(ray_session: str) -> None:
    found = joined(times=2)
    first, second = found.seen
    assert first[0] != ray_session and second[0] not in (ray_session, first[0])
    assert first == [first[0]] * 3 and second == [second[0]] * 3
    assert found.after == ""


@pytest.mark.parametrize("given", ["auto", "http://127.0.0.1:8265", ""])
def test_an_address_that_names_no_cluster_joins_none(given: str) -> None:
    from raypipe.cluster import connect

    before = os.environ.pop("RAY_ADDRESS", None)
    try:
        os.environ["RAY_ADDRESS"] = given
        assert connect._ray_address() == ""
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for Ray: its sockets' paths may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        yield Path(folder)


def test_the_collector_rests_only_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raypipe.cluster import worker

    seen: list[tuple[str, bool]] = []

    def imported(name: str) -> None:
        seen.append((name, gc.isenabled()))
        if name == "gone":
            raise ImportError(name)
        if name == "broken":
            raise RuntimeError(name)

    gc.unfreeze()
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", imported)
        worker.load(["gone", "there"])
        assert gc.isenabled() and gc.get_freeze_count() > 0
        gc.unfreeze()
        with pytest.raises(RuntimeError, match="broken"):
            worker.load(["broken"])
    assert gc.isenabled()
    assert seen == [("gone", False), ("there", False), ("broken", False)]


def test_processes_that_start_in_advance_have_what_a_trial_needs(ray_session: str) -> None:
    """One of an actor with an environment of its own has not: a job would wait for it in vain."""
    import ray

    @ray.remote(num_cpus=0.1)
    def told() -> tuple[str, bool]:
        return os.environ["RAY_ADDRESS"], "raypipe.search.trials.trial" in sys.modules

    own = told.options(runtime_env={"env_vars": {"OF_ITS_OWN": "1"}})
    found = ray.get([told.remote(), own.remote()])
    assert found == [(ray_session, True), (ray_session, False)]


def test_a_private_cluster_stays_private_when_recorded(ray_session: str, short: Path) -> None:
    """Its port may have been another cluster's, whose record a kill left behind."""
    from raypipe.cluster.shared import shared_cluster

    (short / "ray" / "ray_current_cluster").write_text(ray_session)
    assert shared_cluster() is None


@pytest.mark.parametrize("recorded", ["127.0.0.1:1", "", "nonsense", "[::1]:99999999"])
def test_a_record_of_nothing_is_no_cluster(short: Path, recorded: str) -> None:
    from raypipe.cluster.shared import shared_cluster

    (short / "ray" / "ray_current_cluster").write_text(recorded)
    assert shared_cluster() is None


@pytest.mark.slow
def test_what_ray_start_left_is_joined_until_it_is_dead(ray_session: str, short: Path) -> None:
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", "0"]
    size = ["--num-cpus", "1", "--object-store-memory", str(100 * 2**20)]
    bare = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    plain = ["--include-dashboard", "false", "--disable-usage-stats"]
    try:
        subprocess.run(
            [*start, *size, *plain], env=bare, check=True, capture_output=True, timeout=90
        )
        address = (short / "ray" / "ray_current_cluster").read_text()
        ((found, _, _),) = joined().seen
        assert found == address
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(str(short) in word for word in process.info["cmdline"] or []):
                process.kill()
    ((found, _, _),) = joined().seen
    assert found not in (address, ray_session)


def test_ray_that_starts_too_slowly_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Ray's fixed 30 s are too short. Processes of the first try are killed."""
    import ray

    from raypipe.cluster import connect

    bystander = subprocess.Popen(["sleep", "60"])
    tries: list[subprocess.Popen[bytes]] = []

    def init(**options: object) -> object:
        tries.append(subprocess.Popen(["sleep", "60"]))
        if len(tries) == 1:
            raise Exception("The current node timed out during startup. This could happen …")
        return type("Context", (), {"address_info": {"address": "127.0.0.1:1"}})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv(connect.PRELOAD, "")
    monkeypatch.setenv(connect.WORKER_PRELOAD, "")
    try:
        assert connect._start_here(connect.ClusterConfig(), "", {}) == "127.0.0.1:1"
        assert tries[0].wait(timeout=10) < 0 and tries[1].poll() is None
        assert bystander.poll() is None
    finally:
        for process in (*tries, bystander):
            process.kill()
            process.wait()


def test_a_start_that_fails_leaves_the_users_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook it was gone, and the next verb started a cluster of its own."""

    def failed(*given: object) -> str:
        raise RuntimeError("no room in /tmp")

    monkeypatch.setattr(connect, "_start_here", failed)
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    with pytest.raises(ClusterError, match="Ray cannot be started here: no room in /tmp"):
        connect._init(connect.ClusterConfig(address="local"), "")
    assert os.environ["RAY_ADDRESS"] == "a:1"


@pytest.mark.parametrize("address", ["http-head:6379", "https.example:6379"])
def test_a_host_whose_name_begins_with_http_is_no_dashboard(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert connect._ray_address() == address
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert connect._ray_address() == ""


@pytest.fixture
def no_head(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An address without a head of a cluster, and what is said of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        says = {"dead": "refused", "mute": "silence for 3 s"}.get(request.param, "something else")

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(33)
                    if request.param == "web":
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        if request.param == "dead":
            server.close()
        elif request.param != "mute":
            thread.start()
        yield f"127.0.0.1:{port}", says
        if thread.is_alive():
            server.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)


# Joins as a verb does, and ends as one.
REFUSED = """
import sys
from raypipe import failures
from raypipe.cluster import connect
try:
    connect.connect(connect.ClusterConfig(address=sys.argv[1]))
except Exception as e:
    sys.exit(failures.report(e))
"""


HEADS = "dead", "mute", "web", "closes"
SETTINGS = "RAY_ADDRESS", "cluster.address"
QUICK = list(zip(HEADS, SETTINGS * 2, strict=True))  # each head, and each setting twice
REST = [each for each in product(HEADS, SETTINGS) if each not in QUICK]


@pytest.mark.parametrize(
    ("no_head", "setting"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)],
    indirect=["no_head"],
)
def test_no_head_at_the_address_is_one_message_within_seconds(
    no_head: tuple[str, str], setting: str
) -> None:
    """Ray itself says nothing for more than a minute. In a process of its own, so that a wait for
    Ray ends with the timeout."""
    address, says = no_head
    given = address if setting == "cluster.address" else "auto"
    said = refused(given, RAY_ADDRESS=address if given == "auto" else "")
    assert "No head of a Ray cluster answers: " in said and says in said
    assert f"(got '{setting}={address}')" in said
    assert "unset RAY_ADDRESS" in said


def refused(given: str, **environment: str) -> str:
    """The one message, which comes within seconds, of a process that cannot join."""
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, given],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
    )
    assert time.monotonic() - before < 20, done
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    return done.stderr


@pytest.mark.parametrize(
    "wrong", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
)
def test_a_refused_token_is_one_message_within_seconds(
    ray_session: str, wrong: dict[str, str]
) -> None:
    """Ray itself tries for 20 s, and prints a line of its log for each."""
    said = refused("auto", RAY_ADDRESS=ray_session, **wrong)
    assert f"RAY_ADDRESS={ray_session}, RAY_AUTH_MODE={wrong['RAY_AUTH_MODE']}" in said
    assert "refuses the token" in said and "~/.ray/auth_token" in said and "0" * 64 not in said


@pytest.mark.parametrize("given", ["local", "auto", "127.0.0.1:1"])
def test_a_token_that_cannot_be_read_is_one_message(given: str, tmp_path: Path) -> None:
    """Ray itself aborts the process, with a stack of C++."""
    nowhere = str(tmp_path / "none")
    said = refused(given, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=nowhere, RAY_ADDRESS="")
    assert "cannot read its token" in said and nowhere in said
    assert "unset RAY_AUTH_TOKEN_PATH" in said


SHARED = """
import logging
logging.basicConfig()
from raypipe.cluster.shared import shared_cluster
print(shared_cluster())
"""


def test_a_recorded_cluster_that_refuses_the_token_is_left_alone(
    ray_session: str, short: Path
) -> None:
    """Without any token, Ray itself aborts the process that asks."""
    (short / "ray" / "ray_current_cluster").write_text(ray_session)
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    done = subprocess.run(
        [sys.executable, "-c", SHARED],
        env=bare | {"RAY_AUTH_MODE": "token", "HOME": str(short)},
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done
    assert f"{ray_session} cannot be joined (it refuses this user's token" in done.stderr


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://127.0.0.1:10001", r"Ray Client.*RAY_ADDRESS=ray://.*--submit http://HOST:8265"),
        ("nonsense", r"no address of a cluster.*RAY_ADDRESS=nonsense.*HOST:PORT of a head"),
        ("127.0.0.1:", r"no address of a cluster.*HOST:PORT of a head"),
        ("127.0.0.1:99999", r"No head .*port"),
        ("[::1]:1", r"No head .*refused|No head .*address"),
    ],
)
def test_what_is_no_address_is_refused(address: str, says: str) -> None:
    from raypipe.cluster import head

    with pytest.raises(ClusterError, match=says):
        head.require(address, "RAY_ADDRESS")


def test_a_head_answers(ray_session: str) -> None:
    from raypipe.cluster import head

    assert head.silence(ray_session) == "" and head.listens(ray_session)
    head.require(ray_session, "RAY_ADDRESS")


def test_machines_are_counted_and_not_the_nodes_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Spark, four of Ray's nodes on one executor were paid as four machines."""

    def node(address: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": alive}

    on = [node("10.0.0.1"), node("10.0.0.1"), node("10.0.0.2"), node("10.0.0.3", alive=False)]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: on)
    assert connect.nodes() == 2
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connect.nodes() == 1


@pytest.mark.parametrize("is_left", [True, False])
def test_a_cluster_that_was_left_is_not_told_as_lost(
    is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ray.shutdown() in a notebook, the next cluster ended the kernel."""
    began = time.monotonic()
    monkeypatch.setattr(watch, "_of_own_cluster", lambda: lambda: "raylet")
    later = lambda: time.monotonic() - began > 0.6  # noqa: E731
    monkeypatch.setattr(ray, "is_initialized", later if is_left else lambda: True)
    said: list[str] = []
    stop = watch.start(said.append)
    time.sleep(1.2)
    stop()
    assert len(said) == (0 if is_left else 1)


def test_the_users_ray_address_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    monkeypatch.setattr(connect, "_own", [("a:1", "b:2")])
    monkeypatch.setattr(connect, "_stop_watches", [])
    connect._forget()
    assert os.environ["RAY_ADDRESS"] == "b:2" and connect._own == []
