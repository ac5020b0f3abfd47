"""Joins a Ray cluster that runs, or starts one on this machine; the defaults are safe.

`address: auto` takes the first of these:

1. in a submitted job, the job's own cluster (`of_job.py`), else RAY_ADDRESS;
2. a cluster that `ray start` left running on this host for everybody (`shared.py`);
3. a local cluster, which is started here and ends with this process.

It never joins another program's private cluster, because that ends with its program. Two clusters
on one host break Ray Train's placement-group cleaner (measured: later trials starve 60 s) unless
RAY_ADDRESS says which one is meant. So every process of a cluster that raypipe starts has
RAY_ADDRESS (`worker.py`).

Token authentication is on at both ends, the dashboard listens on loopback only, usage statistics
are off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from raypipe import failures, guard
from raypipe.cluster import head, ray_private, sidecar, spark, spark_session, watch
from raypipe.cluster.of_job import lift_thread_limit, own_cluster
from raypipe.cluster.shared import shared_cluster
from raypipe.cluster.sidecars import archive
from raypipe.cluster.spark import SparkConfig
from raypipe.config import Section
from raypipe.errors import ClusterError, one_line

log = logging.getLogger("raypipe")
PRELOAD = "RAY_preload_python_modules"
WORKER = "raypipe.cluster.worker"
WORKER_PRELOAD = "RAYPIPE_PRELOAD"  # read by WORKER, which is too small to import this module
# The address of the cluster that this process started, and RAY_ADDRESS before.
_own: list[tuple[str, str | None]] = []
_stop_watches: list[Callable[[], None]] = []  # functions that stop watching it

ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster of `ray start` would send one report that says that reports are off (Ray 2.60,
    # ray/dashboard/modules/usage_stats). Nothing listens there.
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    # A report waits for a poll: 2 s each by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    # With verbose=0 the old reporter is silent; the new one prints tables.
    "RAY_AIR_NEW_OUTPUT": "0",
    # Results go to MLflow. Three more copies of them would cost time on every report.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # How long a thread of OpenMP spins at a barrier before it sleeps. By default it is longer:
    # where anything else runs, each barrier of a step waits for a core that spins.
    # benchmarks/spin.py measures both.
    "GOMP_SPINCOUNT": "10000",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # With a server it prints two lines of addresses a run, also where stdout has JSON alone.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}


class ClusterConfig(Section):
    """Which Ray cluster to use. All but `address` and `bring` is about one that starts here."""

    address: str = "auto"
    """auto: a Ray cluster that runs, else a new one on this host. local: always a new one.
    host:port: this cluster. spark: Ray on the executors of the Spark application of this process,
    as on Databricks. none: no Ray, only fine-tuning by one worker. ray:// (Ray Client) is refused:
    Ray Train cannot run over it."""

    spark: SparkConfig = SparkConfig()
    """The size of Ray with cluster.address=spark."""

    dashboard: bool = False
    """Run Ray's dashboard, on loopback. It takes time from trainings that use all CPUs."""

    cpus: int | None = Field(default=None, ge=1)
    """CPUs of the local cluster. null: Ray's own choice, which is all."""

    object_store_mb: int | None = Field(default=None, ge=80)
    """Size of Ray's object store in MiB, on each node. null: Ray's own choice."""

    sidecars: str | None = None
    """An archive of `raypipe sidecars pack`, from which nodes without internet build fastdup's and
    Alibi Detect's environments: a path that every node sees, or s3://, gs://, az://, abfss://. With
    #sha256=… behind it, nodes refuse any other content. null: RAYPIPE_SIDECARS, else a package
    index."""

    usage_every_s: float | None = Field(default=5.0, ge=1)
    """Seconds between two readings of CPU, memory, disk, network and GPUs of each node while a
    training or a search runs. MLflow's system metrics and the summary show them. null: none."""

    bring: tuple[str, ...] = ()
    """Files and folders below the current folder that --submit sends too, also what Git ignores,
    but no `.env`. It always sends raypipe, the configuration, `file:` models, and sources of the
    kind python."""

    @field_validator("sidecars")
    @classmethod
    def _archive(cls, address: str | None) -> str | None:
        if address is not None:
            archive.check(address)
        return address


