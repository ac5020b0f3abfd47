"""`raypipe predict` with an http registry, where the only CPU is on a node that does not see the
driver's folders.

test_two_nodes.py runs it in a process of its own: python -m tests.serve.private_node CONFIG PRIVATE
PORT. PRIVATE has the run's folder and the driver's temporary folder; the node has an empty folder
in its place, by a mount namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from raypipe.cluster import connect

connect.prepare_environment()

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raypipe.main import main as command_line  # noqa: E402

MEMORY = 200 * 2**20


def second_node(private: str, port: str) -> subprocess.Popen[bytes]:
    """A node with a CPU, which sees an empty folder at `private`."""
    ray_command = str(Path(sys.executable).parent / "ray")
    start = f"{ray_command} start --address=127.0.0.1:{port} --num-cpus=1 --block"
    start += f" --object-store-memory={MEMORY} --disable-usage-stats"
    inside = f"mount -t tmpfs none {private} && TMPDIR={private} exec {start}"
    return subprocess.Popen(["unshare", "--mount", "bash", "-c", inside])


def sees(private: str) -> list[str]:
    return sorted(entry.name for entry in Path(private).iterdir())


def main(config: str, private: str, port: str) -> int:
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "gcs_server_port": int(port)})
    node = second_node(private, port)
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        until = time.monotonic() + 60
        while not ray.cluster_resources().get("CPU"):
            assert time.monotonic() < until, "the second node did not come"
            time.sleep(0.2)
        there = ray.get(ray.remote(num_cpus=1)(sees).remote(private))
        print("the node sees", there, "and the driver", sees(private), flush=True)
        ray.shutdown()
        return command_line(["predict", config, "--json"])
    finally:
        node.terminate()
        node.wait(30)
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
