"""Ray's private names that raypipe needs, all in one file; Ray Tune's stand in tune_patches.py.

An upgrade of Ray may move any of them. tests/cluster/test_ray_private.py tries each on a live
cluster and then names the one that moved. Each door says why no public name does.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


def address_file() -> str:
    """Path of the file in which `ray start` records its cluster.

    The public `ray.init("auto")` reads it too, but also joins private clusters.
    """
    from ray._common.utils import get_ray_address_file

    return str(get_ray_address_file(None))


def is_of_program(address: str) -> bool:
    """Did `ray.init` of some program start this cluster? Only its own metadata says so."""
    from ray._common.usage.usage_lib import is_ray_init_cluster
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return bool(is_ray_init_cluster(GcsClient(address=address)))


def metadata(address: str) -> dict[str, Any]:
    """What a cluster says of itself: ray_version, python_version, ray_init_cluster and others.

    Publicly, a version is compared only while joining, and that reserves what joining reserves.
    """
    from ray._common.usage.usage_lib import get_cluster_metadata
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return dict(get_cluster_metadata(GcsClient(address=address)))


def own_processes(names: Sequence[str]) -> dict[str, list[Any]] | None:
    """The Popen objects of a cluster that this process started, by Ray's name for each kind.

    None if it started no cluster. Publicly, Ray tells no one that its head has died.
    """
    from ray._private import worker

    node = worker._global_node
    if node is None or not node.is_head() or not getattr(node, "ray_init_cluster", False):
        return None
    return {name: [i.process for i in node.all_processes.get(name, [])] for name in names}


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt while Ray Train trains on workers, and afterwards.

    Its own handler (2.60) ends this process with `sys.exit(0)`, and stays when the training is
    over. Nothing public leaves it out.
    """
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    plain = DataParallelTrainer._register_sigint_handler
    DataParallelTrainer._register_sigint_handler = lambda self, controller: None
    try:
        yield
    finally:
        DataParallelTrainer._register_sigint_handler = plain


def errors_to_stderr() -> None:
    """What Ray says of lost workers and nodes goes to stderr; it goes to stdout otherwise.

    stdout has the results of a verb, under --json one line alone. `log_to_driver` and
    `logging_level` of ray.init do not concern these messages.
    """
    from ray._private import worker

    real = worker.print_to_stdstream
    if getattr(real, "goes_to_stderr", False):
        return

    def printed(batch: dict[str, Any], *given: Any, **named: Any) -> Any:
        return real({**batch, "is_err": True}, *given, **named)

    printed.goes_to_stderr = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = printed


def raylet_of(node_id: str) -> Any | None:
    """The raylet of a node as a psutil.Process; None if it runs on another machine.

    No public name says which process it is. Of Ray's processes only the raylet has the flag
    `--node_id`; agents and workers write it `--node-id`.
    """
    import psutil  # type: ignore[import-untyped]

    flag = f"--node_id={node_id}"
    for process in psutil.process_iter(["cmdline"]):
        if flag in (process.info["cmdline"] or []):
            return process
    return None


def free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each node, by its id, without nodes that are being taken away.

    The public list of nodes says what they have, not what is free.
    """
    from ray._private.state import state

    draining = state.get_draining_nodes()
    available = state.available_resources_per_node()
    return {node: resources for node, resources in available.items() if node not in draining}


def end_waiting_replicas(application: str) -> None:
    """End the replicas of an application of Ray Serve that wait for room.

    Ray Serve (2.60) gives each of them its grace, as if it had begun. No public name tells which
    of them wait.
    """
    import ray
    from ray._private.state import actors

    for actor in actors(actor_state_name="PENDING_CREATION").values():
        if actor["Name"].startswith(f"SERVE_REPLICA::{application}#"):
            # It may have gone meanwhile.
            with suppress(ValueError):
                ray.kill(ray.get_actor(actor["Name"], namespace="serve"))


def late_starts() -> tuple[type[Exception], ...]:
    """The errors of a Ray Train group that found no room to start."""
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupFailedError,
        WorkerGroupStartupTimeoutError,
    )

    return WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError


def token_fault() -> str:
    """Why Ray cannot read the token that this process is to use; "" if it can, or there is none.

    Publicly, a file of RAY_AUTH_TOKEN_PATH that is missing or empty aborts the process, with a
    stack of C++.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    except AuthenticationError as e:
        return str(e).partition(". Ensure")[0]
    return ""


