"""One function a verb: do the work (raypipe/work), show its result, return what --json prints."""

from __future__ import annotations

from typing import Any

from raypipe.cli.console import Console
from raypipe.job import Job
from raypipe.work import verbs as work
from raypipe.work.result import Result


def run(name: str, job: Job, console: Console) -> dict[str, Any]:
    """Run the verb `name`, show its tables and facts, and return its summary."""
    result: Result = getattr(work, name)(job, console)
    for table in result.tables():
        console.table(table.title, table.columns, table.rows)
    console.facts(result.facts())
    return result.summary()