def prepare_environment() -> None:
    """Set the switches in ENV, which Ray and MLflow read at import; the user's own values win."""
    lift_thread_limit()
    for name, value in ENV.items():
        os.environ.setdefault(name, value)


def connect(cfg: ClusterConfig, needed: bool = True, preload: str = "") -> dict[str, float]:
    """Connect once per process; returns the cluster's resources by name.

    A process that is connected already stays so, whatever cfg.address says. With
    cluster.address=none and no connection, these are the resources of this process. On a local
    cluster that is started here, worker processes that start in advance import the modules
    `preload` (a,b).

    Raises ClusterError with the address and a fix; also if a cluster is `needed` but none is to be.
    """
    prepare_environment()
    sidecar.take_from(cfg.sidecars)
    import ray

    if not ray.is_initialized():
        _forget()
    _require_address(cfg, needed)
    if cfg.address != "none" and not ray.is_initialized():
        ray_private.errors_to_stderr()
        _init(cfg, preload)
        failures.note_sigterm()
        _quiet_data()
        _stop_watches.append(watch.start(guard.abort, spark.find_ended))
    if ray.is_initialized():
        return {name: float(value) for name, value in ray.cluster_resources().items()}
    import torch

    # One worker trains in this process.
    return {"CPU": 1.0, "GPU": float(torch.cuda.is_available())}


def _require_address(cfg: ClusterConfig, needed: bool) -> None:
    if cfg.address == "none" and needed:
        raise ClusterError(
            "This verb needs a cluster", got="cluster.address=none", fix="Set cluster.address=auto"
        )


def expected(cfg: ClusterConfig, needed: bool = True) -> tuple[dict[str, float], int, str]:
    """The resources that `connect` would give, on how many nodes, and where; starts no cluster.

    A cluster that runs is joined and asked. Raises ClusterError if it cannot be, and as `connect`
    does if a cluster is `needed`.
    """
    prepare_environment()
    _require_address(cfg, needed)
    import ray

    if not ray.is_initialized():
        _forget()
    address = _address(cfg)
    starts = address in ("local", "none", "spark") and not ray.is_initialized()
    if not starts:
        resources = connect(cfg, needed)
        count = nodes()
        return resources, count, f"the cluster at {address}, {count} node{'s' * (count > 1)}"
    import torch

    cpus = 1 if address == "none" else cfg.cpus or os.cpu_count() or 1
    here = {"CPU": float(cpus), "GPU": float(torch.cuda.device_count())}
    if address == "spark":
        return here, 1, "a Ray cluster that Spark will start; measured as if it were this machine"
    return here, 1, "this machine"


