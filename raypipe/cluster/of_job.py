"""The cluster that a submitted job belongs to.

Ray gives a job's process RAY_ADDRESS. It takes the address of the cluster that was started last on
that host, whoever started it: where two run there, a job of one runs on the other, without a word
(Ray 2.56: JobSupervisor asks for "auto"). Only the path of the job's log names the right session.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from raypipe.cluster import ray_private

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SESSION = re.compile(r"/(session_[^/]+)/logs/job-driver-")


def own_cluster() -> str | None:
    """The address of the cluster whose job this process is; None outside of a job."""
    session = _session() if JOB_CONFIG in os.environ else None
    return ray_private.address_of_session(session) if session else None


def _session() -> str | None:
    """The name of the Ray session that runs this job: its output goes to the session's logs."""
    for output in (1, 2):
        with suppress(OSError):
            found = _SESSION.search(str(Path(f"/proc/self/fd/{output}").readlink()))
            if found:
                return found[1]
    return None
