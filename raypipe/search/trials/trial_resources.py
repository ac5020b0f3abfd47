"""How many trials run side by side and what each takes, from the cluster's resources: pure, so that it is known before a start.

A trial of one worker takes a CPU, and `search.gpus_per_trial` of a GPU. A trial of several is a process that waits (WAITS of a
CPU) and a group of workers, a GPU each, which Ray Train places apart from Tune: Tune would start more trials than groups fit,
and they would hold each other's places for ever. So the number is bound here, and a worker's share of CPUs made to suit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.errors import ClusterError, ConfigError
from raypipe.search.settings import SearchJob
from raypipe.train.launch import wants_gpu

WAITS = 0.1
LEAST = 0.01  # of a CPU, for a worker: Ray counts in 1/10000


@dataclass(frozen=True)
class Slots:
    """What Tune reserves for a trial, what each worker of its group takes (None: it has none), and how many run at a time."""

    trial: dict[str, float]
    worker: dict[str, float] | None
    concurrent: int


def gpu_share(job: SearchJob) -> float:
    """Of a GPU's memory, what a trial of one worker may fill; it trains on one GPU, however many it holds."""
    return min(1.0, job.search.gpus_per_trial) if job.train.workers == 1 else 1.0


def slots(job: SearchJob, resources: Mapping[str, float], trials: int) -> Slots:
    """`trials`: in all.

    A population (PBT) is alive as a whole, so all its trials are started. Those of one worker Tune pauses in turn where they do
    not fit; groups have to fit all at once, because to start one again takes 20 s. Raises ClusterError when they do not.
    """
    cfg, gpu = job.search, wants_gpu(job.train, dict(resources))
    if job.train.workers == 1:
        each = {"CPU": 1.0} | ({"GPU": cfg.gpus_per_trial} if gpu else {})
        fits = max(1, int(min(resources.get(kind, 0) / amount for kind, amount in each.items())))
        return Slots(each, None, trials if cfg.populated else cfg.concurrent or fits)
    if gpu and cfg.gpus_per_trial != 1:
        raise ConfigError(
            "Workers of one trial cannot share a GPU",
            got=f"search.gpus_per_trial={cfg.gpus_per_trial}, train.workers={job.train.workers}",
            rule="NCCL wants a GPU for each rank",
            fix="Set train.workers=1, or remove search.gpus_per_trial",
        )
    workers, gpus, cpus = job.train.most_workers, resources.get("GPU", 0), resources.get("CPU", 0)
    fits = int(gpus // workers if gpu else cpus / (workers + WAITS))
    if not gpu or gpus >= job.train.fewest_workers:  # one alone takes smaller shares, or grows less
        fits = max(1, fits)
    wanted = trials if cfg.populated else min(trials, cfg.concurrent or max(1, fits))
    share = min(1.0, (cpus / wanted - WAITS) / workers)
    if share < LEAST or (gpu and wanted > fits):
        raise ClusterError(
            f"{wanted} trials of {workers} workers do not fit side by side",
            got=f"{gpus if gpu else cpus:g} {'GPUs' if gpu else 'CPUs'}",
            rule="A population is trained all at once"
            if cfg.populated
            else "Every trial that is started needs its workers",
            fix=f"Set search.{'samples' if cfg.populated else 'concurrent'}={max(1, fits)}, or fewer train.workers",
        )
    return Slots(
        {"CPU": WAITS}, {"CPU": int(share * 1000) / 1000} | ({"GPU": 1.0} if gpu else {}), wanted
    )
