"""A recording on a cluster that a node joins and leaves (killed) meanwhile, beside an idle one.

test_usage.py runs it in a process of its own: python -m tests.cluster.leaving_nodes FOLDER. The
file usage.json in FOLDER gets what was recorded.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from raypipe.cluster import connect

connect.prepare_environment()

import psutil  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from raypipe.cluster import recorder, usage  # noqa: E402

SIZE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


class Holder:
    """Holds the CPU of its node."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def held(node: str) -> object:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    holder = ray.remote(num_cpus=1, scheduling_strategy=there)(Holder).remote()
    assert ray.get(holder.where.remote()) == node
    return holder


def readers() -> int:
    """Processes of Ray that read a node for us."""
    ours = psutil.Process().children(recursive=True)
    found = 0
    for process in ours:
        try:
            found += "NodeUsage" in " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def wait_for(count: int) -> None:
    until = time.monotonic() + 40
    while readers() != count:
        assert time.monotonic() < until, f"{readers()} readers, not {count}"
        time.sleep(0.2)


def main(folder: str) -> int:
    head = {**SIZE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, log_to_driver=False)
        with recorder.recorded(Path(folder) / usage.FILE, every_s=1):
            joined = cluster.add_node(**SIZE)
            cluster.wait_for_nodes()
            holder = held(joined.node_id)
            wait_for(1)
            time.sleep(5)
            cluster.remove_node(joined, allow_graceful=False)
            cluster.add_node(**SIZE)
            cluster.wait_for_nodes()
            del holder
            time.sleep(6)
        wait_for(0)
        return 0
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
