"""raypipe VERB CONFIG [section.key=value …]: image AutoML for Delta Lake, on Ray.

Exit codes: 0 done, 1 failed, 2 wrong usage, configuration or data, 3 drift found (`drift
--exit-code` only).
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from raypipe import guard
from raypipe.cli.console import Console
from raypipe.cli.how import Detach, DryRun, How, Json, Submit
from raypipe.cluster.connect import prepare_environment
from raypipe.config import load
from raypipe.errors import ConfigError
from raypipe.files import is_there
from raypipe.yaml_scalars import quoted

app = typer.Typer(
    name="raypipe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=__doc__,
)

EXAMPLE = "jobs/configs/solar.yaml"
Config = Annotated[
    Path, typer.Argument(help=f"YAML configuration, e.g. {EXAMPLE}", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value", show_default=False)
]


def run_verb(
    name: str,
    config: Path | None,
    overrides: list[str] | None,
    how: How,
    flags: Sequence[str] = (),
) -> dict[str, Any]:
    """Load the configuration and run the verb; the three hops are cli -> config.load -> room.

    flags: options that a submitted verb gets too. Raises typer.Exit with a submitted verb's exit
    code, if that is not 0.
    """
    prepare_environment()
    console = Console(how.json, guard.began())
    from raypipe.job import (
        Job,
    )  # rooms import torch and Ray: --help and a misspelt path should not wait for them

    if how.detach and how.submit is None:
        raise ConfigError("--detach needs --submit", fix="Add --submit http://HOST:8265")
    job = load(Job, config, overrides or [])
    # A job is run by raypipe on the cluster; this process only follows it.
    if how.submit is not None:
        from raypipe.cli.submit import submitted

        flags = [*flags, "--dry-run"] if how.dry_run else flags
        code = submitted(name, config, overrides or [], how, flags, job, console)
        if code:
            raise typer.Exit(code)
        return {}
    from raypipe.cli import verbs
    from raypipe.cluster.connect import close
    from raypipe.cluster.luggage import require_lasting
    from raypipe.stores import address
    from raypipe.tables.address import resolve

    places = {"run.dir": str(job.run.path), "table.uri": resolve(job.table.uri)}
    if job.artifacts.uri is not None:
        places["artifacts.uri"] = address(job.artifacts.uri)
    require_lasting(places)
    run = verbs.plan if how.dry_run else verbs.run
    try:
        result = run(name, job, console)
    finally:
        close()
    console.finish(result)
    return result


def _verb(name: str, help: str, example: str) -> None:
    def command(
        config: Config,
        overrides: Overrides = None,
        json: Json = False,
        submit: Submit = None,
        detach: Detach = False,
        dry_run: DryRun = False,
    ) -> None:
        run_verb(name, config, overrides, How(json, submit, detach, dry_run))

    app.command(name, help=f"{help}\n\nExample: [bold]raypipe {name} {EXAMPLE} {example}[/bold]")(
        command
    )


@app.command("ingest")
def ingest(
    config: Config,
    overrides: Overrides = None,
    max_side: Annotated[
        int | None, typer.Option(help="Most pixels of a side; larger images are made smaller.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(help="JPEG and WebP quality of smaller images, 1-100.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Accepted formats, for example JPEG,PNG,TIFF.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Ray tasks at a time; 0: threads of this process; or auto.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show classes, counts and splits of the source; write nothing."
        ),
    ] = False,
    json: Json = False,
    submit: Submit = None,
    detach: Detach = False,
) -> None:
    """Verify images from a folder, tar files, Parquet, Hugging Face or Delta, and add each to the
    table exactly once.

    Example: [bold]raypipe ingest jobs/configs/solar.yaml ingest.from.images=photos --max-side
    512[/bold]
    """
    # The option's list becomes YAML, like any override.
    listed = f"[{formats.upper()}]" if formats is not None else None
    flags = {"max_side": max_side, "quality": quality, "formats": listed, "workers": workers}
    flags |= {"dry_run": True} if dry_run else {}
    given = [f"ingest.{name}={value}" for name, value in flags.items() if value is not None]
    how = How(json, submit, detach)
    run_verb("ingest", config, [*(overrides or []), *given], how)


_verb(
    "clean",
    "Find duplicates, broken, dark, bright and blurred images and outliers (fastdup); tag a table "
    "version without the kinds that clean.drop lists.",
    "table.version=raw",
)
_verb(
    "train",
    "Train one model (Ray Train; DDP, FSDP or ZeRO, chosen by memory) and register it. "
    "model.name: efficientnet_lite0, small_cnn, hf:…, timm:…, torchvision:… or "
    "file:module:factory.",
    "train.workers=2 model.mode=finetune",
)


@app.command("tune")
def tune(
    config: Annotated[
        str | None,
        typer.Argument(help=f"YAML configuration, e.g. {EXAMPLE}; not needed with --table"),
    ] = None,
    overrides: Overrides = None,
    table: Annotated[
        str | None, typer.Option(help="The Delta table of images (table.uri).")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The label column (table.columns.label).")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="The image column (table.columns.image).")
    ] = None,
    json: Json = False,
    submit: Submit = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Search hyperparameters (Ray Tune, ASHA) and register the best model.

    search.preset=fast, good or best takes at most 3, 20 or 60 minutes in all; search.budget_s=600
    takes at most 600 seconds.

    Without search.space a default space is searched, except fields that you set. In a space of your
    own, each field has one of

    grid(a, b), choice(a, b), uniform(low, high), loguniform(low, high), quniform(low, high, q),
    randint(low, high) without high

    and, if you like, a condition: search.space.model.frozen_blocks="randint(0, 6) if model.mode ==
    'finetune'"

    Example: [bold]raypipe tune --table tables/cells --label defect search.preset=good[/bold]
    """
    given = list(overrides or [])
    # `raypipe tune table.uri=… --label …` has no file: the first word is an override.
    if config is not None and "=" in config and not is_there(config):
        given, config = [config, *given], None
    flags = {"table.uri": table, "table.columns.label": label, "table.columns.image": image}
    given += [f"{name}={quoted(value)}" for name, value in flags.items() if value is not None]
    run_verb(
        "tune",
        Path(config) if config else None,
        given if config else _of_table(given),
        How(json, submit, detach, dry_run),
    )


