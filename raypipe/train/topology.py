"""`train.workers=auto`: how many workers train, and why; and whether a given number is a bad one.

One machine with several GPUs comes before several machines: within it gradients travel at tens of
gigabytes a second, between machines often at one or two. On CPUs one process uses all cores of its
machine, and more of them only wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raypipe.cluster.resources import resources_by_node
from raypipe.config import replace
from raypipe.train.job import TrainJob

log = logging.getLogger("raypipe")


def settled(job: TrainJob) -> TrainJob:
    """The job with a number in place of `train.workers=auto`; the reason is logged.

    It asks the cluster that is joined. Warns of a given number that spans nodes.
    """
    gpus = [int(node.get("GPU", 0)) for node in resources_by_node()]
    if job.train.gpu is False:
        gpus = []
    if job.train.workers != "auto":
        said = spans_nodes(job.train.most_workers, gpus)
        if said:
            log.warning("%s", said)
        return job
    batch_size = job.train.batch_size
    most = batch_size if isinstance(batch_size, int) else None
    workers, reason = choose(gpus, most)
    log.info("train.workers=%d: %s", workers, reason)
    return replace(job, {"train.workers": workers})


def choose(gpus: Sequence[int], most: int | None = None) -> tuple[int, str]:
    """How many workers, and why.

    gpus: of each node. most: images of a step, of which each worker needs one; None: not known.
    """
    largest = max(gpus, default=0)
    together = sum(gpus)
    if not largest:
        return 1, "there is no GPU to train on, and one process uses all CPUs of its machine"
    if largest == 1 and together > 1:
        return 1, (
            f"each of {together} nodes has one GPU, and gradients would travel between nodes; "
            f"if one GPU is too small or too slow, set train.workers={together}"
        )
    if largest == 1:
        return 1, "there is one GPU"
    if most is not None and most < largest:
        return most, f"a step has {most} images, and each worker needs one"
    others = f"; the {together - largest} on other nodes stay free" if together > largest else ""
    return largest, f"one node has {largest} GPUs{others}"


def spans_nodes(workers: int, gpus: Sequence[int]) -> str | None:
    """What is bad about so many workers on these nodes; None: nothing."""
    largest = max(gpus, default=0)
    if not largest or workers <= largest:
        return None
    return (
        f"train.workers={workers} spans nodes: the largest has {largest} "
        f"GPU{'s' * (largest > 1)}, and gradients travel between nodes in each step. "
        f"One node with {workers} GPUs trains faster"
    )
