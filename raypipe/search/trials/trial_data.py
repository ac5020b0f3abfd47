"""The images of a search, decoded once for all its trials, in Ray's object store."""

from __future__ import annotations

from collections.abc import Iterable

import ray
import torch

from raypipe.cluster.resources import cluster_cpus
from raypipe.config import replace
from raypipe.feed.dataset import Pinned
from raypipe.feed.feed import Source, await_decoded
from raypipe.search.space.space import Changes
from raypipe.search.trials.trial import data_key
from raypipe.train.job import TrainJob
from raypipe.train.trainer import prepare
from raypipe.train.worker import Data


def prepare_data(job: TrainJob, pinned: Pinned, trials: Iterable[Changes]) -> dict[str, Data]:
    """The arrays of every backbone and resolution that a trial may draw, by `data_key`.

    Each is read once, and all images are decoded when this returns.
    """
    data: dict[str, Data] = {}
    # On a single node this process decodes. Tasks would run in the processes that the node started
    # in advance, and trials could not use those any more (tune_patches.py).
    here = _single_node()
    for changes in trials:
        # As a stream, every trial would decode the table again.
        cached = replace(job, {**changes, "feed.carrier": "cache"})
        key = data_key(cached)
        if key not in data:
            data[key] = prepare(cached, pinned, here)
    # Trials will hold every CPU, and a task that decodes needs one.
    await_decoded(_sources(data))
    return data


def _single_node() -> bool:
    """Has the cluster one node only?"""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return len(alive) == 1


def _sources(data: dict[str, Data]) -> list[Source]:
    """Every source once: the same one may serve training and validation."""
    by_id = {}
    for arrays in data.values():
        for source in (arrays.train, arrays.val):
            by_id[id(source)] = source
    return list(by_id.values())


def decoded_images(data: dict[str, Data]) -> int:
    """How many images were decoded, for all trials together."""
    return sum(source.decoded for source in _sources(data))


def embedded_here(data: dict[str, Data]) -> int:
    """How many of these images this process would have embedded in the same time: all nodes have
    done so, and when trials have ended it predicts alone. 0: no backbone is frozen.
    """
    if not any(arrays.features for arrays in data.values()):
        return 0
    share = min(1.0, torch.get_num_threads() / cluster_cpus())
    return round(share * decoded_images(data))
