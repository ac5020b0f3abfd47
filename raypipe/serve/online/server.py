"""`raypipe serve`: the champion behind HTTP, on Ray Serve.

What each part does:

    client -> uvicorn -> front.py -> app.py -> batching.py -> the model      in each replica
                                        |
                        models.py (follows the alias), request_log.py, metrics.py
                                        |
    registry.py, one actor: asks MLflow which version is wanted              one for all replicas

**Ray Serve keeps the processes.** It starts the replicas on the nodes of the cluster, checks their
health, replaces those that die, and ends them with grace.

**Requests do not pass through Ray.** Each replica listens on the port itself (SO_REUSEPORT: the
kernel shares connections out). Ray Serve's proxy is not started. So a node answers only if it has a
replica.

**A promotion is no deployment.** An update of Ray Serve stops replicas, and one that fails has lost
requests (ray PR #66252). So nothing is deployed when the alias moves: each replica loads the new
version beside the old one and switches between two batches. A version that does not load changes
nothing; it is reported in /ready, /metrics and the log.

**Costs.** While a version loads, a replica holds two models. Limits of rate and queue are those of
one replica. A replica that is killed takes its open connections with it: their clients must ask
again.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from raypipe.cluster import ray_private
from raypipe.cluster.folder import require_shared
from raypipe.cluster.resources import resources_by_node
from raypipe.config import RunConfig
from raypipe.errors import ClusterError, ConfigError, RaypipeError, one_line
from raypipe.files import file_lock, in_name
from raypipe.models.labels import Kind
from raypipe.monitor.recorder import Keeping
from raypipe.registry import fetching, promote, tracking
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve.online import metrics, token
from raypipe.serve.online.registry import Registry, pinned
from raypipe.serve.online.replica import Replica, Setup, grace_s
from raypipe.serve.online.settings import ServeConfig
from raypipe.serve.signals import Stop
from raypipe.tables.address import resolve

log = logging.getLogger("raypipe")
LOOK_S = 1.0  # between two looks at what the replicas report
SILENT_S = 10.0  # without any report, until it is said
STARTS_S = 30.0  # for all replicas to start, until it is said that they have not
DELETE_LOOK_S = 0.2
DELETED_S = 20.0  # for Ray Serve to forget an application whose replicas had their time to end


@dataclass(frozen=True)
class Checked:
    """What `check` found. token_digest: the token's hash; None where none is asked for."""

    model: ModelVersion
    task: Kind
    token_digest: str | None


@dataclass(frozen=True)
class Server:
    """A server that answers. name: of its application. requests: the root of its request log.
    follow_s: between two reports of a replica."""

    name: str
    address: str
    model: ModelVersion
    requests: str
    token: bool
    registry: Any
    replica: Any
    follow_s: float = 0.0

    def reports(self) -> dict[str, Mapping[str, str]]:
        """What each replica serves, and what it could not load."""
        reports: dict[str, Mapping[str, str]] = self.registry.reports.remote().result(timeout_s=30)
        return reports

    def condition(self) -> str:
        """What Ray Serve says of the server, on one line."""
        try:
            return _condition(self.name)
        except Exception as e:
            return f"Ray Serve does not answer: {one_line(e)}"


def check(run: RunConfig, registry: RegistryConfig, cfg: ServeConfig) -> Checked:
    """All that can be wrong before anything is started.

    Raises ConfigError for the token, the address and a port in use, DataError where there is no
    champion or its package is not what was registered.
    """
    # The cheap checks first; the package is read at the end.
    digest = token.digest_of(cfg)
    _require_port(cfg)
    return _checked(run, registry, cfg, digest)


def _checked(
    run: RunConfig, registry: RegistryConfig, cfg: ServeConfig, digest: str | None
) -> Checked:
    store = open_store(run, registry)
    version = promote.require_champion(store) if cfg.version is None else pinned(store, cfg.version)
    package = fetching.fetch(store, version)
    return Checked(version, package.task.kind, digest)


