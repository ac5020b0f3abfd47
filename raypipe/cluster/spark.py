"""Starts Ray on the executors of a Spark application, and stops it with this process.

The head runs beside this process, on the Spark driver's host; each further Ray node is one Spark
task that lasts as long as Ray. Ray's own `setup_ray_cluster` does the work. What it leaves open is
closed here (read and run in Ray 2.60):

1. It waits 120 s for room that no executor has, and then goes on with fewer nodes. So the room is
   counted first, and the nodes are counted afterwards.
2. Its dashboard listens on all interfaces, and its head writes to our stdout by a thread that keeps
   a failed process from ending. So the head is started here (`_start_head`).
3. No node gets the driver's token and credentials. They travel inside the Spark task and arrive in
   the environment of the node's processes (`spark_hook.py`): neither Spark nor Ray shows that.

Ray's processes look for their parent twice a second. If the driver is killed, the head ends, and
the executors' tasks with the Spark application.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.cluster import ray_private, spark_session, watch
from raypipe.cluster.spark_room import Room, Wanted, look, room_of
from raypipe.cluster.spark_session import Purpose
from raypipe.config import Section
from raypipe.errors import ClusterError, RaypipeError, one_line

log = logging.getLogger("raypipe")
HOOK = "RAY_ON_SPARK_START_HOOK"
DASHBOARD_PORT = 8265
RAY = Purpose(
    who="Ray",
    setting="cluster.address=spark",
    instead="cluster.address=auto",
    alone="cluster.address=local",
    fewer="cluster.spark.workers, cpus or gpus",
)
# What setup_ray_cluster and ray.init set in this process.
VARIABLES = HOOK, "RAY_ADDRESS", "PYTHONBREAKPOINT"
HEAD_S = 60
ASK_S = 2  # a question to Spark's Java process takes a millisecond
END_S = 40  # Ray gives its processes some seconds to end by themselves
_stops: list[_Started] = []


class SparkConfig(Section):
    """Ray on a Spark application, for cluster.address=spark. Each Ray node is one Spark task."""

    workers: int | None = Field(default=None, ge=1)
    """Number of Ray nodes, without the head on the Spark driver, which computes nothing. null: as
    many as fit on the executors."""

    cpus: int | None = Field(default=None, ge=1)
    """CPUs of a Ray node. null: all of an executor."""

    gpus: int | None = Field(default=None, ge=0)
    """GPUs of a Ray node. null: its share of the executor's, by CPUs."""

    memory: int | None = Field(default=None, ge=256)
    """Memory of a Ray node for tasks in MiB; Ray counts it and does not enforce it.
    cluster.object_store_mb is added. null: Ray's own choice by the machine's memory."""

    autoscale: bool = False
    """Start with one Ray node, add nodes up to `workers` while tasks wait, and remove nodes that
    are idle for a minute."""

    dashboard_port: int | None = Field(default=None, ge=1024, le=65535)
    """Port of Ray's dashboard on the Spark driver's loopback, for `ray job submit` and --submit.
    null: 8265 with cluster.dashboard=true, else no dashboard."""

    @model_validator(mode="after")
    def _autoscale_to_a_number(self) -> Self:
        if self.autoscale and self.workers is None:
            raise ValueError("autoscale needs workers: the number of nodes to grow to")
        return self


class _Started:
    """What this process started and has to end; `stop` may be called at any point, also twice."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.head: subprocess.Popen[bytes] | None = None
        self.folder: str | None = None
        self.environment = {name: os.environ.get(name) for name in VARIABLES}
        self.asked_at = 0.0

    def stop(self) -> None:
        if self in _stops:
            _stops.remove(self)
            atexit.unregister(self.stop)
            # Orphans are found only while their parents live.
            nodes, below = ray_private.spark_processes(self.folder) if self.folder else ([], [])
            _stop_ray()
            self._wait_for(nodes)
            # Without a node, its agents would look for the head for a minute.
            _kill(below)
            spark_session.close()
        for name, value in self.environment.items():
            _set(name, value)

    def _wait_for(self, nodes: Sequence[Any]) -> None:
        """Until the Ray nodes on this host have ended; what does not end is killed."""
        if self.head is not None and self.head.poll() is None:
            self.head.terminate()
        until = time.monotonic() + END_S
        while any(watch.lives(node) for node in nodes) and time.monotonic() < until:
            time.sleep(0.2)
        _kill(nodes)
        if self.head is not None:
            self.head.wait(END_S)


def start(cfg: SparkConfig, object_store_mb: int | None, dashboard: bool) -> str:
    """Start Ray on the active Spark session, or on one that is made here; returns its address.

    `stop` ends it, as does the end of this process. Raises ClusterError if Spark is missing, has
    too little room, or the nodes do not come up; then nothing is left running.
    """
    port = cfg.dashboard_port or (DASHBOARD_PORT if dashboard else None)
    if port is not None:
        _require_free(port)
    started = _Started(spark_session.get(RAY))
    _stops.append(started)
    atexit.register(started.stop)
    try:
        return _start(cfg, object_store_mb, port, started)
    except BaseException:
        started.stop()
        raise


def stop() -> None:
    """End what `start` began; nothing happens if there is nothing."""
    for started in list(_stops):
        started.stop()


def find_ended() -> str:
    """A name for the Spark application if it has ended, and the Ray nodes with it; else ""."""
    for started in list(_stops):
        if time.monotonic() - started.asked_at < ASK_S:
            continue
        started.asked_at = time.monotonic()
        if spark_session.has_ended(started.session):
            return "Spark application"
    return ""


def _start(cfg: SparkConfig, object_store_mb: int | None, port: int | None, to: _Started) -> str:
    import ray
    from ray.util.spark import setup_ray_cluster

    session = to.session
    node = look(session, RAY)
    wanted = Wanted(cfg.workers, cfg.cpus, cfg.gpus)
    room = room_of(session, wanted, node.gpus, RAY)
    ensure_token()
    os.environ[HOOK] = "raypipe.cluster.spark_hook.Hook"
    # A head that is looked for in the environment would be another cluster's.
    os.environ.pop("RAY_ADDRESS", None)
    at_least = 1 if cfg.autoscale else room.workers
    size = {
        "max_worker_nodes": room.workers,
        "min_worker_nodes": at_least,
        "num_cpus_worker_node": room.cpus,
        "num_gpus_worker_node": room.gpus,
        "memory_worker_node": cfg.memory * 2**20 if cfg.memory else None,
        "object_store_memory_worker_node": object_store_mb * 2**20 if object_store_mb else None,
    }
    head = {"include_dashboard": port is not None, "dashboard_port": port}

    def start_head(command: list[str], environment: Mapping[str, str]) -> Any:
        to.head, to.folder, last_lines = _start_head(command, environment)
        return to.head, last_lines

    log.info("Starting Ray on Spark: %s", room)
    try:
        with ray_private.spark_start(session, start_head, node.path):
            address, _ = setup_ray_cluster(head_node_options=head, **size)
    except RaypipeError:
        raise
    except Exception as e:
        raise _failed(e, room) from e
    finally:
        # It is read while nodes start.
        _set(HOOK, to.environment[HOOK])
    nodes = _count_nodes(ray, address)
    _keep_time_to_stop()
    if nodes < at_least:
        raise _too_few(nodes, room)
    return str(address)


def _count_nodes(ray: Any, address: str) -> int:
    """Ray nodes beside the head."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    return sum(node["Alive"] for node in ray.nodes()) - 1


