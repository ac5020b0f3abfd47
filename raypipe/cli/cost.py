"""raypipe cost CONFIG --nodes a,b,c."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.errors import ConfigError


def cost(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML configuration.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, as train.epochs=20", show_default=False),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(help="Node types to compare, as g5.xlarge,m7i.xlarge; list: show them all."),
    ] = "",
    json: Json = False,
) -> None:
    """Compare node types for a training: seconds and money of a run, a trial and a million
    predictions.

    Example: [bold]raypipe cost jobs/configs/solar.yaml --nodes g5.xlarge,m7i.xlarge[/bold]
    """
    console = Console(json)
    from raypipe.costs.nodes import AS_OF, NODES

    if nodes == "list":
        rows = []
        for name, node in NODES.items():
            gpus = f"{node.gpus} {node.gpu}" if node.gpu else ""
            rows.append([name, gpus, node.cpus, f"{node.usd_per_hour:.3f}"])
        console.table(f"List prices of {AS_OF}", ["node", "GPUs", "CPUs", "$/hour"], rows)
        console.finish({"nodes": list(NODES), "prices_of": AS_OF})
        return
    if config is None:
        raise ConfigError(
            "There is no configuration",
            rule="raypipe cost compares node types for one training",
            fix="raypipe cost CONFIG --nodes g5.xlarge,m7i.xlarge, or raypipe cost --nodes list",
        )
    from raypipe.cluster.connect import close, prepare_environment
    from raypipe.config import load
    from raypipe.job import Job
    from raypipe.work.cost import cost as compared

    prepare_environment()
    job = load(Job, config, overrides or [])
    wanted = [name.strip() for name in nodes.split(",") if name.strip()]
    try:
        found = compared(job, wanted, console)
    finally:
        close()
    for table in found.tables():
        console.table(table.title, table.columns, table.rows)
    console.facts(found.facts())
    console.finish(found.summary())
