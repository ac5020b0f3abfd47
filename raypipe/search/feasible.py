"""Can a search run? What it must have, and its space filled in, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ray

from raypipe.cluster.resources import resources_by_node, room_for
from raypipe.config import replace as changed
from raypipe.errors import ClusterError, ConfigError
from raypipe.feed.dataset import Pinned
from raypipe.registry.packing import require_packable
from raypipe.search import refit, starts
from raypipe.search.schedulers import pbt
from raypipe.search.searchers import optuna_search, tune_searchers
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults
from raypipe.search.space import parse as spaces
from raypipe.search.space.space import Space
from raypipe.search.trials.trial_resources import plan_resources
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, wants_gpu
from raypipe.train.spark_place import refuse
from raypipe.train.trainer import check_start


def check(
    job: TrainJob,
    cfg: SearchConfig,
    pinned: Pinned | None = None,
    resources: Mapping[str, float] | None = None,
) -> tuple[SearchConfig, Space]:
    """The search with its space filled in, and that space, parsed; `space.job` is the trials' job.

    pinned: the job's rows; a default space depends on their numbers. resources: of the cluster that
    will search; None: those of the joined one.

    Raises ConfigError or ClusterError if the search cannot run. Nothing is written before.
    """
    refuse(job, "A search")
    resources = dict(resources or ray.cluster_resources())
    # What the cluster and the installation must have.
    check_workers(job.train, resources)
    if cfg.searcher != "random":
        optuna_search.require()
    if job.by_epoch:
        raise ConfigError(
            "A search draws its trials' values, and by_epoch would set them again",
            got=f"by_epoch={job.by_epoch}",
            fix="Set by_epoch={}; search.scheduler=pbt finds values by epoch",
        )
    # The space. It is parsed against the whole job, so it comes after the default.
    gpu = wants_gpu(job.train, resources)
    counts = pinned.counts if pinned is not None else {}
    cfg = starts.checked(cfg, job)
    by_clock = defaults.trains_by_clock(job, cfg, counts, gpu)
    job = defaults.within_budget(job, cfg, counts, gpu)
    cfg = defaults.with_default_space(job, cfg, counts, gpu)
    space = replace(spaces.parse(cfg.space or {}, job), by_clock=by_clock)
    if not space.fields and cfg.samples > 1:
        raise ConfigError(
            "search.space has no field, so all trials would be the same one",
            got=f"search.samples={cfg.samples}",
            fix="Name fields, leave search.space out (raypipe then has one), or use raypipe train",
        )
    for name in ("train.batch_size", "train.lr"):
        if "auto" in space.values(name):
            raise ConfigError(
                f"A search cannot draw {name}=auto",
                rule="auto is found once, before the search",
                fix="Draw numbers",
            )
    if cfg.populated:
        pbt.check(cfg, space)
    # What other parts of a search refuse; here, so that no trial is lost by it.
    refit.check(job, cfg)
    if pinned is not None:
        refit.check_splits(job, cfg, pinned)
    check_start(job)
    # A grid without other fields has few trials, whatever search.samples is.
    trials = tune_searchers.number_of(cfg, space)
    plan_resources(job, cfg, resources, trials, len(space.cells))
    if gpu and job.train.workers == 1:
        _require_gpus(cfg.gpus_per_trial, resources)
    return cfg, space


def require_packages(space: Space, classes: int) -> None:
    """Raise DataError, before the first trial, for a `file:` backbone that no package could hold.

    It may be the job's, or one that trials draw.
    """
    models = {space.job.model.name: space.job.model}
    if any(str(name).startswith("file:") for name in space.values("model.name")):
        for trial in space.variants(["model.name"]):
            model = changed(space.job, trial).model
            models.setdefault(model.name, model)
    for model in models.values():
        require_packable(model, classes)


def _require_gpus(each: float, resources: Mapping[str, float]) -> None:
    """Raise ClusterError if no node has the GPUs of a trial: Tune would wait without a word."""
    # Without a cluster that is joined, it is as if all were on one node.
    if not room_for(resources_by_node() or [resources], each)[0]:
        raise ClusterError(
            "No node of the cluster has the GPUs of a trial",
            got=f"search.gpus_per_trial={each:g}, the cluster has {resources.get('GPU', 0):g}",
            rule="A trial has a part of one GPU, or whole ones of one node, and a CPU there",
            fix="Set search.gpus_per_trial=1",
        )


def one_worker(job: TrainJob) -> TrainJob:
    """`train.workers=auto` of a search: trials side by side use devices better than workers that
    wait for each other.
    """
    if job.train.workers != "auto":
        return job
    # Not config.replace: it would mark every field as set, and the default space leaves out what
    # the user set.
    return job.model_copy(update={"train": job.train.model_copy(update={"workers": 1})})
