"""Which trials go on, and for how long: names -> schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import tune

from raypipe.search import pbt
from raypipe.search.settings import SearchJob


def scheduler(job: SearchJob, folder: Path) -> Any | None:
    """`folder` is the search's: where a population notes who took over from whom."""
    cfg, epochs = job.search, job.train.epochs
    if cfg.scheduler == "none":
        return None
    if cfg.populated:
        return pbt.population(job, folder)
    return tune.schedulers.ASHAScheduler(max_t=epochs, grace_period=min(cfg.grace, epochs), reduction_factor=cfg.reduction)
