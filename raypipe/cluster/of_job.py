"""The cluster that a submitted job belongs to, and the threads that its process may use.

Ray gives a job's process RAY_ADDRESS. It takes the address of the cluster that was started last on
that host, whoever started it: where two run there, a job of one runs on the other, without a word
(Ray 2.56: JobSupervisor asks for "auto"). Only the path of the job's log names the right session.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from raypipe.cluster import ray_private

THREADS = "OMP_NUM_THREADS"
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SESSION = re.compile(r"/(session_[^/]+)/logs/job-driver-")


def own_cluster() -> str | None:
    """The address of the cluster whose job this process is; None outside of a job."""
    session = _session() if JOB_CONFIG in os.environ else None
    return ray_private.address_of_session(session) if session else None


def lift_thread_limit() -> None:
    """Give a job's process all threads of its node, unless somebody limited them on purpose.

    Ray starts it from an actor without a CPU, and such an actor and what it starts have
    OMP_NUM_THREADS=1: a training in the job's own process would take one core, without a word. Call
    it before torch is imported. What the job's runtime environment or the node itself sets, stays.
    """
    if JOB_CONFIG not in os.environ or os.environ.get(THREADS) != "1":
        return
    with suppress(ValueError, AttributeError):
        config = json.loads(os.environ[JOB_CONFIG])
        if THREADS in ((config.get("runtime_env") or {}).get("env_vars") or {}):
            return
    if not _node_has(THREADS):
        del os.environ[THREADS]


def _node_has(name: str) -> bool:
    """Was the raylet that started this job itself started with the variable?"""
    import psutil  # type: ignore[import-untyped]

    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if parent.name() == "raylet":
                return name in parent.environ()
    return False


def _session() -> str | None:
    """The name of the Ray session that runs this job: its output goes to the session's logs."""
    for output in (1, 2):
        with suppress(OSError):
            found = _SESSION.search(str(Path(f"/proc/self/fd/{output}").readlink()))
            if found:
                return found[1]
    return None
