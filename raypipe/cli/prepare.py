"""raypipe table prepare SRC DST: smaller images of a table, made once for all who read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli import places
from raypipe.cli.console import Console
from raypipe.cli.table import WHERE, Json, Overrides, conditions
from raypipe.cluster import connect as cluster
from raypipe.cluster.connect import ClusterConfig, prepare_environment
from raypipe.config import load
from raypipe.errors import ConfigError


def prepare(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Folder or URL of a Delta table with images, or a YAML configuration.",
            show_default=False,
        ),
    ],
    dst: Annotated[
        str,
        typer.Argument(metavar="DST", help="Folder or URL of the new table.", show_default=False),
    ],
    side: Annotated[
        int,
        typer.Option(help="The shorter side of the new images in pixels; none is enlarged."),
    ] = 256,
    format: Annotated[
        str,
        typer.Option(metavar="same|jpeg|png|webp", help="same: each image keeps its own format."),
    ] = "same",
    quality: Annotated[int, typer.Option(help="JPEG and WebP quality, 1 to 100.")] = 90,
    version: Annotated[
        str | None, typer.Option(help="Version, tag or time of SRC. Without it: the newest.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help=WHERE)] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Tasks at a time, a CPU each. Without it: all CPUs of the cluster."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Make DST again if rows of SRC were changed or removed.")
    ] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Copy a table with smaller, upright images that decode fast, for data that is read more than
    once. All other columns stay. Run it again to add rows that were appended to SRC, or to continue
    after a kill.

    Example: [bold]raypipe table prepare tables/photos tables/photos256 --side 256[/bold]
    """
    prepare_environment()
    console = Console(json)
    places.require(dst, "DST")
    if workers is not None and workers < 1:
        raise ConfigError("--workers is too small", got=workers, rule="1 or more")
    # Not at the top: --help should not wait for what the work imports.
    from raypipe.images.smaller import Shape
    from raypipe.tables import export
    from raypipe.tables.prepare.run import prepare as run
    from raypipe.tables.table import ImageTable, TableConfig

    shape = Shape(side, format, quality)  # type: ignore[arg-type]  # it checks the format itself
    source, where_to_run = TableConfig(uri="none"), ClusterConfig()
    if src.endswith((".yaml", ".yml")):
        from raypipe.job import Job

        job = load(Job, Path(src), overrides or [])
        source, where_to_run = job.table, job.cluster
    elif overrides:
        raise ConfigError(
            "Overrides need a configuration",
            got=overrides[0],
            fix="Name a YAML file instead of a table",
        )
    else:
        source = TableConfig(uri=src)
    if version is not None:
        source = source.model_copy(update={"version": version})
    if where:
        opened, pinned = ImageTable.open_pinned(source)
        both = export.conditions(opened, pinned, source.where, conditions(where))
        source = source.model_copy(update={"where": both})

    def connect() -> None:
        # Workers decode and resize as soon as they run.
        cluster.connect(where_to_run, preload="torch")

    try:
        with console.progress(f"Preparing {source.uri}", "rows") as tick:
            done = run(source, dst, shape, workers, full, tick, connect)
    finally:
        cluster.close()

    facts: dict[str, object] = {"table": done.table, "prepared from": done.source}
    if done.made:
        facts["rows"] = f"{done.rows:,}, of these new {done.made:,}"
        facts["images"] = f"{_mb(done.bytes_before)} before, {_mb(done.bytes_after)} now"
        if done.broken:
            facts["kept as they are, broken"] = done.broken
        if done.shared:
            facts["made by other runs"] = f"{done.shared:,} of {done.files:,} files"
    else:
        facts["rows"] = f"{done.rows:,}: nothing to do"
    console.facts(facts)
    console.finish(
        {
            "table": str(done.table),
            "prepared_from": str(done.source),
            "rows": done.rows,
            "made": done.made,
            "broken": done.broken,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
            "files": done.files,
            "shared": done.shared,
        }
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
