"""Ray on Spark: `cluster.address=spark` on two executors, each a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypipe.cluster import spark
from tests.local_spark import (
    MARK,
    MASTER,
    ROOT,
    environment,
    executor_of,
    marked,
    one_message,
    require_spark,
    seconds_until_gone,
    verb,
)

pyspark = require_spark()
pytestmark = pytest.mark.spark
CANARY = "canary-of-the-store-7c1f"
SHOWN = [
    "/api/jobs/",
    "/api/v0/actors?detail=true",
    "/api/v0/nodes?detail=true",
    "/api/v0/runtime_envs?detail=true",
    "/api/v0/workers?detail=true",
    "/nodes?view=summary",
]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Ray on Spark needs 35 s here, on two idle cores.
START_S = 240

# Holds a cluster until its stdin ends, as a notebook does. Tells what it has and what it leaves.
HOLD = """
import hashlib, json, os, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
session = builder.getOrCreate()
session.sparkContext.setLogLevel("OFF")
# Spark's own processes run already.
os.environ["AWS_SECRET_ACCESS_KEY"] = os.environ["CANARY"]
from raypipe.cluster.connect import ClusterConfig, close, connect, prepare_environment

prepare_environment()
import ray

ray.is_initialized()  # sets RAY_CLIENT_MODE
before = dict(os.environ)
options = json.loads(sys.argv[2])
resources = connect(ClusterConfig(address="spark", object_store_mb=200, spark=options))

@ray.remote(num_cpus=2)
def seen():
    import time
    time.sleep(3)  # so that each node runs one
    node = ray.get_runtime_context().get_node_id()
    names = "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "RAY_ADDRESS"
    found = {name: os.environ.get(name) for name in names}
    token = hashlib.sha256(os.environ["RAY_AUTH_TOKEN"].encode()).hexdigest()
    return node, os.getpid(), found | {"token": token}

nodes = ray.get([seen.remote() for _ in range(2)])
head = os.environ["RAY_ADDRESS"]
print(json.dumps({"resources": resources, "nodes": nodes, "head": head}), flush=True)
sys.stdin.read()
close()
changed = {n for n in {*before, *os.environ} if before.get(n) != os.environ.get(n)}
alive = session.range(3).count()  # the session is not ours to stop
print(json.dumps({"changed": sorted(changed), "alive": alive}), flush=True)
session.stop()
"""


# Three tasks of which a node runs one at a time.
GROW = """
import os, time
from raypipe.cluster.connect import ClusterConfig, close, connect, prepare_environment

prepare_environment()
options = {"workers": 2, "cpus": 2, "memory": 500, "autoscale": True}
resources = connect(ClusterConfig(address="spark", object_store_mb=200, spark=options))
import ray

@ray.remote(num_cpus=2)
def seen():
    time.sleep(20)
    return ray.get_runtime_context().get_node_id()

print(resources["CPU"], len(set(ray.get([seen.remote() for _ in range(3)]))))
close()
"""


@dataclass
class Held:
    process: subprocess.Popen[str]
    mark: str
    dashboard: str
    told: dict[str, Any]


def free_port() -> int:
    """One that the system gives to nobody: Spark and Ray start for half a minute, and one that it
    had given and taken back was another process's by then.

    It is one of those that Ray on Spark has for the head's workers: there a dashboard is hardest.
    """
    for port in random.sample(range(20_000, 21_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    pytest.fail("none of a hundred ports is free")


def hold() -> Held:
    port, mark = free_port(), uuid.uuid4().hex
    options = json.dumps({"workers": 2, "cpus": 2, "dashboard_port": port})
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, MASTER, options],
        env=environment(**{MARK: mark}, CANARY=CANARY),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    told = process.stdout.readline()
    assert told, f"it ended with {process.wait(60)}"
    return Held(process, mark, f"http://127.0.0.1:{port}", json.loads(told))


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    cluster = hold()
    yield cluster
    for process in marked(cluster.mark):
        with suppress(psutil.Error):
            process.kill()
    cluster.process.wait(30)


@pytest.mark.parametrize(
    ("dashboard", "first", "last"),
    [
        ("20742", "20000", "20741"),
        ("20000", "20001", "20999"),
        ("20999", "20000", "20998"),
        ("21000", "20000", "20999"),
        ("8265", "20000", "20999"),
    ],
)
def test_the_heads_workers_leave_the_dashboards_port_free(
    dashboard: str, first: str, last: str
) -> None:
    options = {"--min-worker-port": "20000", "--max-worker-port": "20999"}
    moved = spark._clear_of_dashboard({"--dashboard-port": dashboard, **options})
    assert options | moved == {"--min-worker-port": first, "--max-worker-port": last}
    assert spark._clear_of_dashboard(options) == {}


def token() -> str:
    return (Path.home() / ".ray" / "auth_token").read_text().strip()


def ask(dashboard: str, path: str, token: str) -> str:
    request = urllib.request.Request(dashboard + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def submit(held: Held, verb: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit -- python jobs/VERB.py …`, as its user types it."""
    environment_of_job = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
    words = [*RAY, "job", "submit", "--address", held.dashboard]
    words += ["--runtime-env-json", environment_of_job, "--"]
    words += [sys.executable, str(ROOT / "jobs" / f"{verb}.py"), *arguments]
    return subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=400, cwd=ROOT
    )


