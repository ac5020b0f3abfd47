"""How a verb runs: the options that every verb has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON line on stdout; messages go to stderr.")
]
Submit = Annotated[
    str | None,
    typer.Option(
        "--submit",
        metavar="ADDRESS",
        help="Run this verb as a job on the Ray cluster at http://HOST:8265.",
    ),
]


Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="With --submit: print the job's id and end. "
        "`raypipe jobs ADDRESS --follow ID` shows its output.",
    ),
]


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what the verb would do, and estimate what it takes if possible; write nothing.",
    ),
]


@dataclass(frozen=True)
class How:
    """How a verb runs.

    submit: a dashboard's address; None: here. detach: without following it. dry_run: only its plan.
    """

    json: bool = False
    submit: str | None = None
    detach: bool = False
    dry_run: bool = False
