"""raypipe report model and timeline: what is known of a version, and what happened to a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.cluster.connect import prepare_environment
from raypipe.config import load
from raypipe.files import is_there

if TYPE_CHECKING:
    from raypipe.work.result import Result

app = typer.Typer(
    no_args_is_help=True,
    help="Write a page and a JSON file: where a model version comes from, or what happened to a "
    "model.",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as run.dir=runs/cells", show_default=False),
]


@app.command()
def model(
    model: Annotated[
        str,
        typer.Argument(
            help="NAME@champion, NAME/3, or a YAML configuration: its champion.", metavar="MODEL"
        ),
    ],
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML configuration that says where NAME is registered. Without it: runs/NAME.",
            metavar="[CONFIG]",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    version: Annotated[
        int | None, typer.Option(help="A version of the configuration's model.", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read the table's rows to compare them.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer eight questions about a registered version: which rows, how cleaned, which code, which
    machine, how good, what it replaced, why, at what cost. Exit code 2 if a record is wrong.

    Example: [bold]raypipe report model cells@champion mine.yaml[/bold]
    """
    given = list(overrides or [])
    # `raypipe report model mine.yaml run.dir=…` names no second configuration.
    if config is not None and "=" in config and not is_there(config):
        given, config = [config, *given], None
    console = _begin(json)
    from raypipe.work import reports

    job, number = reports.job_of(model, Path(config) if config else None, given, version)
    done = reports.model(job, number, reread=not quick)
    _end(done, console)
    if done.status == "contradicted":
        raise typer.Exit(2)


@app.command()
def timeline(
    config: Annotated[Path, typer.Argument(help="A YAML configuration.", show_default=False)],
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """List all drift checks, comparisons and moves of the champion, in the order of their commits.

    Example: [bold]raypipe report timeline mine.yaml[/bold]
    """
    console = _begin(json)
    from raypipe.job import Job
    from raypipe.work import reports

    _end(reports.tell(load(Job, config, overrides or [])), console)


def _begin(json: bool) -> Console:
    prepare_environment()
    return Console(json)


def _end(done: Result, console: Console) -> None:
    for table in done.tables():
        console.table(table.title, table.columns, table.rows)
    console.facts(done.facts())
    console.finish(done.summary())
