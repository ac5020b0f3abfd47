"""A process of its own that starts a cluster as a verb does, and what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Connects so many times. Prints each cluster's address, the one that its task sees and that of the
# environment; how the last one's dashboard was started, and its log.
JOIN = """
import json, os, sys
from raypipe.cluster import connect
import psutil, ray

@ray.remote(num_cpus=0.1)
def told():
    return os.environ.get("RAY_ADDRESS", "")

seen = []
times = int(sys.argv[1])
for left in reversed(range(times)):
    connect.connect(connect.ClusterConfig(cpus=1, object_store_mb=100))
    address = ray.get_runtime_context().gcs_address
    seen.append([address, ray.get(told.remote()), os.environ.get("RAY_ADDRESS", "")])
    words = [p.cmdline() for p in psutil.Process().children()]
    dashboard = [each for each in words if "dashboard.py" in " ".join(each)]
    if dashboard:
        (dashboard,) = dashboard
        with open(f"{ray._private.worker._global_node.get_logs_dir_path()}/dashboard.log") as file:
            log = file.read()
    else:
        log = ""
    connect.close()
after = os.environ.get("RAY_ADDRESS", "")
print(json.dumps({"seen": seen, "after": after, "dashboard": dashboard, "log": log}))
"""


@dataclass(frozen=True)
class Joined:
    seen: list[list[str]]
    after: str
    dashboard: list[str]
    log: str


def joined(times: int = 1, **environment: str) -> Joined:
    inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, str(times)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return Joined(**json.loads(done.stdout.splitlines()[-1]))
