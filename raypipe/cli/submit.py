"""--submit: a verb as a job of a Ray cluster. `raypipe jobs` lists, follows and stops them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli.console import Console
from raypipe.cli.how import How, Json
from raypipe.errors import ConfigError, RaypipeError

if TYPE_CHECKING:
    from raypipe.job import Job

MOST_LISTED = 50


def submitted(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    how: How,
    flags: Sequence[str],
    job: Job,
    console: Console,
) -> int:
    """Submit the verb, and follow it unless detached; returns its exit code.

    Raises ConfigError for credentials that would travel, ClusterError if it cannot be submitted.
    """
    from raypipe.cluster.submit import Command, follow, submit
    from raypipe.tables.storage import refuse_credentials, refuse_in_file
    from raypipe.work import own_modules

    refuse_credentials(overrides)
    refuse_in_file(job)
    options = [*flags, "--json"] if how.json else [*flags]
    command = Command(
        name, config, [*overrides, *options], own_modules.of(job), bring=job.cluster.bring
    )
    jobs, job_id = submit(str(how.submit), command, console.say)
    if how.detach:
        console.facts({"job": job_id, "follow": f"raypipe jobs {jobs.address} --follow {job_id}"})
        console.finish({"job": job_id, "address": jobs.address})
        return 0
    return follow(jobs, job_id, how.json, console.say)


def jobs(
    address: Annotated[
        str | None,
        typer.Argument(
            help="Address of the cluster's dashboard. Without it: RAY_ADDRESS.",
            metavar="http://HOST:8265",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option("--follow", metavar="JOB", help="Show the job's output until it ends."),
    ] = None,
    stop: Annotated[str | None, typer.Option("--stop", metavar="JOB", help="Stop the job.")] = None,
    json: Json = False,
) -> None:
    """List the jobs of a Ray cluster, follow a job (with its exit code), or stop a job.

    Example: [bold]raypipe jobs http://127.0.0.1:8265 --stop raypipe-train-1a2b3c4d[/bold]
    """
    console = Console(json)
    from raypipe.cluster import submit
    from raypipe.cluster.jobs import Jobs, from_environment

    if follow and stop:
        raise ConfigError("--follow and --stop contradict each other", fix="Take one of them")
    found = Jobs(address if address is not None else from_environment())
    if follow:
        state = found.known(follow)
        # Only a job that was submitted with --json ends with a JSON line of its own.
        has_line = json and "--json" in state.entrypoint.split()
        # Its output is no JSON, and stdout has one document.
        with redirect_stdout(sys.stderr) if json and not has_line else nullcontext():
            code = submit.follow(found, state.job, has_line, console.say)
        if json and not has_line:
            console.finish(asdict(found.known(follow)))
        if code:
            raise typer.Exit(code)
        return
    if stop:
        console.say(f"{stop} is asked to end; it may take a minute to save what it has begun")
        state = found.stop(stop)
        console.facts({"job": state.job, "status": state.status})
        console.finish({"job": state.job, "status": state.status})
        if not state.has_ended:
            raise RaypipeError(
                f"The job {state.job} has not ended yet",
                got=state.status,
                rule="It was asked to, and may still save what it has begun",
                fix=f"raypipe jobs {found.address} --follow {state.job}",
            )
        return
    listed = found.listed()
    rows = []
    for state in listed[:MOST_LISTED]:
        began = f"{state.began.astimezone():%Y-%m-%d %H:%M:%S}" if state.began else ""
        ended = "" if state.code is None else str(state.code)
        what = state.verb or state.entrypoint[:40]
        rows.append([state.job, what, state.status, began, f"{state.seconds:,.0f}", ended])
    more = f", the newest {MOST_LISTED} of {len(listed)}" if len(listed) > MOST_LISTED else ""
    columns = ["job", "verb", "status", "began", "seconds", "code"]
    console.table(f"Jobs at {found.address}{more}", columns, rows)
    console.finish({"jobs": [asdict(state) for state in listed]})