@pytest.mark.share
def test_the_nodes_are_two_processes_with_what_they_need(held: Held) -> None:
    assert held.told["resources"]["CPU"] == 4, "the head computes nothing"
    (one, first, here), (other, second, there) = held.told["nodes"]
    assert one != other and first != second
    executors = [executor_of(pid).pid for pid in (first, second)]
    assert executors[0] != executors[1]
    for seen in (here, there):
        port = held.told["head"].rpartition(":")[2]
        assert seen.pop("RAY_ADDRESS").endswith(f":{port}")
        assert seen == {
            "AWS_SECRET_ACCESS_KEY": CANARY,
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "token": hashlib.sha256(token().encode()).hexdigest(),
        }
    # Dashboards listen on loopback only.
    port = int(held.dashboard.rpartition(":")[2])
    places = {c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr.port == port}
    assert places == {"127.0.0.1"}


def test_verbs_run_there_as_submitted_jobs(held: Held, job: Path, tmp_path: Path) -> None:
    places = [f"run.dir={tmp_path / 'run'}", f"table.uri={tmp_path / 'table'}"]
    own = [str(job), *places, f"watch.batch.uri={tmp_path / 'table'}"]
    done = submit(held, "ingest", *own, "ingest.splits={train: 0.5, val: 0.4, test: 0.1}")
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray packs workers: three do not fit on one node.
    done = submit(held, "train", *own, "train.workers=3", "train.epochs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    actors = json.loads(ask(held.dashboard, "/api/v0/actors?detail=true&limit=1000", token()))
    trainers = [
        actor
        for actor in actors["data"]["result"]["result"]
        if "TrainWorker" in actor["class_name"]
    ]
    assert len({actor["pid"] for actor in trainers}) == 3
    assert len({actor["node_id"] for actor in trainers}) == 2, "on both executors"
    done = submit(held, "tune", *own, "search.samples=2", "search.scheduler=none")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("predict", "drift"):
        done = submit(held, name, *own)
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_token_nothing_starts_and_nothing_is_shown(held: Held) -> None:
    before = ask(held.dashboard, "/api/jobs/", token())
    for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
        done = submit(held, "train", "no.yaml", **wrong)
        assert done.returncode != 0
    assert ask(held.dashboard, "/api/jobs/", token()) == before
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        ask(held.dashboard, "/api/jobs/", "0" * 64)
    # What the dashboard shows holds neither the token nor a credential.
    for path in SHOWN:
        answer = ask(held.dashboard, path, token())
        assert CANARY not in answer and token() not in answer
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o77 == 0


@pytest.mark.share
def test_it_ends_with_the_driver_that_closes_it(held: Held) -> None:
    """The last test of this cluster."""
    assert held.process.stdin is not None and held.process.stdout is not None
    known = marked(held.mark)
    held.process.stdin.close()
    told = json.loads(held.process.stdout.readline())
    assert told == {"changed": [], "alive": 3}
    assert held.process.wait(60) == 0
    assert seconds_until_gone(held.mark, 5, known) < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_driver_that_is_killed(number: signal.Signals) -> None:
    held = hold()
    known = marked(held.mark)
    assert {"raylet", "java"} <= {process.name() for process in known}
    held.process.send_signal(number)
    took_s = seconds_until_gone(held.mark, 120, known)
    print(f"{number.name}: all processes have ended after {took_s:.1f} s")
    # Ray's handler of SIGTERM is sys.exit(15).
    assert held.process.wait(60) == {signal.SIGKILL: -9, signal.SIGTERM: 15}[number]


def test_spark_that_dies_under_way_ends_its_driver() -> None:
    held = hold()
    java = [p for p in marked(held.mark) if p.name() == "java" and p.ppid() == held.process.pid]
    known = marked(held.mark)
    java[0].kill()
    assert held.process.wait(30) == 1
    print(f"all processes have ended after {seconds_until_gone(held.mark, 120, known):.1f} s")


SMALL = ["cluster.address=spark", "cluster.object_store_mb=200"]


def test_a_verb_alone_starts_spark_and_ends_it(job: Path, tmp_path: Path) -> None:
    """Two workers on two executors of one core; stdout has the verb's JSON alone."""
    run = [f"run.dir={tmp_path / 'run'}", "train.workers=2", "cluster.spark.workers=2"]
    code, out, err, mark = verb(
        "train", str(job), *SMALL, *run, "--json", master="local-cluster[2,1,2048]"
    )
    assert code == 0, out + err
    assert seconds_until_gone(mark, 30) < 30
    assert isinstance(json.loads(out), dict)


@pytest.mark.slow
def test_it_grows_while_work_waits(tmp_path: Path) -> None:
    """Run by spark-submit, which starts Java before Python."""
    script, mark = tmp_path / "grow.py", uuid.uuid4().hex
    script.write_text(GROW)
    spark_submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [str(spark_submit), "--master", MASTER, str(script)],
        env=environment(**{MARK: mark, "PYSPARK_SUBMIT_ARGS": ""}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds_until_gone(mark, 30) < 30
    assert done.stdout.splitlines()[-1] == "2.0 2"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["cluster.spark.cpus=3"], "2 executors of 2 CPUs and 0 GPUs.* room for no such worker"),
        (["cluster.spark.gpus=1"], "2 executors of 2 CPUs and 0 GPUs.* room for no such worker"),
        (["cluster.spark.workers=3", "cluster.spark.cpus=2"], "room for 2 of them"),
    ],
)
def test_too_little_room_is_one_message(job: Path, asked: list[str], said: str) -> None:
    code, out, err, mark = verb("train", str(job), *SMALL, "train.workers=2", *asked)
    assert seconds_until_gone(mark, 30) < 30
    assert (code, out) == (2, "") and one_message(err, said)