@contextmanager
def running(
    run: RunConfig,
    registry: RegistryConfig,
    cfg: ServeConfig,
    keepings: tuple[Keeping, ...] = (),
    stop: Stop | None = None,
) -> Iterator[Server]:
    """A server on the cluster that this process is connected to; it stops when the block ends.

    Running requests get their answers, and the request log is written. keepings: where each
    replica keeps counts of its requests; on several nodes a place that all share. stop: what ends
    the wait for replicas, which may be long where others hold the CPUs.

    Raises what `check` does, ConfigError for a request log that other nodes do not share,
    ClusterError if the replicas have no room, or do not start, and RaypipeError if `stop` came
    first.
    """
    from ray import serve

    checked = check(run, registry, cfg)
    with _reserved(cfg):
        setup = _setup(checked, run, cfg, cfg.port or _free_port(cfg.host), keepings)
        _require_room(cfg.replicas, setup.workers)
        name = f"raypipe-{setup.server}"
        # Ray Serve ends what it has begun only if it is told to: after Ctrl-C as after an error.
        try:
            _start_serve()
            handle = _deployed(_application(setup, run, registry), name, stop or Stop())
            host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
            desk = serve.get_deployment_handle("registry", name)
            asks = checked.token_digest is not None
            address = f"http://{host}:{setup.port}"
            yield Server(
                *(name, address, checked.model, setup.requests, asks, desk, handle, cfg.follow_s)
            )
        finally:
            _delete(name, grace_s(cfg))
            metrics.remove(setup.server)


def application(run: RunConfig, registry: RegistryConfig, cfg: ServeConfig) -> Any:
    """What `running` deploys, for who deploys it otherwise, as KubeRay's RayService.

    Nothing is started here. The port is not looked at: an update is built while replicas of the
    last one listen. Raises what `check` does otherwise, and ConfigError for serve.port=0.
    """
    if not cfg.port:
        raise ConfigError(
            "The port of a deployed server has to be known",
            got="serve.port=0",
            fix="Set serve.port, and name the same port in the service",
        )
    checked = _checked(run, registry, cfg, token.digest_of(cfg))
    return _application(_setup(checked, run, cfg, cfg.port), run, registry)


def _setup(
    checked: Checked,
    run: RunConfig,
    cfg: ServeConfig,
    port: int,
    keepings: tuple[Keeping, ...] = (),
) -> Setup:
    """What replicas are given. Raises ConfigError for a request log that nodes do not share."""
    server = uuid.uuid4().hex[:12]
    # The run's path is absolute already.
    requests = resolve(cfg.requests) if cfg.requests else str(run.path / "requests")
    setup = Setup(
        server, cfg, checked.task, port, _workers(cfg), checked.token_digest, requests, keepings
    )
    if cfg.keep > 0 and "://" not in requests:
        fix = "Set serve.requests to a place that all nodes share, or serve.keep=0"
        require_shared(Path(requests), {"CPU": setup.workers}, "serve.requests", fix)
    return setup


def wait(server: Server, say: Callable[[str], None], stop: Stop) -> None:
    """Until `stop` is set: tell what the replicas load and refuse."""
    told = {"champion": [str(server.model)]}
    heard_at, is_silent = time.monotonic(), False
    # A registry that has started again knows a replica when it asks the next time.
    patience_s = SILENT_S + server.follow_s
    while not stop.wait(LOOK_S):
        reports: Mapping[str, Mapping[str, str]] = {}
        # A replica or the registry may be starting again.
        with suppress(Exception):
            reports = server.reports()
            _tell(reports, told, say)
        if reports:
            if is_silent:
                say("replicas: one answers again")
            heard_at, is_silent = time.monotonic(), False
        elif not is_silent and time.monotonic() - heard_at >= patience_s:
            say(f"replicas: none answers any more. {server.condition()}")
            is_silent = True


