"""raypipe sidecars: fastdup's and Alibi Detect's environments, built here or packed for others."""

from __future__ import annotations

from typing import Annotated

import typer

from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.cluster.connect import prepare_environment
from raypipe.errors import ConfigError

# Other systems' names of the machines that clusters have.
MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}

app = typer.Typer(
    invoke_without_command=True,
    help="Build the separate environments of fastdup and Alibi Detect on this machine now, not at "
    "first use; or pack them for nodes without internet.\n\n"
    "With RAYPIPE_SIDECARS=ADDRESS the wheels come from an archive, else from the package index of "
    "pip (PIP_INDEX_URL).\n\n"
    "Example: [bold]raypipe sidecars[/bold], or "
    "[bold]raypipe sidecars pack --out s3://plant/sidecars.zip[/bold]",
)


@app.callback()
def build(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        if json:
            raise ConfigError(
                "--json stands before the command, which would not see it",
                fix=f"raypipe sidecars {context.invoked_subcommand} --json",
            )
        return
    prepare_environment()
    console = Console(json)
    from raypipe.cluster import sidecar
    from raypipe.cluster.sidecars.pins import names

    sidecar.take_from(None)
    built, missing = {}, {}
    for name in names():
        try:
            built[name] = str(sidecar.ensure(name).parent.parent)
        except ConfigError as e:
            # This Python cannot have it; the others can be built.
            missing[name] = str(e)
            console.say(f"Without {name}: {e}")
    console.facts(built)
    console.finish({"sidecars": built, "missing": missing})


@app.command()
def pack(
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="A file, or an object (s3://, gs://, az://, abfss://)."),
    ] = "raypipe-sidecars.zip",
    python: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="The nodes' Python, as 3.12. Without it: this one."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="The nodes' machine: x86_64 or aarch64. Without it: this one's."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only these sidecars: fastdup, alibi.")
    ] = None,
    json: Json = False,
) -> None:
    """Pack the sidecars' wheels into an archive for nodes without internet.

    Set cluster.sidecars or RAYPIPE_SIDECARS to its address: then nodes with Linux and glibc 2.31 or
    newer build from it. With the printed #sha256=… they refuse an archive that was changed.

    Example: [bold]raypipe sidecars pack --python 3.12 --out s3://plant/sidecars.zip[/bold]
    """
    prepare_environment()
    console = Console(json)
    from raypipe.cluster.sidecars.pack import pack as packed
    from raypipe.cluster.sidecars.pins import Target, here, parse_python

    this = here()
    target = Target(
        parse_python(python) if python else this.python,
        _machine(machine) if machine else MACHINES.get(this.machine, this.machine),
    )
    console.say(f"Packing the sidecars for {target}: about a minute")
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else []
    found = packed(out, target, names)
    for name, why in found.missing.items():
        console.say(f"Without {name}: {why}")
    console.facts(
        {
            "sidecars": ", ".join(found.sidecars),
            "for": str(target),
            "archive": f"{found.size / 2**20:,.0f} MiB, {found.wheels} wheels",
            "cluster.sidecars": found.pinned,
        }
    )
    console.finish(
        {
            "archive": found.address,
            "sha256": found.sha256,
            "address": found.pinned,
            "bytes": found.size,
            "wheels": found.wheels,
            "python": target.python,
            "machine": target.machine,
            "sidecars": found.sidecars,
            "missing": found.missing,
        }
    )


def _machine(name: str) -> str:
    known = sorted({*MACHINES.values()})
    if name not in known:
        raise ConfigError(
            "There are no wheels for such a machine", got=name, rule=f"It is {' or '.join(known)}"
        )
    return name