def nodes() -> int:
    """How many machines the cluster has; 1 where none is joined.

    What a node costs is paid once for each of them. On Spark, several of Ray's nodes run on one.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    return max(1, len({node["NodeManagerAddress"] for node in alive}))


def close() -> None:
    """Leave the cluster; one that this process started, here or on Spark, stops."""
    import ray

    _stop_watching()
    if ray.is_initialized():
        ray.shutdown()
    spark.stop()
    spark_session.close()
    _forget()


def _stop_watching() -> None:
    while _stop_watches:
        stop = _stop_watches.pop()
        stop()


def _forget() -> None:
    """Clusters that this process has left, by `close` or by ray.shutdown in a notebook: a later
    `connect` must not look for one that is gone. RAY_ADDRESS is the user's again.
    """
    _stop_watching()
    while _own:
        address, before = _own.pop()
        if os.environ.get("RAY_ADDRESS") == address:
            del os.environ["RAY_ADDRESS"]
            if before is not None:
                os.environ["RAY_ADDRESS"] = before
            log.debug("Stopped the Ray cluster at %s", address)


def _init(cfg: ClusterConfig, preload: str) -> None:
    """Join or start the cluster of `cfg.address`. Raises ClusterError."""
    import ray

    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = _address(cfg)
    if address not in ("local", "spark"):
        head.require(address, _setting(cfg, address))
    try:
        if address == "spark":
            spark.start(cfg.spark, cfg.object_store_mb, cfg.dashboard)
        elif address == "local":
            # Processes that are started from here join this cluster, not a second one.
            before = os.environ.pop("RAY_ADDRESS", None)
            try:
                own = _start_here(cfg, preload, options)
            except BaseException:
                # It is the user's still.
                if before is not None:
                    os.environ["RAY_ADDRESS"] = before
                raise
            os.environ["RAY_ADDRESS"] = own
            _own.append((own, before))
        else:
            ray.init(address=address, **options)
    except ClusterError:
        raise
    except Exception as e:
        raise _connection_error(address, e) from e
    # Ray leaves its token readable by everyone. It may be mounted, or there is none.
    with suppress(OSError, RuntimeError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)
    log.info("Ray cluster at %s with %g CPUs", address, ray.cluster_resources().get("CPU", 0))


def _address(cfg: ClusterConfig) -> str:
    """HOST:PORT of the cluster to join, else local, spark or none. Raises ClusterError."""
    if cfg.address != "none":
        head.require_token()
    if cfg.address != "auto":
        return cfg.address
    return _of_job() or _ray_address() or shared_cluster() or "local"


def _setting(cfg: ClusterConfig, address: str) -> str:
    """Which setting named this address."""
    is_own = cfg.address == "auto" and os.environ.get("RAY_ADDRESS") == address
    return "RAY_ADDRESS" if is_own else "cluster.address"


def _connection_error(address: str, error: Exception) -> ClusterError:
    reason = one_line(error)
    if address == "local":
        return ClusterError(
            f"Ray cannot be started here: {reason}",
            rule="It needs memory, room in /tmp and free ports; "
            "its logs are in /tmp/ray/session_latest/logs",
            fix="Run the same command again, or set RAY_ADDRESS to a cluster that runs",
        )
    return ClusterError(
        f"Cannot join a Ray cluster: {reason}",
        got=address,
        rule="RAY_AUTH_MODE=token must be set where the cluster was started and here, "
        "with the same ~/.ray/auth_token",
        fix="Set cluster.address=local to start one here",
    )


def _start_here(cfg: ClusterConfig, preload: str, options: dict[str, Any]) -> str:
    """Start Ray on this machine for this process alone; returns its address.

    If Ray times out while it starts, one more attempt is made.
    """
    import ray

    prepare_workers(preload)
    if not cfg.dashboard:
        # Only the dashboard shows metrics.
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
    size = {
        "num_cpus": cfg.cpus,
        "object_store_memory": cfg.object_store_mb * 2**20 if cfg.object_store_mb else None,
        "include_dashboard": cfg.dashboard,
        "dashboard_host": "127.0.0.1",
    }

    def start() -> str:
        with ray_private.without_usage_module():
            return str(ray.init(address="local", **size, **options).address_info["address"])

    before = set(_children())
    try:
        return start()
    except Exception as e:
        # Ray leaves the processes that it had started.
        for process in set(_children()) - before:
            process.kill()
        # Ray waits 30 s and has no setting for it.
        if "timed out during startup" not in str(e):
            raise
        log.info("Ray did not start within 30 s, as happens on a busy machine; trying once more")
    return start()


def prepare_workers(preload: str) -> None:
    """Worker processes of the cluster that starts next begin with the module WORKER, and those
    that start in advance import the modules `preload` (a,b)."""
    modules = [*os.environ.get(PRELOAD, "").split(","), WORKER]
    os.environ[PRELOAD] = ",".join(dict.fromkeys(filter(None, modules)))
    os.environ[WORKER_PRELOAD] = preload


def _children() -> list[Any]:
    import psutil  # type: ignore[import-untyped]

    return list(psutil.Process().children())


def _of_job() -> str | None:
    """The cluster whose job this process is, also for what Ray starts from here; else None."""
    address = own_cluster()
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    return address


def _ray_address() -> str:
    """RAY_ADDRESS if it names one cluster, else "".

    `auto` is Ray's word for any cluster, private ones too. http://… is the dashboard's address,
    which `ray job submit` wants in the same variable.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "auto" or address.startswith(("http://", "https://")) else address


def _quiet_data() -> None:
    """Silence Ray Data, Train and Tune. Callers get their errors as exceptions."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # A wrapped DataError would lose its class.
    context.raise_original_map_exception = True
    # Not on the screen; Ray's log file still gets the stack of an error.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)
    for name in ("ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