def refuses_token(address: str, timeout_s: float) -> bool:
    """Does the head at HOST:PORT refuse the token of this process, or its having none?

    False also where it does not answer. Publicly, `ray.init` tries for 20 s, and prints a line of
    its log for each second.
    """
    import grpc  # type: ignore[import-untyped]
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )
    from ray.exceptions import AuthenticationError

    try:
        headers = get_auth_headers_if_auth_enabled({})
    except AuthenticationError:
        headers = {}  # there is no token, and the head may want none
    token = [(name.lower(), value) for name, value in headers.items()]
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=timeout_s, metadata=token)
        except grpc.RpcError as e:
            return bool(e.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def jobs_client(address: str, timeout_s: float) -> Any:
    """A JobSubmissionClient whose requests end after `timeout_s` without an answer.

    The public one waits for ever where the network swallows packets.
    """
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **named: Any) -> Any:
            return super()._do_request(*args, **{"timeout": timeout_s, **named})

    return Client(address)


def dashboard_of(head: str) -> str:
    """The dashboard's address, which the head at HOST:PORT knows. It waits 35 s for a head."""
    from ray.dashboard.utils import ray_address_to_api_server_url

    return ray_address_to_api_server_url(head)


def address_of_session(session: str) -> str | None:
    """The address of a cluster that has a raylet on this host, by its session's name.

    No public name leads from a session to its cluster. A raylet has both on its command line.
    """
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if not words[0].endswith("/raylet") or not any(session in word for word in words):
            continue
        for word in words:
            if word.startswith("--gcs-address="):
                return word.partition("=")[2]
    return None


@contextmanager
def without_usage_module() -> Iterator[None]:
    """Within it, `ray.init(include_dashboard=False)` leaves out the module of usage reports.

    Reports are off by RAY_USAGE_STATS_ENABLED; the module asks the cloud's metadata services and
    DNS who the host is all the same, for a report that is never sent. No setting leaves it out. The
    process of the dashboard must have some module: it gets one that is off by default.
    """
    from ray._private import services

    real = services.start_ray_process

    def started(command: list[str], *given: Any, **named: Any) -> Any:
        module = "--modules-to-load="
        words = [
            f"{module}PlatformEventsHead" if word == f"{module}UsageStatsHead" else word
            for word in command
        ]
        return real(words, *given, **named)

    services.start_ray_process = started
    try:
        yield
    finally:
        services.start_ray_process = real


# PATH of the Spark executors while Ray starts there; spark_hook.py reads it.
PATH_OF_NODES: list[str] = []


@contextmanager
def spark_start(session: Any, start_head: Callable[..., Any], path: str) -> Iterator[None]:
    """Within it, setup_ray_cluster uses this Spark session and starts its head by `start_head`.

    start_head(command, environment) returns the process and its last lines of output, once it
    listens. path: PATH of the nodes. Publicly, the session must be the thread's active one, the
    dashboard listens everywhere, and the head has 20 s, all of which are waited.
    """
    import ray
    from ray.util.spark import cluster_init, databricks_hook

    # It tells of each node that ends, as all do when Ray is stopped.
    server = logging.getLogger("ray.autoscaler._private.spark.spark_job_server")
    server.propagate = False
    server.addHandler(logging.NullHandler())
    logging.getLogger("ray.util.spark").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Spark session is not provided")

    def head(command: list[str], synchronous: bool, extra_env: dict[str, str]) -> Any:
        return start_head(command, extra_env)

    quiet_init = functools.partial(ray.init, log_to_driver=False, logging_level=logging.ERROR)
    own: list[tuple[Any, str, Any]] = [
        (ray, "init", quiet_init),
        (cluster_init, "get_spark_session", lambda: session),
        (cluster_init, "_start_ray_head_node", head),
        (cluster_init, "_RAY_HEAD_STARTUP_TIMEOUT", 0),
        # Warnings are shown by IPython, which a job's Python file may lack.
        (databricks_hook, "get_databricks_display_html_function", lambda: lambda html: None),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in own]
    PATH_OF_NODES.append(path)
    try:
        for module, name, value in own:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        PATH_OF_NODES.remove(path)


def spark_processes(folder: str) -> tuple[list[Any], list[Any]]:
    """The Ray nodes on this host with this temporary folder, and all of their processes.

    Each is a psutil.Process. When a node has ended, some of its agents look for the head for a
    minute before they end.
    """
    import psutil

    flag = f"--temp-dir={folder}"
    nodes, below = set(), set()
    for process in psutil.process_iter(["cmdline"]):
        if flag in (process.info["cmdline"] or []):
            nodes.add(process)
            with suppress(psutil.Error):
                below |= {*process.children(recursive=True)}
    return list(nodes), list(below - nodes)
