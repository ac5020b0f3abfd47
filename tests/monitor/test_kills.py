"""A sink that is killed at any step, and sinks that share a spool, lose nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypipe.monitor import streams
from tests.ingestion_server import TOKEN, Answer, Running, Service, running

SERVING = streams.SERVING
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with running(tmp_path) as made:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.ca))
        monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
        yield made
        assert not made.service.wrong


@pytest.fixture
def rng() -> random.Random:
    """Another seed each time. RAYPIPE_TEST_SEED repeats the one that a failed test has printed."""
    seed = int(os.environ.get("RAYPIPE_TEST_SEED") or random.randrange(10**6))
    print(f"RAYPIPE_TEST_SEED={seed}")
    return random.Random(seed)


def require_all(service: Service, said: dict[str, Any]) -> None:
    """Each record that was kept has arrived or is counted as dropped."""
    run = f"step{said['step']}"
    of_run = [(name, r) for name, r in service.records if r["RunName"] == run]
    arrived = {r["RecordId"] for name, r in of_run if name == SERVING}
    told = [r for name, r in of_run if name == streams.DROPPED]
    dropped = max((r["Records"] for r in told), default=0)
    maybe = max((r["MayHaveArrived"] for r in told), default=0)
    # The record that was being kept when the process died is nobody's promise.
    found = len(arrived) + dropped
    assert said["kept"] <= found <= said["kept"] + 1 + maybe, (said, len(arrived), dropped, maybe)
    assert not said["left"] and said["again"] == 0 and (said["died"] or said["status"] == 0), said


def steps(server: Running, tmp_path: Path, first: int, last: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.monitor.killed_sinks", str(tmp_path), server.endpoint]
    done = subprocess.run(
        [*command, str(first), str(last)], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kills_at_some_steps(server: Running, rng: random.Random, tmp_path: Path) -> None:
    first = rng.randrange(250)
    found = steps(server, tmp_path, first, first + 6)
    for said in found:
        require_all(server.service, said)
    # How many writes there are depends on how the threads take turns: one may have none left.
    assert sum(said["died"] for said in found) >= len(found) - 2, "the fault did not fire"


@pytest.mark.chaos
def test_a_kill_at_each_step(server: Running, tmp_path: Path) -> None:
    number, died = 0, 0
    while True:
        found = steps(server, tmp_path, number, number + 20)
        for said in found:
            require_all(server.service, said)
        died += sum(said["died"] for said in found)
        number += 20
        if not any(said["died"] for said in found):
            break
    # Fills, drops and deliveries have so many steps; each was tried before and after.
    assert died > 300


WRITER = """
import sys
from pathlib import Path
from tests.monitor import killed_sinks
from raypipe.monitor import sender, streams
sender.FIRST_PAUSE_S = 0.02
folder, endpoint, name = Path(sys.argv[1]), *sys.argv[2:4]
records, length = map(int, sys.argv[4:])
killed_sinks.SPOOL_MB = 16 if length == 1 else 0.25
monitor = killed_sinks.opened(folder, endpoint, 0, every_s=0.02)
for number in range(records):
    monitor.note(streams.SERVING, {"RecordId": f"{name}-{number}", "Model": "m" * length})
    print(number, flush=True)
print("closing", flush=True)
monitor.close()
"""


def writer(
    server: Running, folder: Path, name: str, records: int, length: int = 1
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), server.endpoint, name]
    command += [str(records), str(length)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_share_a_spool(server: Running, tmp_path: Path) -> None:
    server.service.script = [Answer(503), Answer(500), Answer(takes=True, hangs_up=True)] * 3
    started = [writer(server, tmp_path, name, 400) for name in "abc"]
    for process in started:
        process.communicate(timeout=120)
        assert process.returncode == 0
    arrived = {r["RecordId"] for r in server.service.of(SERVING)}
    assert arrived == {f"{name}-{number}" for name in "abc" for number in range(400)}
    assert not list(tmp_path.glob("step0/sinks/*/1/*-*-*.*"))


def test_small_spool_lost_answers_and_three_processes(
    server: Running, rng: random.Random, tmp_path: Path
) -> None:
    """What arrives and what is counted as dropped add up, though answers are lost on the way."""
    lossy = [Answer(503)] * 10 + [Answer()] * 8
    lossy += [Answer(500, takes=True), Answer(takes=True, hangs_up=True)]
    server.service.draw = lambda: rng.choice(lossy)
    started = [writer(server, tmp_path, name, 250, 1500) for name in "abc"]
    for process in started:
        process.communicate(timeout=120)
    server.service.draw = None
    writer(server, tmp_path, "last", 0).communicate(timeout=60)
    arrived = len(server.service.of(SERVING))
    told = server.service.of(streams.DROPPED)
    dropped = max((r["Records"] for r in told), default=0)
    maybe = max((r["MayHaveArrived"] for r in told), default=0)
    assert dropped > 0, "the spool was never full"
    assert arrived + dropped - maybe <= 750 <= arrived + dropped, (arrived, dropped, maybe)
    assert not list(tmp_path.glob("step0/sinks/*/1/*-*-*.*"))


def test_one_of_two_is_killed_and_one_is_stopped(server: Running, tmp_path: Path) -> None:
    """A process that is stopped in the middle (SIGSTOP) does not wedge the other."""
    killed, stopped = (writer(server, tmp_path, name, 10**6) for name in ("killed", "stopped"))
    kept = {}
    for process, name, sent in (
        (killed, "killed", signal.SIGKILL),
        (stopped, "stopped", signal.SIGSTOP),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 300:
                break
        os.kill(process.pid, sent)
        if sent == signal.SIGKILL:
            kept[name] = 1 + max(int(x) for x in [*process.stdout.read().split(), "300"])
    try:
        last = writer(server, tmp_path, "last", 50)
        began = time.monotonic()
        last.communicate(timeout=60)
        assert last.returncode == 0 and time.monotonic() - began < 30
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.kill()
        rest = stopped.communicate()[0]
    kept["stopped"] = 1 + max(int(x) for x in [*rest.split(), "300"])
    final = writer(server, tmp_path, "final", 1)
    final.communicate(timeout=60)
    arrived = {r["RecordId"] for r in server.service.of(SERVING)}
    for name, records in kept.items():
        assert {f"{name}-{n}" for n in range(records)} <= arrived
    assert {f"last-{n}" for n in range(50)} <= arrived
