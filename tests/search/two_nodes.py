"""`raypipe tune JOB` on a cluster of two nodes with a CPU each; notes on which node each trial ran.

test_clusters.py runs it in a process of its own: python -m tests.search.two_nodes JOB.yaml NOTES
PORT
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from raypipe.cluster import connect

connect.prepare_environment()

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raypipe.main import main as command_line  # noqa: E402
from raypipe.search import tune_run  # noqa: E402
from raypipe.search.trials.trial import run_trial  # noqa: E402


def noted(changes: dict[str, Any], notes: str, **given: Any) -> None:
    folder = Path(notes) / ray.get_runtime_context().get_node_id()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(changes["train.lr"])).touch()
    run_trial(changes, **given)


def main(job: str, notes: str, port: str) -> int:
    os.environ["RAY_ADDRESS"] = (
        # What the nodes start asks there, and not at another cluster on this host.
        f"127.0.0.1:{port}"
    )
    size = {"num_cpus": 1, "object_store_memory": 200 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**size, "gcs_server_port": int(port), "include_dashboard": False},
    )
    try:
        cluster.add_node(**size)
        cluster.wait_for_nodes()
        with patch.object(tune_run, "run_trial", partial(noted, notes=notes)):
            return command_line(["tune", job, "--json"])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
