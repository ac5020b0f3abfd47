"""raypipe export FORMAT MODEL OUT: a registered model as a file for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli import places
from raypipe.cli.console import Console
from raypipe.cluster.connect import prepare_environment


def export(
    format: Annotated[str, typer.Argument(help="onnx, pt2 (torch.export) or torchscript.")],
    model: Annotated[
        str,
        typer.Argument(
            help="models:/NAME@champion, models:/NAME/3, or a YAML configuration: its champion."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, as run.dir or registry.uri", show_default=False),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="Quantise matrix products (for transformers), and print what that costs."
        ),
    ] = False,
    table: Annotated[
        str | None,
        typer.Option(help="A Delta table to compare on; with labels, accuracy is shown."),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="End with one JSON line on stdout; messages go to stderr."),
    ] = False,
) -> None:
    """Write a registered model as ONNX, torch.export or TorchScript: uint8 pixels in, scores out.

    Normalisation is inside; decoding and resizing are described in the file. The file is refused
    if one of its scores differs from the model's by more than 1e-4; for a regression, by more than
    1e-4 of the number, or of the labels' standard deviation if that is larger.

    Example: [bold]raypipe export onnx models:/solar@champion solar.onnx run.dir=runs/solar[/bold]
    """
    prepare_environment()
    console = Console(json)
    places.require(str(out), "OUT")
    # It imports torch: --help should not wait for it.
    from raypipe.work import export as work

    done = work.export(format, model, out, overrides or [], int8, table)
    console.facts(done.facts())
    console.finish(done.summary())
