"""raypipe serve CONFIG: the champion behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.app import run_verb
from raypipe.cli.how import How, Json


def serve(
    config: Annotated[Path, typer.Argument(help="A YAML configuration.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, as serve.port=8080", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Answer requests with the champion: POST an image to /predict, or drop one on the page at /.

    After a promotion it serves the new champion without a restart. SIGTERM or Ctrl+C ends it when
    running requests have their answers.

    Example: [bold]raypipe serve jobs/configs/solar.yaml serve.port=8000[/bold]
    """
    run_verb("serve", config, overrides, How(json))
