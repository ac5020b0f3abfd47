"""raypipe evaluate MODEL TABLE, or raypipe evaluate CONFIG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.app import run_verb
from raypipe.cli.how import Detach, DryRun, How, Json, Submit
from raypipe.errors import ConfigError
from raypipe.files import is_there
from raypipe.yaml_scalars import quoted


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="models:/NAME@champion, models:/NAME/3, or a YAML configuration: its champion.",
            metavar="MODEL",
        ),
    ],
    table: Annotated[
        str | None,
        typer.Argument(
            help="A labelled Delta table. Without it, the test split of the configuration's table.",
            metavar="[TABLE]",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, as evaluate.group=part", show_default=False),
    ] = None,
    json: Json = False,
    submit: Submit = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Measure a registered model on a labelled table: overall and by slice, with intervals. The
    report shows its most confident mistakes as pictures.

    Example: [bold]raypipe evaluate models:/cells@champion tables/night evaluate.slices=\\[line]
    run.dir=runs/cells[/bold]
    """
    given, how = list(overrides or []), How(json, submit, detach, dry_run)
    # `raypipe evaluate mine.yaml evaluate.group=part` names no table.
    if table is not None and _is_setting(table):
        given, table = [table, *given], None
    # A named model that was submitted arrives as the settings that it stands for.
    if _is_setting(model):
        run_verb("evaluate", None, [model, *given], how)
        return
    named = [f"evaluate.table.uri={quoted(table)}"] if table else []
    if not model.startswith("models:/"):
        if "@" in model and not is_there(model) and not model.endswith((".yaml", ".yml")):
            raise ConfigError(
                "This names no registered model, and no configuration",
                got=model,
                rule="models:/NAME@ALIAS or models:/NAME/VERSION",
                fix=f"raypipe evaluate models:/{model} TABLE",
            )
        run_verb("evaluate", Path(model), [*named, *given], how)
        return
    if table is None:
        raise ConfigError(
            "raypipe evaluate needs a table beside the model",
            got=model,
            fix=f"raypipe evaluate {model} TABLE, or raypipe evaluate CONFIG",
        )
    # Not at the top: --help should not wait for what the work imports.
    from raypipe.work.find import defaults

    # What is said on the command line comes last, and wins.
    settings = [f"table.uri={quoted(table)}", f"evaluate.model={quoted(model)}", *named]
    for section, values in defaults(model).items():
        settings += [f"{section}.{name}={quoted(value)}" for name, value in values.items()]
    run_verb("evaluate", None, [*settings, *given], how)


def _is_setting(word: str) -> bool:
    """Is it section.key=value, and no model or file with = in its name?"""
    return "=" in word and not word.startswith("models:/") and not is_there(word)
