"""A search of a whole configuration, as `raypipe tune` runs it."""

from __future__ import annotations

from typing import Any

from raypipe.job import Job
from raypipe.search import tuner
from raypipe.search.result import SearchResult


def search(job: Job, *progress: Any, **more: Any) -> SearchResult:
    """Hand tuner.search the sections that it needs."""
    return tuner.search(job.training, job.search, *progress, **more)
