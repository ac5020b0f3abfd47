"""A verb whose log, report and package go to `artifacts.uri` when it has ended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from raypipe.artifacts import outbox
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.stores import address
from raypipe.work.result import Result
from raypipe.work.show import Show

R = TypeVar("R", bound=Result)


def kept(verb: Callable[[Job, Show], R]) -> Callable[[Job, Show], R]:
    """The verb itself, where `artifacts.uri` is not set."""

    @functools.wraps(verb)
    def run(job: Job, show: Show) -> R:
        is_dry = verb.__name__ == "ingest" and job.ingest.dry_run
        if job.artifacts.uri is None or is_dry:
            return verb(job, show)
        _refuse_in_table(job.artifacts.uri, job.table.uri)
        with outbox.sent(job.run, job.artifacts, verb.__name__) as outgoing:
            result = verb(job, show)
            outgoing.key = result.key()
            outgoing.files |= result.files()
            outgoing.said = repr(result)
        return result

    return run


def _refuse_in_table(uri: str, table: str) -> None:
    if f"{address(uri)}/".startswith(f"{address(table)}/"):
        raise ConfigError(
            "artifacts.uri lies in the folder of the table",
            got=uri,
            rule="VACUUM deletes each file there that is not the table's own",
            fix=f"Name a place beside {table}",
        )
