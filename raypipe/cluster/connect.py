"""Join the cluster that is there, or start one on this machine; safe by default.

`address: auto` takes RAY_ADDRESS (set inside a submitted job), else a cluster that `ray start` left running on this host for
everybody, else starts a local one. Never another program's private cluster: it ends with that program (`shared.py`).
Two clusters on one host break Ray Train's placement-group cleaner (measured: later trials starve 60 s) unless RAY_ADDRESS
says which is meant, so every process of a cluster that we start has it (`worker.py`).
Token authentication is on at both ends, the dashboard listens on loopback only, usage statistics are off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from raypipe import guard
from raypipe.cluster import watch
from raypipe.cluster.shared import shared_cluster
from raypipe.config import Section
from raypipe.errors import ClusterError

log = logging.getLogger("raypipe")
PRELOAD = "RAY_preload_python_modules"
WORKER = "raypipe.cluster.worker"
_own: list[str] = []  # the address of the cluster that this process started
_watches: list[Callable[[], None]] = []  # how to stop watching it

ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # a report waits for a poll: 2 s each by default
    "RAY_AIR_NEW_OUTPUT": "0",  # with verbose=0 the old reporter is silent, the new one prints tables
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results go to MLflow; three more copies of them cost time on every report
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}


class ClusterConfig(Section):
    """Which cluster. `address` is auto, local, host:port, spark (Ray on the Spark cluster this process drives, as on
    Databricks), or none: a fine-tuning by one worker needs no cluster.

    The rest is about a local one: its size (null: Ray's own choice), and whether Ray's dashboard runs, on loopback; it and its
    metrics take time from trainings that fill the CPUs.
    """

    address: str = "auto"
    dashboard: bool = False
    cpus: int | None = Field(default=None, ge=1)
    object_store_mb: int | None = Field(default=None, ge=80)


def prepare_environment() -> None:
    """Set authentication and telemetry switches that Ray and MLflow read at import; the user's own settings win."""
    for name, value in ENV.items():
        os.environ.setdefault(name, value)


def connect(cfg: ClusterConfig, needed: bool = True, preload: str = "") -> dict[str, float]:
    """Connect once per process; returns the cluster's resources, or this process's where cluster.address is none.

    On a local cluster that is started here, every worker process imports the modules `preload` (a,b) when it starts.
    Raises ClusterError naming the address and the way out, also when a cluster is `needed` and there is to be none.
    """
    prepare_environment()
    import ray

    if cfg.address == "none" and needed:
        raise ClusterError(
            "This needs a cluster", got="cluster.address=none", fix="Set cluster.address=auto"
        )
    if cfg.address != "none" and not ray.is_initialized():
        _init(cfg, preload)
        _quiet_data()
        _watches.append(watch.start(guard.lost))
    if ray.is_initialized():
        return {name: float(value) for name, value in ray.cluster_resources().items()}
    import torch

    return {"CPU": 1.0, "GPU": float(torch.cuda.is_available())}  # of one worker in this process


def close() -> None:
    """Leave the cluster; a local one that we started stops with us."""
    import ray

    while _watches:
        _watches.pop()()
    if ray.is_initialized():
        ray.shutdown()
    while _own:  # what connects next in this process must not look for a cluster that is gone
        if os.environ.get("RAY_ADDRESS") == (gone := _own.pop()):
            del os.environ["RAY_ADDRESS"]
            log.debug("Stopped the Ray cluster at %s", gone)


def _init(cfg: ClusterConfig, preload: str) -> None:
    import ray

    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = cfg.address
    if address == "auto":
        address = _given() or shared_cluster() or "local"
    try:
        if address == "spark":
            ray.init(address=_start_on_spark(), **options)
        elif address == "local":
            # what we start from here joins this cluster, not a second one
            os.environ["RAY_ADDRESS"] = _start_here(cfg, preload, options)
            _own.append(os.environ["RAY_ADDRESS"])
        else:
            ray.init(address=address, **options)
    except Exception as e:
        if address == "local":
            raise ClusterError(
                f"Ray cannot be started here: {' '.join(str(e).split())[:300]}",
                rule="It needs memory, room in /tmp and free ports; its logs are in /tmp/ray/session_latest/logs",
                fix="Run the same command again, or set RAY_ADDRESS to a cluster that runs",
            ) from e
        raise ClusterError(
            f"Cannot join a Ray cluster: {' '.join(str(e).split())[:300]}",
            got=address,
            rule="RAY_AUTH_MODE=token must be set where the cluster was started and here, with the same ~/.ray/auth_token",
            fix="Set cluster.address=local to start one here",
        ) from e
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        token.chmod(0o600)  # Ray leaves it readable by everyone
    log.info("Ray cluster at %s with %g CPUs", address, ray.cluster_resources().get("CPU", 0))


def _start_here(cfg: ClusterConfig, preload: str, options: dict[str, Any]) -> str:
    """Start Ray on this machine for this process alone; returns its address."""
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    modules = [*os.environ.get(PRELOAD, "").split(","), WORKER, *preload.split(",")]
    os.environ[PRELOAD] = ",".join(dict.fromkeys(filter(None, modules)))
    if not cfg.dashboard:
        os.environ.setdefault("RAY_enable_metrics_collection", "0")  # nobody would see them
    size = {
        "num_cpus": cfg.cpus,
        "object_store_memory": cfg.object_store_mb * 2**20 if cfg.object_store_mb else None,
        "include_dashboard": cfg.dashboard,
        "dashboard_host": "127.0.0.1",
    }
    before = set(_children())
    try:
        return str(ray.init(address="local", **size, **options).address_info["address"])
    except Exception as e:
        for process in set(_children()) - before:  # Ray leaves what it had started
            process.kill()
        if "timed out during startup" not in str(e):  # 30 s, which Ray has no setting for
            raise
        log.info("Ray did not start within 30 s, as happens on a busy machine; trying once more")
    return str(ray.init(address="local", **size, **options).address_info["address"])


def _children() -> list[Any]:
    import psutil  # type: ignore[import-untyped]

    return list(psutil.Process().children())


def _start_on_spark() -> str:
    """Start Ray on every Spark worker and return its address. Stopped with the Spark application."""
    from ray.util.spark import MAX_NUM_WORKER_NODES, setup_ray_cluster

    address, _ = setup_ray_cluster(max_worker_nodes=MAX_NUM_WORKER_NODES)
    os.environ["RAY_ADDRESS"] = address
    return str(address)


def _given() -> str:
    """RAY_ADDRESS where it names one cluster: `auto` is Ray's word for any, private ones too, and http://… is the
    dashboard's address, which `ray job submit` wants in the same variable."""
    given = os.environ.get("RAY_ADDRESS", "")
    return "" if given == "auto" or given.startswith("http") else given


def _quiet_data() -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = (
        True  # a DataError of ours arrives as itself; wrapped, it loses its class
    )
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(
                logging.CRITICAL
            )  # whoever called gets the error itself; Ray's log file keeps its stack
    for name in ("ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
