"""How many trials run side by side, and what each takes of the cluster's CPUs and GPUs.

A trial of one worker takes one CPU, and `search.gpus_per_trial` GPUs where the cluster has any.

A trial of several workers is a waiting process (WAITING_CPU) and a group of workers, with a GPU
each where the cluster has any. Ray Train reserves the group's resources, and Tune does not know of
them: Tune would start more trials than there is room for, each would hold some of the workers that
another one needs, and all would wait for ever. So the number of trials is limited here, and so is
each worker's share of the CPUs.

The functions are pure: the numbers are known before a search starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.errors import ClusterError, ConfigError
from raypipe.search.settings import SearchConfig
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.train.settings import TrainConfig

WAITING_CPU = 0.1  # CPUs of a process that waits for its group
LEAST_CPU = 0.01  # CPUs of a worker, at least: Ray counts in 1/10000


@dataclass(frozen=True)
class TrialResources:
    """What one trial takes, and how many trials run at a time."""

    trial: dict[str, float]
    """What Tune reserves for a trial."""

    worker: dict[str, float] | None
    """What each worker of its group takes; None for a trial of one worker."""

    concurrent: int
    """How many trials run at a time."""


def at_once(planned: TrialResources, resources: Mapping[str, float], trials: int) -> int:
    """So many trials really run side by side: no more than the cluster has room for."""
    room = min(resources.get(kind, 0) / amount for kind, amount in planned.trial.items())
    return max(1, min(planned.concurrent, trials, int(room)))


def gpu_share(job: TrainJob, cfg: SearchConfig) -> float:
    """The part of one GPU's memory that a worker may fill, 1.0 at most.

    A trial of one worker trains on one GPU, even if `search.gpus_per_trial` is more.
    """
    if job.train.workers == 1:
        return min(1.0, cfg.gpus_per_trial)
    return 1.0


def plan_resources(
    job: TrainJob,
    cfg: SearchConfig,
    resources: Mapping[str, float],
    trials: int,
    combinations: int = 1,
) -> TrialResources:
    """What each trial of the search takes, and how many run at a time.

    resources: the cluster's, by kind ("CPU", "GPU"). trials: of the search, in total. combinations:
    of its grid.

    A population (PBT) starts all its trials. Trials of one worker need not fit all at once: Tune
    pauses them in turn. Trials of several workers must fit all at once, because to start such a
    group again takes 20 s. So must those of hyperband, of which Tune starts all that it knows.

    Raises ClusterError when they do not fit, ConfigError when workers of a group share a GPU.
    """
    gpu = wants_gpu(job.train, dict(resources))
    if job.train.workers == 1:
        return _one_worker(cfg, resources, trials, gpu)
    return _several_workers(job.train, cfg, resources, trials, combinations, gpu)


def _one_worker(
    cfg: SearchConfig, resources: Mapping[str, float], trials: int, gpu: bool
) -> TrialResources:
    trial = {"CPU": 1.0}
    if gpu:
        trial["GPU"] = cfg.gpus_per_trial
    # The scarcest kind decides.
    room = min(resources.get(kind, 0) / amount for kind, amount in trial.items())
    fitting = max(1, int(room))
    concurrent = trials if cfg.populated else cfg.concurrent or fitting
    return TrialResources(trial, None, concurrent)


def _several_workers(
    train: TrainConfig,
    cfg: SearchConfig,
    resources: Mapping[str, float],
    trials: int,
    combinations: int,
    gpu: bool,
) -> TrialResources:
    if gpu and cfg.gpus_per_trial != 1:
        raise ConfigError(
            "Workers of one trial cannot share a GPU",
            got=f"search.gpus_per_trial={cfg.gpus_per_trial}, train.workers={train.workers}",
            rule="NCCL wants a GPU for each rank",
            fix="Set train.workers=1, or remove search.gpus_per_trial",
        )
    # An elastic trial may grow, so each is counted with its most workers.
    workers = train.most_workers
    gpus = resources.get("GPU", 0)
    cpus = resources.get("CPU", 0)
    fitting = int(gpus // workers if gpu else cpus / (workers + WAITING_CPU))
    if not gpu or gpus >= train.fewest_workers:
        # A trial that is alone can run: its workers take less of a CPU, or it grows less.
        fitting = max(1, fitting)

    limit = cfg.concurrent or max(1, fitting)
    # Tune knows a trial as its waiting process, and has room for all of these (drawn_ahead).
    all_at_once = cfg.populated or cfg.scheduler == "hyperband"
    wanted = trials if all_at_once else min(trials, limit)
    # The waiting processes come first, and the groups share the rest.
    cpu_share = min(1.0, (cpus / wanted - WAITING_CPU) / workers)
    if cpu_share < LEAST_CPU or (gpu and wanted > fitting):
        have = f"{gpus:g} GPUs" if gpu else f"{cpus:g} CPUs"
        fewer = f"Set search.concurrent={max(1, fitting)}"
        if all_at_once:
            fewer = _fewer_in_all(trials, combinations, fitting)
        raise _no_room(f"{wanted} trials of {workers} workers", have, cfg, fewer)

    worker = {"CPU": int(cpu_share * 1000) / 1000}  # rounded down, so that the sum fits
    if gpu:
        worker["GPU"] = 1.0
    return TrialResources({"CPU": WAITING_CPU}, worker, wanted)


def _no_room(wanted: str, have: str, cfg: SearchConfig, fewer: str) -> ClusterError:
    if cfg.populated:
        rule = "A population is trained all at once"
    elif cfg.scheduler == "hyperband":
        rule = f"search.scheduler={cfg.scheduler} starts its trials all at once"
    else:
        rule = "Every trial that is started needs its workers"
    return ClusterError(
        f"{wanted} do not fit side by side",
        got=have,
        rule=rule,
        fix=f"{fewer}, or fewer train.workers",
    )


def _fewer_in_all(trials: int, combinations: int, fitting: int) -> str:
    """What to set, so that a search of `trials` has as few as fit."""
    # search.samples says how often a grid is run whole.
    if combinations == 1 or combinations <= fitting:
        return f"Set search.samples={max(1, fitting // combinations)}"
    fix = f"Leave {max(1, fitting)} of the {combinations} combinations in the grid of search.space"
    return f"{fix} and set search.samples=1" if trials > combinations else fix