def _of_table(overrides: list[str]) -> list[str]:
    """What a run without a config file needs: a table, and a name and a folder that are the
    table's.
    """
    # Not at the top: --help should not wait for what the work imports.
    from raypipe.work.names import run_of, table_of

    uri = table_of(overrides)
    if uri is None:
        raise ConfigError(
            "There is neither a config file nor a table",
            fix=f"raypipe tune --table FOLDER --label COLUMN, or raypipe tune {EXAMPLE}",
        )
    run = run_of(uri)
    return [f"run.name={quoted(run['name'])}", f"run.dir={quoted(run['dir'])}", *overrides]


@app.command("predict")
def predict(
    config: Config,
    overrides: Overrides = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue with new table versions until SIGTERM.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Predict rows that are new since the last time, and end.")
    ] = False,
    json: Json = False,
    submit: Submit = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Write predictions for every image of a table version to a Delta table; with --follow or
    --once only for new and changed images.

    Example: [bold]raypipe predict jobs/configs/solar.yaml predict.table.uri=tables/new[/bold]
    """
    if follow and once:
        raise ConfigError("--follow and --once contradict each other", fix="Take one of them")
    given = list(overrides or [])
    if follow or once:
        given.append(f"predict.follow={'once' if once else 'always'}")
    run_verb("predict", config, given, How(json, submit, detach, dry_run))


_verb(
    "retrain",
    "Check for drift. If there is drift (or what watch.policy counts) and there are labels, train "
    "a challenger, compare it with the champion, and promote it if it is better.",
    "watch.batch.uri=tables/night",
)


@app.command()
def drift(
    config: Config,
    overrides: Overrides = None,
    json: Json = False,
    submit: Submit = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 3 if there is drift.")
    ] = False,
    power: Annotated[
        bool,
        typer.Option(
            "--power",
            help="Check nothing. Measure on the champion's reference how often windows of "
            "watch.power images alarm without drift, and which changes they find.",
        ),
    ] = False,
) -> None:
    """Compare new images with the champion's reference, which are features and scores of images
    that it was not trained on (MMD, KS and other tests). Write the results and an HTML report.

    Example: [bold]raypipe drift jobs/configs/solar.yaml watch.batch.uri=tables/night
    --exit-code[/bold]
    """
    flags = ["--exit-code"] * exit_code + ["--power"] * power
    how = How(json, submit, detach, dry_run)
    # A job is the verb with its flags.
    name = "power" if power and submit is None else "drift"
    result = run_verb(name, config, overrides, how, flags)
    # A submitted verb has left already, with its job's exit code.
    if exit_code and result.get("is_drift"):
        raise typer.Exit(3)


@app.command("config")
def show_config(
    section: Annotated[
        str | None,
        typer.Argument(help="A section, for example train; without it: all.", show_default=False),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema that editors use.")
    ] = False,
) -> None:
    """Explain the settings: their type, default and meaning.

    Example: [bold]raypipe config train[/bold]
    """
    console = Console()
    from raypipe.cli import reference
    from raypipe.job import Job

    if schema:
        print(dumps(reference.schema(), indent=1, ensure_ascii=False))
    elif section is None:
        console.facts({name: field.description for name, field in Job.model_fields.items()})
    else:
        rows = []
        for setting in reference.settings(section):
            kind = setting.kind.replace("`", "")
            rows.append([setting.name, kind, setting.default, setting.text])
        console.table(f"Settings of {section}", ["key", "type", "default", "meaning"], rows)
