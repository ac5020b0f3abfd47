"""A training on one node of a CPU, which a second node joins and leaves (killed) while it runs.

test_elastic.py runs it in a process of its own: python -m tests.chaos.joining_nodes JOB.yaml NOTES
PORT. NOTES gets steps.jsonl (time, world, rank and learning rate of every step) and a file for each
thing that happened, with its time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()

from ray.cluster_utils import Cluster  # noqa: E402

from raypipe.config import load  # noqa: E402
from raypipe.train import elastic, trainer, worker_group  # noqa: E402
from raypipe.train.job import TrainJob  # noqa: E402

STEP_S, AFTER = (
    0.5,
    3,
)  # steps are slow until the second node is lost; each thing happens after so many of them
SIZE = {"num_cpus": 1, "object_store_memory": 200 * 2**20}


def slowed(notes: str) -> Any:
    """A rank that notes its steps."""

    def rank(config: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist

        from raypipe.train import preemption, worker_group
        from raypipe.train.parallel.native import Single

        asked = preemption.Notice.__call__
        set_lr = Single.set_lr
        rates: list[float] = []

        def noting(self: Single, lr: float, epoch: int) -> None:
            rates.append(lr)
            set_lr(self, lr, epoch)

        def noted(self: preemption.Notice) -> bool:
            # Between the batches of a validation it is asked, too: these are no steps.
            if not rates:
                return asked(self)
            together = dist.is_initialized()
            line = {"at": time.time(), "world": dist.get_world_size() if together else 1}
            line |= {"rank": dist.get_rank() if together else 0, "lr": rates.pop()}
            with (Path(notes) / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if not (Path(notes) / "lost").exists():
                time.sleep(STEP_S)
            return asked(self)

        preemption.Notice.__call__ = noted  # type: ignore[method-assign]
        Single.set_lr = noting  # type: ignore[method-assign]
        return worker_group.run_worker(config)

    return rank


class Training(threading.Thread):
    """In a thread: nodes can be started from a main thread alone."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__(daemon=True)
        self.job, self.result, self.error = job, "", ""

    def run(self) -> None:
        try:
            self.result = trainer.run(self.job).checkpoint
        except Exception as e:
            self.error = repr(e)


class Nodes:
    """Adds a node when one worker has trained some steps, and kills it when two have."""

    def __init__(self, cluster: Cluster, notes: Path, training: Training) -> None:
        self.cluster, self.notes, self.training = cluster, notes, training

    def run(self) -> None:
        self.wait_for(world=1)
        node = self.cluster.add_node(**SIZE)
        self.note("joined")
        self.wait_for(world=2)
        self.note("lost")
        self.cluster.remove_node(node, allow_graceful=False)

    def wait_for(self, world: int) -> None:
        steps = self.notes / "steps.jsonl"
        while not steps.exists() or steps.read_text().count(f'"world": {world}, "rank": 0') < AFTER:
            assert self.training.is_alive(), f"The training ended: {self.training.error}"
            time.sleep(0.1)

    def note(self, what: str) -> None:
        (self.notes / what).write_text(str(time.time()))


def main(job: str, notes: str, port: str) -> int:
    os.environ["RAY_ADDRESS"] = (
        # What the nodes start asks there, and not at another cluster on this host.
        f"127.0.0.1:{port}"
    )
    elastic.LOOK_S, elastic.GROW_AFTER_S, elastic.RESTART_S = 1.0, 2.0, 0.0
    worker_group.run_worker = slowed(notes)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**SIZE, "gcs_server_port": int(port), "include_dashboard": False},
    )
    try:
        mine = load(TrainJob, Path(job))
        connect.connect(mine.cluster)
        training = Training(mine)
        training.start()
        Nodes(cluster, Path(notes), training).run()
        training.join()
        assert training.result, training.error
        return 0
    finally:
        connect.close()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
