"""`raypipe quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.app import EXAMPLE, Overrides
from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.cluster.connect import prepare_environment
from raypipe.config import load


def quickstart(
    overrides: Overrides = None,
    json: Json = False,
    config: Annotated[Path, typer.Option(help="The configuration.")] = Path(EXAMPLE),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget an earlier quickstart and start over.")
    ] = False,
) -> None:
    """Run the whole loop on real photographs of solar cells: ingest, clean, search, predict, drift,
    retrain, promote.

    Example: [bold]raypipe quickstart[/bold]. If it is killed, run it again: it continues.
    """
    prepare_environment()
    console = Console(json)
    from raypipe.cluster.connect import close
    from raypipe.job import Job
    from raypipe.quickstart import story

    job = load(Job, config, overrides or [])
    try:
        result = story.tell(job, console, fresh)
    finally:
        close()
    console.finish(result)
