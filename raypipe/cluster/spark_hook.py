"""What processes on Spark executors get from the driver's environment (`carried`), and Ray's hook.

Ray asks the class Hook while it starts there. Ray's own hook for Databricks needs IPython, which a
job's Python file may lack, and stops the cluster 30 minutes after the last notebook command. This
one keeps the rest of it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ray.util.spark.start_hook_base import RayOnSparkStartHook

from raypipe.cluster.connect import ENV, PRELOAD, WORKER
from raypipe.cluster.ray_private import PATH_OF_NODES

log = logging.getLogger("raypipe")
# Names, or beginnings of names, of what MLflow and the storages read. DATABRICKS_* as a whole would
# make the nodes' own runtime look like the driver's.
CARRIED = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "MLFLOW_",
    "RAYPIPE_",
    "HF_TOKEN",
    "PGPASSWORD",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "DATABRICKS_HOST",
    "DATABRICKS_TOKEN",
    "DATABRICKS_CLIENT_",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)
DATABRICKS = "DATABRICKS_RUNTIME_VERSION"


def carried() -> dict[str, str]:
    """The variables that every process gets, by name: the switches, and credentials."""
    names = [n for n in os.environ if n in ENV or n.startswith(CARRIED)]
    # A machine's own certificates and folders are not the nodes'.
    found = {name: os.environ[name] for name in names if name != "RAYPIPE_HOME"}
    if DATABRICKS in os.environ:
        # As Ray's own hook does: torch would take loopback there.
        found["GLOO_SOCKET_IFNAME"] = "eth0"
    return found


def environment() -> dict[str, str]:
    """The variables that every Ray node gets, by name: `carried` and the token."""
    found = carried()
    modules = [*os.environ.get(PRELOAD, "").split(","), WORKER]
    found[PRELOAD] = ",".join(dict.fromkeys(filter(None, modules)))
    found["RAY_AUTH_TOKEN"] = token()
    if PATH_OF_NODES:
        found["PATH"] = PATH_OF_NODES[-1]
    return found


def token() -> str:
    """The token of this process, where Ray looks for it and in that order."""
    given = os.environ.get("RAY_AUTH_TOKEN")
    if given:
        return given
    file = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(file) if file else Path.home() / ".ray" / "auth_token"
    return path.read_text(encoding="utf-8").strip()


class Hook(RayOnSparkStartHook):
    """Called by ray.util.spark on the Spark driver."""

    def __init__(self, is_global: bool = False) -> None:
        # Ray 2.60 passes nothing to a hook of one's own.
        super().__init__(is_global)

    def get_default_temp_root_dir(self) -> str:
        return "/local_disk0/tmp" if DATABRICKS in os.environ else "/tmp"

    def custom_environment_variables(self) -> dict[str, str]:
        variables = environment()
        if DATABRICKS in os.environ:
            variables["DISABLE_MLFLOW_INTEGRATION"] = "TRUE"
        return variables

    def on_spark_job_created(self, job_group_id: str) -> None:
        if DATABRICKS in os.environ:
            entry: Any = _databricks()
            entry.registerBackgroundSparkJobGroup(job_group_id)


def _databricks() -> Any:
    from ray.util.spark.databricks_hook import get_db_entry_point

    return get_db_entry_point()
