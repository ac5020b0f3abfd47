"""What the executors of a Spark application run on, and how many tasks they have room for.

Ray asks Spark to run a task of the wanted size, which hangs without a word if no executor is large
enough (run in Ray 2.60). A stage of barrier tasks waits ten minutes. So the room is counted from
the executors that have come up, before anything starts.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from raypipe.cluster.spark_session import Purpose
from raypipe.errors import ClusterError, one_line

EXECUTORS_S = 60  # a new application's executors come one after the other
STEADY_S = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What is asked for, cpus and gpus for each worker; None: what there is."""

    workers: int | None
    cpus: int | None
    gpus: int | None


@dataclass(frozen=True)
class Room:
    """What there is room for, cpus and gpus for each worker."""

    workers: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPUs" if self.gpus else ""
        return f"{self.workers} workers of {self.cpus} CPUs{gpus}"


@dataclass(frozen=True)
class Node:
    """What an executor runs on. path: its PATH, with the folder of its `ray`."""

    python: str
    ray: str
    path: str
    gpus: int


@dataclass(frozen=True)
class Executors:
    """What has come up; cpus and gpus of each."""

    count: int
    cpus: int
    gpus: int


def ask(session: Any, tell: Callable[[int], T], purpose: Purpose) -> T:
    """What `tell(1)` returns on an executor. Raises ClusterError if none can run it."""
    master = _context(session, purpose).master
    if master == "local" or master.startswith("local["):
        raise ClusterError(
            f"This Spark has no executors for {purpose.who}",
            got=f"master {master}",
            fix=f"Set {purpose.alone}: one machine needs no Spark",
        )
    try:
        return session.sparkContext.parallelize([1], 1).map(tell).collect()[0]
    except Exception as e:
        raise ClusterError(
            f"A Spark executor cannot run a Python task: {one_line(e)}",
            rule="Its Python must be this one's version, with raypipe installed",
            fix="Set PYSPARK_PYTHON to the Python of the nodes",
        ) from e


def look(session: Any, purpose: Purpose) -> Node:
    """Run a task on an executor. Raises ClusterError if its Python cannot run a Ray node."""
    import ray

    node = Node(*ask(session, _tell, purpose))
    own = (".".join(platform.python_version_tuple()[:2]), ray.__version__)
    if (node.python, node.ray) != own:
        raise ClusterError(
            "The Spark executors cannot run Ray nodes of this driver",
            got=f"Python {node.python}, Ray {node.ray or 'none'}",
            rule=f"Python {own[0]}, Ray {own[1]} and raypipe as here",
            fix="Install raypipe there, and set PYSPARK_PYTHON to that Python",
        )
    return node


def _tell(_: int) -> tuple[str, str, str, int]:
    """On an executor: the parts of its Node."""
    version = ".".join(platform.python_version_tuple()[:2])
    path = os.environ.get("PATH", "")
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    try:
        import ray
    except ImportError:
        return version, "", path, gpus
    if shutil.which("ray") is None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    return version, ray.__version__, path, gpus


def _context(session: Any, purpose: Purpose) -> Any:
    try:
        return session.sparkContext
    except Exception as e:
        raise ClusterError(
            f"{purpose.who} needs Spark's own driver, not Spark Connect: {one_line(e, 120)}",
            rule="Serverless and shared clusters of Databricks have none",
            fix="Use a single-user (dedicated) cluster",
        ) from e


def room_of(
    session: Any, wanted: Wanted, gpus: int, purpose: Purpose, may_grow: bool = True
) -> Room:
    """What fits, once the executors have come up. Raises ClusterError if that is too little.

    gpus: of an executor's machine; Spark's own setting counts before it. may_grow: a Spark that
    grows by itself has room for all workers if one fits.
    """
    conf = session.sparkContext.getConf()
    until = time.monotonic() + EXECUTORS_S
    before, since = None, time.monotonic()
    while True:
        now = _executors(session, gpus)
        if now != before:
            before, since = now, time.monotonic()
        fits = _fits(now, wanted)
        is_enough = fits is not None and fits.workers >= (wanted.workers or 1)
        is_steady = time.monotonic() - since > STEADY_S
        if fits is not None and is_enough and (wanted.workers or is_steady):
            return Room(wanted.workers or fits.workers, fits.cpus, fits.gpus)
        # More executors come when tasks wait: Ray's own wait decides.
        if fits is not None and wanted.workers and may_grow and _is_elastic(conf):
            return Room(wanted.workers, fits.cpus, fits.gpus)
        if time.monotonic() > until or (is_steady and now.count and fits is None):
            raise _no_room(now, fits, wanted, purpose)
        time.sleep(0.3)


def _executors(session: Any, gpus: int) -> Executors:
    spark = session.sparkContext._jsc.sc()
    conf = session.sparkContext.getConf()
    # The driver is one of them.
    count = len(list(spark.statusTracker().getExecutorInfos())) - 1
    gpus = int(float(conf.get("spark.executor.resource.gpu.amount", str(gpus))))
    if count < 1:
        return Executors(0, 0, gpus)
    # Unless it is set, that is the number of all cores.
    cores = session.sparkContext.defaultParallelism
    if conf.contains("spark.default.parallelism"):
        cores = int(conf.get("spark.executor.cores", "1")) * count
    return Executors(count, max(1, cores // count), gpus)


def _fits(executors: Executors, wanted: Wanted) -> Room | None:
    """As many nodes of the wanted size as fit; None if an executor is too small for one."""
    cpus = wanted.cpus or executors.cpus
    nodes = executors.cpus // cpus if cpus else 0
    if nodes and wanted.gpus:
        nodes = min(nodes, executors.gpus // wanted.gpus)
    if nodes == 0:
        return None
    gpus = executors.gpus // nodes if wanted.gpus is None else wanted.gpus
    return Room(nodes * executors.count, cpus, gpus)


def _is_elastic(conf: Any) -> bool:
    """Does Spark, or Databricks, start executors when tasks wait for them?"""
    scaling = conf.get("spark.databricks.clusterUsageTags.clusterScalingType", "")
    return conf.get("spark.dynamicAllocation.enabled", "false") == "true" or "auto" in scaling


def _no_room(
    executors: Executors, fits: Room | None, wanted: Wanted, purpose: Purpose
) -> ClusterError:
    asked = Room(wanted.workers or 1, wanted.cpus or executors.cpus, wanted.gpus or 0)
    offer = f"{executors.count} executors of {executors.cpus} CPUs and {executors.gpus} GPUs"
    if executors.count == 0:
        return ClusterError(
            "Spark has no executors",
            rule=f"None came up within {EXECUTORS_S} s",
            fix="See Spark's own log: its cluster may be full, or its master not reachable",
        )
    room = "no such worker" if fits is None else f"{fits.workers} of them"
    return ClusterError(
        f"Spark has too little room for {purpose.who}",
        got=str(asked),
        rule=f"There are {offer}, which have room for {room}",
        fix=f"Lower {purpose.fewer}, or give Spark more executors or cores",
    )