def _application(setup: Setup, run: RunConfig, registry: RegistryConfig) -> Any:
    """The two deployments: the registry, and the replicas that ask it."""
    from ray import serve

    # A worker's current folder is that of `ray start`: there relative paths are others.
    run = run.model_copy(update={"dir": str(run.path)})
    registry = tracking.absolute(registry)
    # One actor asks MLflow for all replicas. It needs no CPU of its own. It runs on this node,
    # where the store was opened just now: its file may be on no other.
    cfg = setup.cfg
    desk = serve.deployment(Registry).options(
        name="registry",
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0, "resources": _here()},
    )
    # Threads of torch are the batcher's to choose.
    environment = metrics.environment(setup.server) | {"OMP_NUM_THREADS": "1"}
    replicas = serve.deployment(Replica).options(
        name="replica",
        num_replicas=cfg.replicas,
        graceful_shutdown_timeout_s=grace_s(cfg),
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        ray_actor_options={
            "num_cpus": setup.workers,
            "runtime_env": {"env_vars": environment},
        },
    )
    return replicas.bind(setup, desk.bind(run, registry, cfg))


def _here() -> dict[str, float]:
    """A resource that this node has and no other."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == here]
    return {f"node:{node['NodeManagerAddress']}": 0.001}


def _workers(cfg: ServeConfig) -> int:
    """Threads that predict in a replica: its CPUs."""
    import ray

    if cfg.cpus is not None:
        return cfg.cpus
    cpus = [node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]]
    return max(1, int(max(cpus, default=1)) // cfg.replicas)


def _require_room(replicas: int, cpus: int) -> None:
    """Raise ClusterError if the replicas do not fit: Ray Serve would wait without a word.

    A cluster that others started may grow, so there it is only said. It is said, too, where the
    replicas would fit if others did not hold the CPUs.
    """
    needed = f"serve.replicas={replicas}, with {cpus} CPUs each"
    nodes = [int(node.get("CPU", 0)) for node in resources_by_node()]
    fit = sum(have // cpus for have in nodes)
    if fit < replicas:
        error = ClusterError(
            "The cluster has no room for the replicas",
            got=needed,
            rule=f"There is room for {fit}: its nodes have {', '.join(map(str, nodes))} CPUs",
            fix="Set serve.replicas or serve.cpus lower",
        )
        if ray_private.own_processes(["raylet"]) is not None:
            raise error
        log.warning("%s Unless it grows, the server waits", error)
        return
    free = [int(node.get("CPU", 0)) for node in ray_private.free_resources().values()]
    if sum(have // cpus for have in free) < replicas:
        log.warning(
            "Others hold CPUs of the cluster, and the server waits for room: %s; free on its "
            "nodes: %s. SIGTERM or Ctrl-C ends the wait",
            needed,
            ", ".join(map(str, free)),
        )


def _start_serve() -> None:
    """Start Ray Serve on this cluster, unless it runs; without its proxy, which nobody needs."""
    from ray import serve

    # What it says at every step is for who writes deployments.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def _deployed(application: Any, name: str, stop: Stop) -> Any:
    """A handle of the application, when all its replicas run.

    Raises ClusterError if they do not start, and RaypipeError if `stop` is set before.
    """
    from ray import serve

    # `serve.run` would wait by itself, for ever where there is no room, and hear no signal.
    target = serve.RunTarget(application, name=name, route_prefix=None)
    try:
        (handle,) = serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        began, said = time.monotonic(), ""
        while not stop.wait(LOOK_S):
            status = _status(name)
            if status == "RUNNING":
                return handle
            if status in ("", "DEPLOY_FAILED"):
                raise _not_started(_condition(name))
            # Where some replicas start and others do not, Ray Serve tries for ever.
            if time.monotonic() - began >= STARTS_S and (now := _condition(name)) != said:
                log.warning("The server has not started yet: %s", now)
                said = now
    except ClusterError:
        raise
    except Exception as e:
        raise _not_started(one_line(e)) from e
    raise RaypipeError(
        "The server was asked to end before its replicas had started", got=_condition(name)
    )


def _status(name: str) -> str:
    """Ray Serve's word for the state of an application; "" for one that it does not know."""
    from ray import serve

    found = serve.status().applications.get(name)
    return "" if found is None else found.status.value


