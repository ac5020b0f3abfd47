"""What a user says about a search. The fields are read as `search.samples`, `search.space`, …"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raypipe.config import Section
from raypipe.train.job import TrainJob
from raypipe.train.stopping import SearchStoppingConfig


class PbtConfig(Section):
    """Population based training. Every `every` epochs a trial among the worst `quantile` takes the weights of one among the
    best and goes on with that one's values, each drawn anew with `resample_probability`, else moved. PB2 chooses them."""

    every: int = Field(default=2, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    resample_probability: float = Field(default=0.25, ge=0, le=1)


class SearchConfig(Section):
    """How many trials over which space. A grid is run `samples` times, as in Ray Tune."""

    samples: int = Field(default=16, ge=1)
    space: dict[str, str] = Field(default={"train.lr": "loguniform(1e-4, 3e-2)"})
    scheduler: Literal["asha", "none", "pbt", "pb2"] = "asha"
    grace: int = Field(default=3, ge=1)
    reduction: int = Field(default=3, ge=2)
    concurrent: int | None = Field(default=None, ge=1)
    gpus_per_trial: float = Field(default=1.0, gt=0)  # where the cluster has GPUs
    stopping: SearchStoppingConfig = SearchStoppingConfig()
    pbt: PbtConfig = PbtConfig()

    @property
    def populated(self) -> bool:
        """Do trials learn from each other, so that all must be alive at once?"""
        return self.scheduler in ("pbt", "pb2")


class SearchJob(TrainJob):
    """A training job and the space around it."""

    search: SearchConfig = SearchConfig()
