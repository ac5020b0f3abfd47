"""What Prometheus reads at /metrics.

The replicas of a node add up: prometheus_client keeps their values in files of one folder, and any
replica answers for all of them. A replica that was replaced leaves its counts there. Prometheus
asks each node that has a replica.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it at import
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


def folder(server: str) -> Path:
    """The folder of one server on this node."""
    return Path(tempfile.gettempdir()) / f"raypipe-serve-{server}"


def environment(server: str) -> dict[str, str]:
    """What the processes of replicas need in their environment."""
    return {FOLDER: str(folder(server))}


def remove(server: str) -> None:
    shutil.rmtree(folder(server), ignore_errors=True)


class Metrics:
    """The counters of one replica."""

    def __init__(self) -> None:
        _forget_dead()
        self._registry = CollectorRegistry()
        own = CollectorRegistry()
        self.responses = Counter(
            "raypipe_responses", "Responses by path and status", ["path", "status"], registry=own
        )
        self.predictions = Counter(
            "raypipe_predictions",
            "Predictions by model version and role (champion, challenger, shadow)",
            ["model", "role"],
            registry=own,
        )
        self.shadow_failures = Counter(
            "raypipe_shadow_failures",
            "Shadow predictions that failed or were dropped",
            registry=own,
        )
        self.seconds = Histogram(
            "raypipe_request_seconds",
            "From the request's arrival to its prediction",
            ["model"],
            buckets=SECONDS,
            registry=own,
        )
        self.batch = Histogram(
            "raypipe_batch_images", "Images predicted together", buckets=IMAGES, registry=own
        )
        self.loads = Counter(
            "raypipe_model_loads", "Loaded and refused versions", ["model", "result"], registry=own
        )
        self.log_rows = Counter(
            "raypipe_request_log_rows",
            "Rows of the request log: answers, feedback, or dropped",
            ["kind"],
            registry=own,
        )
        self.in_house = Gauge(
            "raypipe_requests_in_progress",
            "Running requests",
            multiprocess_mode="livesum",
            registry=own,
        )
        self.serving = Gauge(
            "raypipe_model_serving",
            "1 for the versions in use, 0 for those that were",
            ["model", "role"],
            multiprocess_mode="livemax",
            registry=own,
        )
        self._shown: set[tuple[str, str]] = set()
        self._turn = threading.Lock()

    def show(self, serving: Mapping[str, str]) -> None:
        """The versions in use, by role. Others go to 0: where processes add up, prometheus_client
        can remove none."""
        now = {(version, role) for role, version in serving.items()}
        with self._turn:
            for gone in self._shown - now:
                self.serving.labels(*gone).set(0)
            for one in now:
                self.serving.labels(*one).set(1)
            self._shown |= now

    def text(self) -> bytes:
        """All replicas of this node, in Prometheus' text format."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def _forget_dead() -> None:
    """Remove the gauges of replicas that are gone: they would count as living."""
    where = Path(os.environ[FOLDER])
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in where.glob("gauge_live*_*.db"):
        pid = file.stem.rpartition("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            file.unlink(missing_ok=True)
