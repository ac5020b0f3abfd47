"""Calls the Alibi sidecar on a node that has another home and another environment than the driver.

test_sidecars.py runs it in a process of its own: python -m tests.cloud.archive_node PORT ADDRESS
NODE. ADDRESS: of an archive, or "". NODE: JSON with the variables of the node; the cluster's head
has no CPU. Prints one JSON line: what the sidecar said, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()

import numpy as np  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raypipe.cluster import sidecar  # noqa: E402
from raypipe.errors import RaypipeError  # noqa: E402

MEMORY = 200 * 2**20


def node(port: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "ray"), "start", f"--address=127.0.0.1:{port}"]
    command += ["--num-cpus=1", "--block", "--disable-usage-stats"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PIP_", "RAYPIPE_"))}
    return subprocess.Popen(
        [*command, f"--object-store-memory={MEMORY}"],
        env=kept | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def called(address: str) -> dict[str, Any]:
    arrays = {"a": np.arange(5)}
    try:
        sidecar.take_from(address or None)
        back, facts = sidecar.call("alibi", "tests.cluster.test_sidecar:echo", arrays, {})
    except RaypipeError as e:
        return {"error": str(e), "raw": repr(e.__reduce__())}
    assert back["a"].tolist() == list(range(5))
    return {"prefix": facts["prefix"], "numpy": facts["numpy"]}


def main(port: str, address: str, variables: str) -> int:
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "gcs_server_port": int(port)})
    worker = node(port, json.loads(variables))
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        until = time.monotonic() + 60
        while not ray.cluster_resources().get("CPU"):
            assert time.monotonic() < until, "the node did not come"
            time.sleep(0.2)
        session = ray._private.worker._global_node.get_session_dir_path()
        print(json.dumps({**called(address), "session": session}), flush=True)
        ray.shutdown()
        return 0
    finally:
        worker.terminate()
        worker.wait(30)
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
