"""Trials that begin together and train by the clock, and those that follow one that diverged."""

from __future__ import annotations

import time
from dataclasses import dataclass

from raypipe.config import replace
from raypipe.search import budget
from raypipe.train.job import TrainJob


@dataclass(frozen=True)
class ByClock:
    """Which trials begin together, and when the time of all is over."""

    together: int
    """Trials 1 to this one have the job's train.anneal_s. A later one has what is left."""

    ends: float
    """Of time.time(): the ending begins then. A search may run on several nodes."""

    def job_of(self, trial: str, job: TrainJob) -> TrainJob:
        """The trial's job, whose rate falls to zero in the time that it has. trial: its name."""
        number = int(trial.split("-")[1])
        if number <= self.together or job.train.anneal_s is None:
            return job
        left_s = budget.clocked_s(self.ends - time.time())
        return replace(job, {"train.anneal_s": min(job.train.anneal_s, left_s)})
