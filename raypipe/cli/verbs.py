"""One function a verb: do the work (raypipe/work), show its result, return what --json prints."""

from __future__ import annotations

from typing import Any

from raypipe.cli.console import Console
from raypipe.job import Job
from raypipe.work import verbs as work
from raypipe.work.result import Result


def run(name: str, job: Job, console: Console) -> dict[str, Any]:
    """Run the verb `name`, show its tables and facts, and return its summary."""
    return _shown(getattr(work, name)(job, console), console)


def plan(name: str, job: Job, console: Console) -> dict[str, Any]:
    """Show what the verb would do and take, and return that as a summary."""
    from raypipe.work.dry_run import verbs as plans

    return _shown(plans.plan(name, job, console), console)


def _shown(result: Result, console: Console) -> dict[str, Any]:
    for table in result.tables():
        console.table(table.title, table.columns, table.rows)
    console.facts(result.facts())
    return result.summary()
