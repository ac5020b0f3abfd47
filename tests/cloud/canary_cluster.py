"""A Ray cluster of `ray start` whose token and whose nodes' environment are canaries, and MLflow's
own server with its own password check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.serve.servers import free_port, mlflow

KINDS = "actors tasks workers nodes jobs runtime_envs objects placement_groups cluster_events"
PAGES = (
    "/api/jobs/",
    "/nodes?view=details",
    "/nodes?view=summary",
    "/logical/actors",
    "/api/v0/tasks/summarize",
    "/api/v0/actors/summarize",
    "/api/cluster_status",
    "/api/serve/applications/",
    "/api/component_activities",
    "/api/ray_version",
    "/api/packages/",
    "/usage_stats_enabled",
    "/timezone",
    "/api/prometheus_health",
    "/events",
    "/api/train/v2/runs",
)


class Dashboard:
    """address: http://127.0.0.1:PORT. folder: everything that Ray writes."""

    def __init__(self, address: str, folder: Path, token: str) -> None:
        self.address, self.folder, self._token = address, folder, token

    def get(self, path: str) -> bytes:
        """An answer, or what a refusal says."""
        headers = {"Authorization": f"Bearer {self._token}"}
        asked = urllib.request.Request(self.address + path, headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            return bytes(refused.read())

    def answers(self) -> dict[str, bytes]:
        """What it says about everything that ran, with the logs that it hands out."""
        found = {path: self.get(path) for path in PAGES}
        for kind in KINDS.split():
            path = f"/api/v0/{kind}?detail=true&limit=10000"
            found[path] = self.get(path)
        for job in json.loads(found["/api/jobs/"]):
            path = f"/api/jobs/{job['submission_id']}/logs"
            found[path] = self.get(path)
        nodes = json.loads(found["/nodes?view=summary"])["data"]["summary"]
        for node in nodes:
            listed = self.get(f"/api/v0/logs?node_id={node['raylet']['nodeId']}")
            found[f"/api/v0/logs?{node['ip']}"] = listed
        return found


@contextmanager
def cluster(variables: Mapping[str, str], token: str) -> Iterator[Dashboard]:
    """A head with two CPUs, which ends with the block."""
    # A short name: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rc", ignore_cleanup_errors=True) as name:
        port = free_port()
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", "0"]
        start += ["--num-cpus", "2", "--object-store-memory", str(300 * 2**20)]
        start += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(port)]
        # The fixed port of the agent, which starts jobs, may be another cluster's.
        start += ["--dashboard-agent-listen-port", str(free_port())]
        (Path(name) / "ray").mkdir()
        try:
            subprocess.run(
                [*start, "--disable-usage-stats"],
                env={**variables, "RAY_TMPDIR": name},
                check=True,
                capture_output=True,
                timeout=120,
            )
            yield Dashboard(f"http://127.0.0.1:{port}", Path(name), token)
        finally:
            ours = [p for p in psutil.process_iter(["cmdline"]) if _is_of(p, name)]
            for process in ours:
                process.kill()
            psutil.wait_procs(ours, timeout=10)


def _is_of(process: psutil.Process, folder: str) -> bool:
    return any(folder in word for word in process.info["cmdline"] or [])


@contextmanager
def guarded_mlflow(folder: Path, operator: Path, password: str) -> Iterator[str]:
    """The address of `mlflow server` with basic authentication, whose admin has this password.

    folder: what clients cause to be written. operator: the server's own settings and users.
    """
    folder.mkdir(parents=True)
    operator.mkdir(mode=0o700)
    config = operator / "auth.ini"
    config.write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"admin_password = {password.replace('%', '%%')}\n"
        f"database_uri = sqlite:///{operator}/users.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        # One hash of a password takes a third of a second, and a model is a hundred requests.
        "auth_cache_ttl_seconds = 3600\n"
    )
    os.environ["MLFLOW_AUTH_CONFIG_PATH"] = str(config)
    os.environ["MLFLOW_FLASK_SERVER_SECRET_KEY"] = "of this test alone"
    arguments = ["server", "--app-name", "basic-auth"]
    arguments += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    arguments += ["--artifacts-destination", str(folder / "artifacts"), "--workers", "1"]
    try:
        with mlflow(*arguments, ready="/health", log=folder / "server.log") as address:
            yield address
    finally:
        del os.environ["MLFLOW_AUTH_CONFIG_PATH"], os.environ["MLFLOW_FLASK_SERVER_SECRET_KEY"]
