"""raypipe promote and rollback: moves of the champion alias by hand, and their history."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.cluster.connect import prepare_environment
from raypipe.config import load
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from raypipe.job import Job
    from raypipe.work.promotions import Moved

Config = Annotated[Path, typer.Argument(help="A YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as registry.alias=blue", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would move; write nothing.")]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the history.")]


def promote(
    config: Config,
    overrides: Overrides = None,
    version: Annotated[
        int | None, typer.Option(help="The registered version to promote.", show_default=False)
    ] = None,
    why: Why = "",
    unbar: Annotated[
        bool, typer.Option("--unbar", help="Promote even a version that was rolled back.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Only list the moves of the alias.")
    ] = False,
    json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Promote a registered version by hand, even if the gate of a retrain refuses it.

    Example: [bold]raypipe promote jobs/configs/solar.yaml --version 3 --why "looked at"[/bold]
    """
    if history == (version is not None):
        raise ConfigError(
            "raypipe promote needs a version, or --history",
            fix="raypipe promote CONFIG --version 3, or raypipe promote CONFIG --history",
        )
    console, job = _begin(config, overrides, json)
    from raypipe.work import promotions

    if version is None:
        _end(promotions.history(job), console)
    elif dry_run:
        _end(promotions.plan(job, version, unbar), console)
    else:
        _end(promotions.promote(job, version, why, unbar), console)


def rollback(
    config: Config,
    overrides: Overrides = None,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            help="The version to go back to. Without it: the previous champion.",
            show_default=False,
        ),
    ] = None,
    why: Why = "",
    json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Go back to an earlier champion. Only raypipe promote --version N --unbar promotes the version
    again that was rolled back. Without --to, a second call changes nothing.

    Example: [bold]raypipe rollback jobs/configs/solar.yaml --why "too many false alarms"[/bold]
    """
    console, job = _begin(config, overrides, json)
    from raypipe.work import promotions

    if dry_run:
        _end(promotions.plan(job, to, rolls_back=True), console)
    else:
        _end(promotions.rollback(job, to, why), console)


def _begin(config: Path, overrides: list[str] | None, json: bool) -> tuple[Console, Job]:
    prepare_environment()
    console = Console(json)
    from raypipe.job import Job

    return console, load(Job, config, overrides or [])


def _end(done: Moved, console: Console) -> None:
    for table in done.tables():
        console.table(table.title, table.columns, table.rows)
    console.facts(done.facts())
    console.finish(done.summary())
