"""Trials that begin together and train by the clock, and those that follow one that diverged."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray

from raypipe.config import replace
from raypipe.search import budget
from raypipe.train.job import TrainJob


@dataclass(frozen=True)
class ByClock:
    """Which trials begin together, and when the time of all is over.

    A trial on the driver's node asks the clock that the driver asked, which nobody can set. Such a
    clock counts from its own machine's start, so on another node it says nothing: there the time
    of day has to do.
    """

    together: int
    """Trials 1 to this one have the job's train.anneal_s. A later one has what is left."""

    node: str
    """Of Ray's, whose time.monotonic() `ends` is of."""

    ends: float
    """The ending begins then."""

    ends_at: float
    """The same, of time.time()."""

    @classmethod
    def of(cls, together: int, left_s: float) -> ByClock:
        """In the driver, with so many seconds until the ending."""
        return cls(together, _node(), time.monotonic() + left_s, time.time() + left_s)

    def job_of(self, trial: str, job: TrainJob) -> TrainJob:
        """The trial's job, whose rate falls to zero in the time that it has. trial: its name."""
        number = int(trial.split("-")[1])
        if number <= self.together or job.train.anneal_s is None:
            return job
        is_here = self.node == _node()
        left_s = self.ends - time.monotonic() if is_here else self.ends_at - time.time()
        return replace(job, {"train.anneal_s": min(job.train.anneal_s, budget.clocked_s(left_s))})


def _node() -> str:
    """Ray's id of this node."""
    return str(ray.get_runtime_context().get_node_id())