def test_what_is_missing_is_one_message(job: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "pyspark").mkdir(parents=True)
    (broken / "pyspark" / "__init__.py").write_text("raise ImportError('no pyspark here')")
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    cases: list[tuple[dict[str, str], list[str], str]] = [
        ({"PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"}, [], "needs pyspark.*raypipe.spark"),
        ({"JAVA_HOME": "/nowhere"}, [], "needs Java .got 'none'.*17 or newer"),
        ({"JAVA_HOME": str(tmp_path / "java")}, [], "needs Java .got 'openjdk.*11.0.2"),
        ({}, [f"cluster.spark.dashboard_port={port}"], f"port is taken .got {port}"),
        ({}, ["cluster.address=ray://127.0.0.1:10001"], "ray:// is Ray Client.*--submit"),
    ]
    for more, asked, said in cases:
        code, out, err, mark = verb("train", str(job), *SMALL, "train.workers=2", *asked, **more)
        assert not marked(mark)
        assert (code, out) == (2, "") and one_message(err, said)
    taken.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"PYSPARK_PYTHON": "/bin/false"}, "executor cannot run a Python task"),
        ({"RAY_REDIS_ADDRESS": "127.0.0.1:9"}, "head on the Spark driver did not start"),
    ],
)
def test_ray_that_does_not_come_up_leaves_nothing(
    job: Path, fault: dict[str, str], said: str
) -> None:
    code, out, err, mark = verb("train", str(job), *SMALL, "train.workers=2", **fault)
    assert seconds_until_gone(mark, 30) < 30
    assert (code, out) == (2, "") and one_message(err, said)


def test_one_machine_needs_no_spark(job: Path) -> None:
    code, out, err, mark = verb("train", str(job), *SMALL, "train.workers=2", master="local[2]")
    assert seconds_until_gone(mark, 30) < 30
    assert (code, out) == (2, "") and one_message(err, "no executors.*cluster.address=local")
