"""What a user says about a search. The fields are read as `search.samples`, `search.space`, …"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raypipe.config import Section
from raypipe.train.job import TrainJob
from raypipe.train.stopping import SearchStoppingConfig


class SearchConfig(Section):
    """How many trials over which space. A grid is run `samples` times, as in Ray Tune.

    scheduler: asha and pasha pause trials at `grace` epochs, at `reduction` times as many, …, and let the best 1/`reduction` of
    them go on; pasha goes only as far as rankings still disagree. `pauses: false` stops trials instead, where they take long to
    start again. hyperband, median: Ray Tune's. none: every trial runs to its end.
    """

    samples: int = Field(default=16, ge=1)
    space: dict[str, str] = Field(default={"train.lr": "loguniform(1e-4, 3e-2)"})
    scheduler: Literal["asha", "pasha", "hyperband", "median", "none"] = "asha"
    grace: int = Field(default=3, ge=1)
    reduction: int = Field(default=3, ge=2)
    pauses: bool = True
    concurrent: int | None = Field(default=None, ge=1)
    gpus_per_trial: float = Field(default=1.0, gt=0)  # where the cluster has GPUs
    stopping: SearchStoppingConfig = SearchStoppingConfig()


class SearchJob(TrainJob):
    """A training job and the space around it."""

    search: SearchConfig = SearchConfig()