def _keep_time_to_stop() -> None:
    """Put Python's handler of SIGTERM before Ray's in C++, which aborts the process after 3 s."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _start_head(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], str, list[str]]:
    """Start the head with a dashboard on loopback; returns it, its folder and no lines of output.

    Its output goes to a file. Returns when it listens; raises ClusterError if it ends or does not
    answer in time.
    """
    options = dict(word.partition("=")[::2] for word in command if word.startswith("--"))
    of_head = {"--dashboard-host": "127.0.0.1"} | _clear_of_dashboard(options)
    command = [
        f"{name}={of_head[name]}" if (name := word.partition("=")[0]) in of_head else word
        for word in command
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryFile() as output:
        head = subprocess.Popen(
            command,
            env=os.environ | dict(environment) | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is ours to handle.
            start_new_session=True,
        )
        until = time.monotonic() + HEAD_S
        while head.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                place = options["--node-ip-address"], int(options["--port"])
                socket.create_connection(place, 1).close()
                return head, options["--temp-dir"], []
            time.sleep(0.2)
        output.seek(0)
        said = one_line(output.read().decode(errors="replace")[-600:], 600)
    if head.poll() is None:
        # It ends its own children.
        head.terminate()
        head.wait(END_S)
    raise ClusterError(f"Ray's head on the Spark driver did not start: {said}")


def _clear_of_dashboard(options: Mapping[str, str]) -> dict[str, str]:
    """The ports of the head's workers without the dashboard's: the longer part of their range.

    options: of the head's command. Ray on Spark takes a thousand from 20000 on, whoever has the
    dashboard among them, and then Ray refuses to start.
    """
    first, last = "--min-worker-port", "--max-worker-port"
    dashboard = options.get("--dashboard-port")
    if dashboard is None or not {first, last} <= options.keys():
        return {}
    port, low, high = int(dashboard), int(options[first]), int(options[last])
    if not low <= port <= high:
        return {}
    return {last: str(port - 1)} if port - low > high - port else {first: str(port + 1)}


def ensure_token() -> None:
    """Make a token in ~/.ray/auth_token, for its owner alone, unless there is one."""
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    import secrets

    file = Path.home() / ".ray" / "auth_token"
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(file, flags, 0o600), "w") as new:
            new.write(secrets.token_hex(32))


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            raise ClusterError(
                "The dashboard's port is taken",
                got=port,
                rule=e.strerror or "",
                fix="Set cluster.spark.dashboard_port to a free one",
            ) from e


def _stop_ray() -> None:
    import ray
    from ray.util.spark import shutdown_ray_cluster

    with suppress(Exception):
        ray.shutdown()
    # A cluster that never came up is none to Ray.
    with suppress(Exception):
        shutdown_ray_cluster()


def _kill(processes: Sequence[Any]) -> None:
    for process in filter(watch.lives, processes):
        log.debug("Killed: %s", process)
        with suppress(Exception):
            process.kill()


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _failed(error: Exception, room: Room) -> ClusterError:
    causes = [error, error.__cause__, error.__context__]
    reason = one_line(next(e for e in reversed(causes) if e is not None))
    return ClusterError(
        f"Ray did not come up on Spark: {reason}",
        got=str(room),
        rule="Each executor needs room for its Ray nodes, and the ports of the Spark driver open",
        fix="See the executors' logs, and try fewer cluster.spark.workers",
    )


def _too_few(nodes: int, room: Room) -> ClusterError:
    return ClusterError(
        f"Only {nodes} Ray nodes came up on Spark",
        got=str(room),
        rule="Something else may hold the executors' cores, or a node failed: see their logs",
        fix="Set cluster.spark.workers to fewer, or wait for the other Spark jobs",
    )
