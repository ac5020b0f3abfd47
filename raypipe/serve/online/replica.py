"""One replica: the process that holds the model and answers requests.

Its threads: the event loop with the HTTP server, one worker a CPU (batching.py), one that follows
the alias (models.py), one that writes the request log (request_log.py), one that keeps
counts for Azure Monitor (tally.py).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.cluster import tasks
from raypipe.errors import ConfigError, traced
from raypipe.files import claim
from raypipe.models.allocator import give_back, keep_memory
from raypipe.models.labels import Kind
from raypipe.monitor.recorder import Keeping
from raypipe.serve.online import app as http
from raypipe.serve.online import batching, heads
from raypipe.serve.online.front import Front
from raypipe.serve.online.limits import Rates, Room
from raypipe.serve.online.metrics import Metrics
from raypipe.serve.online.models import Models, Role, Served, Target
from raypipe.serve.online.request_log import Keeper
from raypipe.serve.online.settings import Batching, ServeConfig
from raypipe.serve.online.tally import Tally
from raypipe.tables.request_log import RequestLog, RequestTables

log = logging.getLogger("raypipe")
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 75
ASK_S = 60.0  # to wait for the registry's actor
BIND_S = 10.0  # for the one before to leave the port
WRITE_S = 30.0  # for the request log, at the end


def drain_s(cfg: ServeConfig) -> float:
    """Seconds in which each request whose body has come is answered, or refused with 503."""
    return cfg.timeout_s + 1


def grace_s(cfg: ServeConfig) -> float:
    """Seconds that a replica has to end by itself."""
    return drain_s(cfg) + WRITE_S


@dataclass(frozen=True)
class Setup:
    """What every replica of a server is given.

    task: model.task of the version that was served first. port: never 0. workers: threads that
    predict. requests: the root of the request log. keepings: where counts of requests are kept.
    """

    server: str
    cfg: ServeConfig
    task: Kind
    port: int
    workers: int
    token_digest: str | None
    requests: str
    keepings: tuple[Keeping, ...] = ()


class Asked:
    """The registry's actor, as Models wants it; tells it what this replica serves."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self.report: Mapping[str, str] = {}

    def targets(self) -> Mapping[Role, Target]:
        asked = self._handle.targets.remote(self._name, dict(self.report))
        with tasks.own_errors():
            answer: Mapping[Role, Target] = asked.result(timeout_s=ASK_S)
        return answer

    def files(self, role: Role, version: str) -> Mapping[str, bytes]:
        asked = self._handle.files.remote(role, version)
        with tasks.own_errors():
            answer: Mapping[str, bytes] = asked.result(timeout_s=ASK_S)
        return answer