def _condition(name: str) -> str:
    """The state of an application, and why, in Ray Serve's words on one line."""
    from ray import serve

    found = serve.status().applications.get(name)
    if found is None:
        return "Ray Serve knows it no more: others have ended it"
    # A deployment says more than the application. Of a traceback, the last line is the error.
    said = [each.message for each in found.deployments.values() if each.message] or [found.message]
    lasts = [text.strip().splitlines()[-1] for text in said if text.strip()]
    return one_line("; ".join([found.status.value, *lasts]))


def _delete(name: str, within_s: float) -> None:
    """End the replicas with grace, and Ray Serve too if it has nothing else to do."""
    from ray import serve

    with suppress(Exception):
        serve.delete(name, _blocking=False)
        until = time.monotonic() + within_s + DELETED_S
        while _status(name) and time.monotonic() < until:
            ray_private.end_waiting_replicas(name)
            time.sleep(DELETE_LOOK_S)
    with suppress(Exception):
        if not serve.status().applications:
            serve.shutdown()


def _tell(
    reports: Mapping[str, Mapping[str, str]], told: dict[str, list[str]], say: Callable[[str], None]
) -> None:
    """Say what is new in the reports of the replicas; replicas that agree are one line.

    told: what they say now, by its name, and what was said last of it at the end.
    """
    now: dict[str, dict[str, str]] = {}  # by name: each text, and the champion beside it
    for report in reports.values():
        for what, text in report.items():
            now.setdefault(what, {}).setdefault(text, report.get("champion", ""))
    for what, texts in now.items():
        before = told.get(what, [])
        # Two replicas may differ for long, where one of them cannot load the new version.
        kept = [text for text in before if text in texts]
        new = [text for text in texts if text not in before]
        told[what] = [*kept, *new]
        # Where nobody reports any more what was said last, the one before it is news.
        if not new and kept[-1] != before[-1]:
            new = kept[-1:]
        for text in new:
            stays = f"; {texts[text]} stays" if what.endswith("problem") else ""
            say(f"{what}: {text}{stays}")
    # What nobody reports any more may come again, and is news then. A champion never leaves.
    for what in [name for name in told if reports and name not in now and name != "champion"]:
        del told[what]
        if not what.endswith("problem"):
            say(f"{what}: none")


def _require_port(cfg: ServeConfig) -> None:
    """Raise ConfigError if somebody listens on the port, or nobody may."""
    if not cfg.port:
        return
    # Without SO_REUSEPORT: with it, another server of ours would share its requests.
    try:
        with _bound(cfg.host, cfg.port):
            pass
    except OSError as e:
        raise ConfigError(
            f"The port cannot be used: {e.strerror or e}",
            got=f"{cfg.host}:{cfg.port}",
            fix="Set serve.port to another one, or to 0 for a free one",
        ) from None


@contextmanager
def _reserved(cfg: ServeConfig) -> Iterator[None]:
    """Keep the port from other servers of this user on this host. Raises ConfigError if one has it.

    Replicas listen with SO_REUSEPORT, seconds after `_require_port` has looked: of two servers that
    start at once, both would listen, and each request would go to one of the two.
    """
    if not cfg.port:
        yield
        return
    name = in_name(f"raypipe-serve-{os.getuid()}-{cfg.host}-{cfg.port}.lock")
    lock = file_lock(Path(tempfile.gettempdir()) / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            "The port cannot be used: another raypipe serve has it",
            got=f"{cfg.host}:{cfg.port}",
            fix="Set serve.port to another one, or to 0 for a free one",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _free_port(host: str) -> int:
    with _bound(host, 0) as sock:
        return int(sock.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _not_started(why: str) -> ClusterError:
    what = f"The server did not start: {why}"
    # An error of ours on a replica names its own way out.
    if "ConfigError: " in why or "DataError: " in why:
        return ClusterError(what)
    return ClusterError(
        what,
        rule="Each replica needs its CPUs, and the model of its alias",
        fix="Set serve.cpus or serve.replicas lower, or see Ray's logs in "
        "/tmp/ray/session_latest/logs/serve",
    )
