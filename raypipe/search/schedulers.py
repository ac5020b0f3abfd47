"""Which trials go on, and for how long: names -> schedulers."""

from __future__ import annotations

from typing import Any

from ray import tune

from raypipe.search.settings import SearchJob


def scheduler(job: SearchJob) -> Any | None:
    cfg, epochs = job.search, job.train.epochs
    if cfg.scheduler == "none":
        return None
    return tune.schedulers.ASHAScheduler(max_t=epochs, grace_period=min(cfg.grace, epochs), reduction_factor=cfg.reduction)
