"""raypipe table …: versions of a Delta table, and its rows as files. Light: nothing here imports
torch, MLflow or the trainers.

TABLE is a folder, a URL, a name of Unity Catalog, or a YAML configuration whose `table` section
says the same and more.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from raypipe.cli import places
from raypipe.cli.console import Console
from raypipe.cluster import connect as cluster
from raypipe.cluster.connect import ClusterConfig, prepare_environment
from raypipe.config import load
from raypipe.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Delta tables: list, tag, diff, lineage, export, prepare, optimize, vacuum.",
)

Table = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="Folder or URL of any Delta table, or a YAML configuration.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, with a configuration", show_default=False),
]
Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON line on stdout; messages go to stderr.")
]
QUOTED = """A name with a comma is quoted, as in a CSV: 'a,"b,c"'."""
Names = Annotated[
    str | None, typer.Option(help=f"Columns of OUT.parquet, like image_id,label. {QUOTED}")
]
SHOWN_IDS = 5
CONFIGS = ".yaml", ".yml"
_SETTING = re.compile(r"\w+\.[\w.]+=")
# Of a condition on a column whose name holds an equals sign.
_QUOTED = re.compile(r'"(?P<name>(?:[^"]|"")*)"=(?P<value>.*)', re.DOTALL)
WHERE = """Only rows with COLUMN=VALUE; may be repeated. A name with = is quoted: '"a=b"=x'."""
_NAME = re.compile(r"""\s*(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[^",][^,]*|))\s*(?:,|$)""")


@app.command("list")
@app.command("history")
def list_versions(table: Table, overrides: Overrides = None, json: Json = False) -> None:
    """List every version: when, what, who, why, rows, tags. Example: [bold]raypipe table list
    tables/solar[/bold]
    """
    console, (opened, _) = _console(json), _opened(table, overrides)
    versions = opened.history()
    columns = [
        "version",
        "when",
        "operation",
        "who",
        "why",
        "added",
        "removed",
        "relabelled",
        "tags",
    ]
    for v in versions:
        v["when"] = (
            f"{datetime.fromtimestamp(v['timestamp_ms'] / 1000, timezone.utc):%Y-%m-%d %H:%M:%SZ}"
        )
    console.table(opened.uri, columns, [[v[c] for c in columns] for v in versions])
    console.finish({"table": opened.uri, "tags": opened.tags(), "versions": versions})


@app.command("tag")
def tag(
    table: Table,
    name: Annotated[str, typer.Argument(help="The tag.")],
    version: Annotated[
        int | None, typer.Option(help="Which version. Without it: the newest.")
    ] = None,
    move: Annotated[bool, typer.Option("--move", help="Move a tag that exists.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the tag; the version stays.")
    ] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Name a version, or remove a name. Example: [bold]raypipe table tag tables/solar golden
    --version 3[/bold]
    """
    # Removing a tag leaves versions alone, so naming one can only be a mistake.
    if remove and (move or version is not None):
        given = "--move" if move else f"--version {version}"
        raise ConfigError(
            "These options exclude each other", got=f"--remove {given}", fix="Give one of them"
        )
    console = _console(json)
    opened, _ = _opened(table, overrides)
    if remove:
        named = opened.untag(name)
        done = {"table": f"{opened.uri}@v{named}", "removed": name}
    else:
        tagged = opened.tag(name, version, move)
        done = {"table": str(tagged)}
    # Read now, so that they are the tags after the change.
    _tell(console, done | {"tags": opened.tags()})


@app.command("diff")
def diff(
    table: Table,
    before: Annotated[str, typer.Argument(help="Version, tag or time.")],
    after: Annotated[
        str | None, typer.Argument(help="Version, tag or time. Without it: the newest.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Show images that were added, removed or relabelled, or moved to another split. Example:
    [bold]raypipe table diff tables/solar raw clean[/bold]
    """
    # `raypipe table diff mine.yaml raw table.uri=…` names no second version.
    if after is not None and table.endswith(CONFIGS) and _SETTING.match(after):
        overrides, after = [after, *(overrides or [])], None
    console, (opened, _) = _console(json), _opened(table, overrides)
    from raypipe.tables import versions

    found = versions.diff(opened, opened.pin(before), opened.pin(after))
    facts = {
        kind: f"{len(ids):,}  {_first(ids)}".rstrip()
        for kind, ids in asdict(found).items()
        if isinstance(ids, list)
    }
    console.facts({"from": found.before, "to": found.after, **facts})
    for kind, counts in (("class", found.classes), ("split", found.splits)):
        console.table(
            "",
            [kind, "before", "after", "change"],
            [[k, a, b, b - a] for k, (a, b) in counts.items()],
        )
    console.finish(asdict(found) | {"before": str(found.before), "after": str(found.after)})


@app.command("lineage")
def lineage(
    table: Table,
    version: Annotated[
        str | None, typer.Option(help="Version, tag or time. Without it: the newest.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Show what a version was made from, step by step. Example: [bold]raypipe table lineage
    tables/solar --version clean[/bold]
    """
    console, (opened, chosen) = _console(json), _opened(table, overrides)
    from raypipe.tables import versions

    pinned = opened.pin(version or chosen.version)
    steps = [asdict(s) for s in versions.lineage(opened, pinned)]
    columns = ["table", "versions", "why", "from"]
    console.table(
        str(pinned),
        columns,
        [
            [
                s["uri"],
                f"{s['first']}–{s['last']}" if s["first"] < s["last"] else s["last"],
                s["why"],
                s["source"],
            ]
            for s in steps
        ],
    )
    console.finish({"table": str(pinned), "steps": steps})


@app.command("optimize")
def optimize(
    table: Table,
    by: Annotated[
        str | None,
        typer.Option(help=f"Cluster the rows by these columns (z-order): label,split. {QUOTED}"),
    ] = None,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of a file.")] = 256,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Compact many small files into few large ones; the rows stay the same. Example: [bold]raypipe
    table optimize tables/solar[/bold]
    """
    console, (opened, _) = _console(json), _opened(table, overrides)
    from raypipe.tables import versions

    _tell(console, {"table": opened.uri, **versions.optimize(opened, _split(by) or (), target_mb)})


@app.command("vacuum")
def vacuum(
    table: Table,
    keep_hours: Annotated[
        int | None, typer.Option(min=0, help="Keep files of versions younger than this.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the files; without it they are only counted.")
    ] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Delete files that only old versions without a tag need. Example: [bold]raypipe table vacuum
    tables/solar --yes[/bold]
    """
    console, (opened, _) = _console(json), _opened(table, overrides)
    from raypipe.tables import versions

    found = versions.vacuum(opened, keep_hours, yes)
    # A tagged version stays whole, whatever its age.
    for name, files in found.kept.items():
        console.say(
            f"{files:,} files stay because the tag {name!r} names a version that needs them"
        )
    console.facts(
        {
            "table": opened.uri,
            "removed" if yes else "would be removed (--yes)": f"{len(found.files):,} files",
        }
    )
    console.finish({"table": opened.uri, **asdict(found)})


@app.command("export")
def export(
    table: Table,
    out: Annotated[
        Path, typer.Argument(help="OUT.parquet, or a folder for image files and labels.csv.")
    ],
    version: Annotated[
        int | None, typer.Option(help="Which version. Without it: the newest.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="The version of this tag.")] = None,
    at: Annotated[
        str | None, typer.Option(help="The newest version at this time: 2026-11-01T12:00:00Z.")
    ] = None,
    columns: Names = None,
    where: Annotated[list[str] | None, typer.Option(help=WHERE)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most rows.")] = None,
    sample: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1, help="A share of the rows, always the same ones."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Number of Ray workers; 0: read in this process.")
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Write the rows of a version as one Parquet file or as image files.

    Example: [bold]raypipe table export tables/solar solar.parquet --tag clean --where
    split=test[/bold]
    """
    places.require(str(out), "OUT")
    given = {
        n: v for n, v in (("--version", version), ("--tag", tag), ("--at", at)) if v is not None
    }
    if len(given) > 1:
        raise ConfigError(
            "These options exclude each other", got=" ".join(given), fix="Give one of them"
        )
    console, (opened, chosen) = _console(json), _opened(table, overrides, sample)
    from raypipe.tables import export as room

    # Without a version on the command line, the configuration's counts.
    pinned = opened.pin(next(iter(given.values()), chosen.version))
    chosen_rows = room.conditions(opened, pinned, chosen.where, conditions(where or []))
    if workers:
        cluster.connect(ClusterConfig(cpus=workers))
    try:
        with console.progress(f"Exporting {pinned}", "rows") as tick:
            done = room.export(
                opened,
                pinned,
                out,
                _split(columns),
                chosen_rows,
                limit,
                workers > 0,
                overwrite,
                tick,
            )
    finally:
        if workers:
            cluster.close()
    found = {"table": str(pinned), "rows": done.rows, "out": str(out)}
    # Told only where it happened: a folder cannot hold a row without an image.
    if done.without_image:
        found["without image"] = done.without_image
    _tell(console, found)


def _opened(
    table: str, overrides: list[str] | None, sample: float | None = None
) -> tuple[Any, Any]:
    """(the table, its section of the configuration).

    A table that is named directly may be any Delta table, also one without images. One that a
    configuration names must have the image column that the configuration says.
    """
    from raypipe.tables.address import resolve
    from raypipe.tables.table import ImageTable, TableConfig

    # A table may be named directly, or by the configuration that names it.
    if table.endswith(CONFIGS):
        from raypipe.job import Job

        cfg = load(Job, Path(table), overrides or []).table
        opened = ImageTable.open(cfg)
    else:
        if overrides:
            raise ConfigError(
                "Overrides need a configuration",
                got=overrides[0],
                fix="Name a YAML file instead of a table",
            )
        cfg = TableConfig(uri=table)
        opened = ImageTable(resolve(table))
    # The command line's share replaces the configuration's.
    if sample is not None:
        opened = ImageTable(opened.uri, opened.columns, opened.storage_options, sample)
    return opened, cfg


def _console(as_json: bool) -> Console:
    prepare_environment()
    return Console(as_json)


def _tell(console: Console, result: dict[str, Any]) -> None:
    """Show the result to people, and with --json once more as the last line."""
    console.facts(result)
    console.finish(result)


def _split(names: str | None) -> list[str] | None:
    """`a, "b,c"` -> `["a", "b,c"]`, quoted as in a CSV. Raises ConfigError for quotes of which one
    is missing."""
    if not names:
        return None
    found, start = [], 0
    while start < len(names):
        name = _NAME.match(names, start)
        if name is None:
            raise ConfigError(
                "These are no names between commas",
                got=names,
                rule="A name with a comma or a quotation mark is in quotation marks, and each of "
                "its own is written twice",
                fix="""Write 'a,"b,c"' for the columns a and b,c""",
            )
        quoted = name["quoted"]
        found.append(name["plain"].strip() if quoted is None else quoted.replace('""', '"'))
        start = name.end()
    return [name for name in dict.fromkeys(found) if name]


def conditions(texts: list[str]) -> dict[str, str | list[str]]:
    """`["a=1", "a=2", '"b=c"=x']` -> `{"a": ["1", "2"], "b=c": ["x"]}`.

    Raises ConfigError for what is no condition.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        quoted = _QUOTED.fullmatch(text)
        if quoted is not None:
            name, value = quoted["name"].replace('""', '"'), quoted["value"]
        if not equals:
            raise ConfigError("This is no condition", got=text, rule="--where COLUMN=VALUE")
        # A column named twice allows either value.
        found.setdefault(name, []).append(value)
    return {**found}


def _first(changed: list[Any]) -> str:
    shown = [c if isinstance(c, str) else f"{c[0]} ({c[1]} → {c[2]})" for c in changed[:SHOWN_IDS]]
    return ", ".join(shown) + (" …" if len(changed) > SHOWN_IDS else "")
