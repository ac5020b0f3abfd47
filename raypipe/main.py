"""The `raypipe` command: all verbs together, and one message for whatever goes wrong."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import typer

from raypipe import guard
from raypipe.cli import report as reports
from raypipe.cli import sidecars, table
from raypipe.cli.app import app
from raypipe.cli.cost import cost
from raypipe.cli.doctor import doctor
from raypipe.cli.evaluate import evaluate
from raypipe.cli.export import export
from raypipe.cli.prepare import prepare
from raypipe.cli.promote import promote, rollback
from raypipe.cli.serve import serve
from raypipe.cli.submit import jobs
from raypipe.errors import ConfigError, nearest
from raypipe.failures import report
from raypipe.quickstart.command import quickstart

INTERRUPTED = 130  # what Typer makes of Ctrl-C, without a word

app.command("quickstart")(quickstart)
app.command("evaluate")(evaluate)
app.command("export")(export)
app.command("serve")(serve)
app.command("promote")(promote)
app.command("rollback")(rollback)
app.command("cost")(cost)
table.app.command("prepare")(prepare)
app.command("jobs")(jobs)
app.command("doctor")(doctor)
app.add_typer(sidecars.app, name="sidecars")
app.add_typer(table.app, name="table")
app.add_typer(reports.app, name="report")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Whatever goes wrong ends in one message. Our own mistakes show their traceback above it.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # A terminal of Latin-1 has no "–" and no "…": a traceback would be all that is shown.
    with suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if arguments and not arguments[0].startswith("-"):
            known = sorted(
                [c.name or "" for c in app.registered_commands]
                + ["drift", "quickstart", "report", "sidecars", "table"]
            )
            if arguments[0] not in known:
                raise ConfigError(
                    f"There is no verb {arguments[0]!r}", fix=nearest(arguments[0], known)
                )
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()  # a full disk or a closed pipe is known now, not after the last word
        return code if isinstance(code, int) else 0
    except typer.Exit as e:
        return int(e.exit_code)
    except BaseException as e:
        if hasattr(e, "format_message") and not e.format_message():
            return 2  # no verb was given at all: the help is on its way to stdout
        return report(e)


def entry(arguments: list[str] | None = None) -> None:
    """The console script and jobs/*.py end here, in a child process that may die without a word.

    Only a failure calls sys.exit: job runners treat any SystemExit as one.
    """
    _open_what_is_closed()
    code = guard.guarded(lambda: guard.report_code(main(arguments)))
    if code:
        sys.exit(code)


def _open_what_is_closed() -> None:
    """Whoever started this may have closed stdin, stdout or stderr, as `>&-` does: then what is
    written goes nowhere, and no file gets their numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number: this one.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


if __name__ == "__main__":
    entry()