class Replica:
    """Made by Ray Serve, which calls `check_health` now and then and `__del__` at the end."""

    def __init__(self, setup: Setup, registry: Any) -> None:
        keep_memory()
        cfg = setup.cfg
        self.metrics = Metrics()
        self._asked = Asked(registry)
        roles: tuple[Role, ...] = ("champion", "challenger") if cfg.challenger else ("champion",)
        self.models = Models(self._asked, setup.task, roles, cfg.follow_s, self._tell)
        # Raises where there is no model: the replica does not start, and Ray Serve says why. On a
        # thread, because Ray Serve refuses to wait for another actor on its event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.models.start).result()
        served = self.models.of("champion")
        assert served is not None
        # Measured with this model on this machine, before the first request.
        plan = _plan(cfg, served, setup.workers)
        self._cfg, self._plan = cfg, plan
        # The largest batches were tried, and are mostly not used.
        give_back()
        self.batcher = batching.Batcher(
            self.models, plan, setup.workers, cfg.max_pixels, cfg.challenger is not None
        )
        self.keeper: Keeper | None = None
        if cfg.keep > 0:
            tables = RequestLog(RequestTables.below(setup.requests))
            self.keeper = Keeper(tables, cfg.flush_s, self._count_rows)
        # The HTTP app comes last: it may be asked at once.
        # Any replica answers /metrics for all of the node, so each keeps its own number up to date.
        self.room = Room(cfg.queue, cfg.queue_mb * 2**20, self.metrics.in_house.set)
        self.tally = Tally(setup.keepings, f"{socket.gethostname()}:{os.getpid()}")
        parts = http.Parts(
            cfg,
            self.models,
            self.batcher,
            self.keeper,
            self.metrics,
            self.room,
            self.tally.predicted,
        )
        self.app = Front(
            http.build(parts), Rates(cfg.rate), setup.token_digest, self._version, self._count
        )
        self._server = _listen(self.app, cfg.host, setup.port, drain_s(cfg), _application())
        log.info("Serving %s, %s", served.version, plan)

    def check_health(self) -> None:
        """Raise if this replica cannot answer any more: Ray Serve replaces it."""
        if not self.batcher.alive():
            raise RuntimeError("a worker thread has ended")
        if not self._server.thread.is_alive():
            raise RuntimeError("the HTTP server has ended")

    def status(self) -> dict[str, Any]:
        """For the process that started the server, and for benchmarks."""
        plan = self.batcher.plan
        return {"batching": str(plan), "sizes": plan.sizes, "rates": plan.rates, "pid": os.getpid()}

    def replan(self, batching_as: Batching) -> str:
        """Batch as serve.batching says, from now on; `auto` as it was measured at the start.

        For benchmarks: of two processes with the same code one may be a tenth faster.
        """
        cfg = self._cfg
        plans = {
            "auto": self._plan,
            "on": batching.on(cfg.batch_size, cfg.batch_wait_ms),
            "off": batching.off(),
        }
        self.batcher.plan = plans[batching_as]
        return str(self.batcher.plan)

    def __del__(self) -> None:
        # What still comes is told to go elsewhere, and probes of readiness hear it.
        if hasattr(self, "room"):
            self.room.closed = True
        # The constructor may have failed half way.
        for name in ("_server", "models", "batcher", "keeper", "tally"):
            part = getattr(self, name, None)
            if part is None:
                continue
            try:
                part.stop() if name in ("_server", "models") else part.close()
            except Exception as e:
                log.error("Stopping %s failed: %s", name, traced(e))

    def _version(self) -> str:
        served = self.models.of("champion")
        return served.version if served else ""

    def _count(self, path: str, status: int) -> None:
        self.metrics.responses.labels(path, str(status)).inc()
        if path == "/predict":
            self.tally.answered(self._version(), status)

    def _count_rows(self, kind: str, rows: int) -> None:
        self.metrics.log_rows.labels(kind).inc(rows)

    def _tell(self, version: str, result: str) -> None:
        """A version was loaded or refused, or a role has changed otherwise."""
        if result in ("loaded", "refused"):
            self.metrics.loads.labels(version, result).inc()
        report: dict[str, str] = {}
        roles: tuple[Role, ...] = ("champion", "challenger")
        for role in roles:
            served, problem = self.models.of(role), self.models.problem(role)
            if served is not None:
                report[role] = served.version
            if problem is not None:
                report[f"{role} problem"] = f"{problem.version} is not served: {problem.why}"
        self._asked.report = report
        self.metrics.show({role: report[role] for role in roles if role in report})


def _plan(cfg: ServeConfig, served: Served, workers: int) -> batching.BatchPlan:
    if cfg.batching == "off":
        return batching.off()
    if cfg.batching == "on":
        return batching.on(cfg.batch_size, cfg.batch_wait_ms)
    return batching.measure(served.package, workers, cfg.batch_size)


class _Listening:
    """uvicorn on a thread of its own, with its own event loop."""

    def __init__(self, app: Any, sock: socket.socket, drain_s: float) -> None:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=heads.protocol(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            # Else a client on this machine would name another address with each request, and
            # serve.rate would be none.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        self._drain_s = drain_s
        self._uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self._uvicorn.run, args=([sock],), name="http", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """Stop listening, and wait until the running requests have their answers."""
        self._uvicorn.should_exit = True
        self.thread.join(timeout=self._drain_s + 5)


def _application() -> str:
    """The application of this replica, and its cluster: others of it may share the port."""
    import ray
    from ray import serve

    cluster = ray.get_runtime_context().gcs_address
    return f"{cluster} {serve.get_replica_context().app_name}"


def _listen(app: Any, host: str, port: int, drain_s: float, owner: str) -> _Listening:
    """Listen on the port that all replicas of this node share.

    owner: what they have in common. Raises ConfigError if replicas of another owner listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The kernel hands each new connection to one of the replicas.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    deadline = time.monotonic() + BIND_S
    # With SO_REUSEPORT two servers of one user could listen, and each request would go to one of
    # the two. The one that starts looks at the port of its own node alone, so this node does, too.
    name = Path(tempfile.gettempdir()) / f"raypipe-serve-{host}-{port}"
    while not claim(name, owner):
        if time.monotonic() > deadline:
            sock.close()
            raise ConfigError(
                "The port cannot be used: another raypipe serve has it on this node",
                got=f"{host}:{port} of {socket.gethostname()}",
                fix="Set serve.port to another one, or end the other server",
            )
        time.sleep(0.2)
    while True:
        try:
            sock.bind((host, port))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    sock.listen(BACKLOG)
    sock.set_inheritable(False)
    return _Listening(app, sock, drain_s)
