"""raypipe doctor: what is wrong with this machine, and with the places that a config names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from raypipe.cli.console import Console
from raypipe.cli.how import Json
from raypipe.config import load
from raypipe.errors import RaypipeError, hidden
from raypipe.files import is_there

if TYPE_CHECKING:
    from raypipe.doctor.finding import Finding

STYLES = {"ok": "dim", "skipped": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML configuration: also check its table, MLflow store, cluster and run folder.",
            metavar="[CONFIG]",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value", show_default=False)
    ] = None,
    json: Json = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Fix what is safe and local: file modes, stale locks, sidecars, an old SQLite "
            "store of MLflow (after a copy). Each change is printed.",
        ),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only these checks: token,table.")
    ] = None,
) -> None:
    """Find faults of this machine, and of the table, stores and cluster that a configuration names.
    Each finding names a fix. Exit code 1 if there is a failure.

    Example: [bold]raypipe doctor jobs/configs/solar.yaml --fix[/bold]
    """
    console = Console(json)
    # Not at the top: --help should not wait for what the checks import.
    try:
        from raypipe.doctor.checks import chosen
        from raypipe.doctor.finding import Asked, Settings
        from raypipe.doctor.run import examine, mend
    except ImportError as e:
        raise RaypipeError(
            f"A package that every verb needs cannot be imported: {e}",
            rule="Without it nothing runs, and doctor can check nothing else",
            fix="unset PYTHONPATH, or install raypipe again (make install in its checkout)",
        ) from e

    given = list(overrides or [])
    # `raypipe doctor table.uri=…` has no file.
    if config is not None and "=" in config and not is_there(config):
        given, config = [config, *given], None
    path = Path(config) if config else None
    asked = Asked(path, tuple(given), load(Settings, path, given))
    checks = chosen(only, asked.has_config)
    started = time.monotonic()
    with console.progress("Checking", "checks") as tick:
        found = examine(checks, asked, tick)
    # Looking changes nothing; only --fix does.
    if fix:
        found = mend(found, checks, asked, console.say)

    findings = [finding for each in found.values() for finding in each]
    show(console, findings)
    failed = [finding.name for finding in findings if finding.state == "fail"]
    warned = [finding.name for finding in findings if finding.state == "warn"]
    seconds = time.monotonic() - started
    console.say(_verdict(failed, warned, len(findings), seconds))
    if not asked.has_config and only is None:
        console.say("raypipe doctor CONFIG tries its table, MLflow store and run folder too")
    console.finish(
        {
            "healthy": not failed,
            "failed": failed,
            "warned": warned,
            "seconds": round(seconds, 1),
            "findings": [as_json(finding) for finding in findings],
        }
    )
    if failed:
        raise typer.Exit(1)


def show(console: Console, findings: Sequence[Finding]) -> None:
    """One line a finding, and below it the rule and the way out where something is wrong."""
    width = max(len("way out"), *(len(finding.name) for finding in findings))
    for finding in findings:
        style = STYLES[finding.state]
        head = f"{finding.state:<7}  {finding.name:<{width}}  "
        # What is well stays in the background.
        seen = (finding.seen, "dim" if style == "dim" else "")
        lines = [Text.assemble((head, style), seen)]
        for title, text in (("rule", finding.rule), ("way out", finding.way_out)):
            if text and finding.state in ("warn", "fail"):
                lines.append(Text.assemble((f"{'':<9}{title:>{width}}  ", "dim"), text))
        for line in lines:
            line.plain = hidden(line.plain)
            console.out.print(line, soft_wrap=True)


def _verdict(failed: Sequence[str], warned: Sequence[str], total: int, seconds: float) -> str:
    parts = []
    if failed:
        parts.append(f"{len(failed)} failed: {', '.join(failed)}")
    if warned:
        parts.append(f"{len(warned)} to look at: {', '.join(warned)}")
    what = "; ".join(parts) or "nothing is wrong"
    return f"{total} finding{'s' * (total != 1)} in {seconds:.0f} s: {what}"


def as_json(finding: Finding) -> dict[str, Any]:
    """A finding without its function."""
    return {
        "name": finding.name,
        "state": finding.state,
        "seen": finding.seen,
        "rule": finding.rule,
        "way_out": finding.way_out,
        "can_fix": finding.mend is not None,
    }
