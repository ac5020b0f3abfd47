"""Claim: at a reading every five seconds, to record what the nodes do costs at most 0.2 % of a CPU
on the driver's node, and 1 % on each other node.

python -m benchmarks.usage --json [--seconds 60] [--every 5]

CPU seconds of a driver that waits, with and without a recorder, beside real raylets: the driver's
node, and one more node that is used. On that node the reader is a process of Ray's; `start_s` is
what its start takes, once, and `reader_mb` its memory that no other process shares.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()

import psutil  # type: ignore[import-untyped]  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from benchmarks.feed import commit, machine  # noqa: E402
from raypipe.cluster import recorder, usage  # noqa: E402

SIZE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
WARM_S = 20.0


class Holder:
    def here(self) -> None:
        pass


def readers() -> list[Any]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "NodeUsage" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(seconds: float, every_s: float) -> dict[str, Any]:
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp", prefix="rp")
    head = {**SIZE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(**SIZE)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, log_to_driver=False)
        there = NodeAffinitySchedulingStrategy(second.node_id, soft=False)
        holder = ray.remote(num_cpus=1, scheduling_strategy=there)(Holder).remote()
        ray.get(holder.here.remote())

        began = time.process_time()
        time.sleep(seconds)
        without_s = time.process_time() - began
        file = Path(tempfile.mkdtemp()) / usage.FILE
        with recorder.recorded(file, every_s):
            until = time.monotonic() + 60
            while not readers() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(WARM_S)
            (reader,) = readers()
            start_s, began = cpu_s(reader), time.process_time()
            time.sleep(seconds)
            with_s, reader_s = time.process_time() - began, cpu_s(reader) - start_s
            # Ray's own threads keep an idle worker a little busy, too: its share is in reader_s.
            reader_mb = reader.memory_full_info().uss / 2**20
        nodes = usage.read(file)
        return {
            "every_s": every_s,
            "seconds": seconds,
            "driver_percent": round(100 * (with_s - without_s) / seconds, 4),
            "driver_idle_percent": round(100 * without_s / seconds, 4),
            "reader_percent": round(100 * reader_s / seconds, 4),
            "start_s": round(start_s, 2),
            "reader_mb": round(reader_mb),
            "samples": {name: len(node.samples) for name, node in nodes.items()},
            "file_bytes": file.stat().st_size,
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = measure(given.seconds, given.every)
    print(json.dumps({**figures, "commit": commit(), "machine": machine()}))
