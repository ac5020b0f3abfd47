"""What the next trial tries: names -> searchers."""

from __future__ import annotations

from typing import Any

from ray import tune

from raypipe.search.settings import SearchJob


def searcher(job: SearchJob, concurrent: int) -> Any:
    """Seeded: trials would otherwise be drawn differently after a restore."""
    return tune.search.BasicVariantGenerator(max_concurrent=concurrent, random_state=job.run.seed)
