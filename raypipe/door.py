"""The Python door: `import raypipe`, and a call for each verb, for notebooks and scripts.

    import raypipe
    best = raypipe.tune("tables/cells", label="defect")
    night = raypipe.drift("tables/cells", batch="tables/night")

A call does what its verb does on the command line, with the same settings, and returns its result.
Every call takes:

- table       the Delta table of images; `label` and `image` name its columns
- config      a YAML file, as on the command line
- sections    settings by section: train={"lr": 0.01}, run={"dir": "runs/cells"}
- overrides   ["train.lr=0.01"], as on the command line

Overrides replace sections, and sections replace the file. A call without `config` keeps its files
in runs/NAME, with the table's name, unless `run` says otherwise. The Ray cluster stays for the next
call; `raypipe.close()` ends it. A notebook's own MLflow store stays the one that it was.
`raypipe/__init__.py` loads this module at the first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from raypipe.cli.console import Console
from raypipe.cluster import connect
from raypipe.config import load as load_config
from raypipe.config import merge, set_field
from raypipe.errors import ConfigError, closest
from raypipe.job import Job
from raypipe.registry import theirs
from raypipe.work import find, verbs
from raypipe.work.evaluate import Evaluated
from raypipe.work.find import defaults
from raypipe.work.model import Model
from raypipe.work.names import run_of, table_of
from raypipe.work.results.data import Cleaned, Followed, Ingested, Predicted
from raypipe.work.results.models import Searched, Trained
from raypipe.work.results.watching import Drifted, Retrained, Waited

PathLike = str | Path
ARGUMENTS = ["label", "image", "table", "config", "overrides"]


def ingest(
    images: PathLike | None = None,
    table: PathLike | None = None,
    *,
    labels: PathLike | None = None,
    **settings: Any,
) -> Ingested:
    """Add images to a Delta table. Without `labels`, a table of labels, folders are the labels."""
    given = {
        "ingest.from.images": images,
        "ingest.from.labels": labels,
        # Of the source: the table that ingest writes has names of its own.
        "ingest.from.label_column": settings.pop("label", None),
        "ingest.from.image_column": settings.pop("image", None),
    }
    return verbs.ingest(_job(table, given, settings), Console())


def clean(table: PathLike | None = None, **settings: Any) -> Cleaned:
    """Judge the images of a table, and tag a version without those that the policy drops."""
    return verbs.clean(_job(table, {}, settings), Console())


@theirs.addresses_kept()
def train(table: PathLike | None = None, **settings: Any) -> Trained:
    """Train one model and register it."""
    return verbs.train(_job(table, {}, settings), Console())


@theirs.addresses_kept()
def tune(table: PathLike | None = None, **settings: Any) -> Searched:
    """Search hyperparameters and register the best model."""
    return verbs.tune(_job(table, {}, settings), Console())


@theirs.addresses_kept()
def predict(
    table: PathLike | None = None, *, batch: PathLike | None = None, **settings: Any
) -> Predicted | Followed:
    """Predict every image of the table `batch`, or of `table`, with the champion of `table`."""
    return verbs.predict(_job(table, {"predict.table.uri": batch}, settings), Console())


@theirs.addresses_kept()
def evaluate(model: str, table: PathLike | None = None, **settings: Any) -> Evaluated:
    """Measure models:/NAME@ALIAS or models:/NAME/VERSION on a labelled table.

    Without `table` the settings say which: config=…, or evaluate={"table": …}.
    """
    named = defaults(str(model))
    has_file = settings.get("config") is not None
    # A file says itself where its models are, and which table is the job's own.
    tree = merge({} if has_file else named, {"evaluate": {"model": str(model)}})
    if table is not None:
        tree = merge(tree, {"evaluate": {"table": {"uri": str(table)}}})
    given = merge(tree, settings)
    own = table if table is not None or has_file else _uri_in(given["evaluate"])
    return verbs.evaluate(_job(own, {}, given), Console())


@theirs.addresses_kept()
def drift(
    table: PathLike | None = None, *, batch: PathLike | None = None, **settings: Any
) -> Drifted | Waited:
    """Compare what came to `batch` since the last check with the champion's reference."""
    return verbs.drift(_job(table, {"watch.batch.uri": batch}, settings), Console())


@theirs.addresses_kept()
def retrain(
    table: PathLike | None = None, *, batch: PathLike | None = None, **settings: Any
) -> Retrained:
    """On drift of `batch`, train a challenger on `table`, compare, and promote it when better."""
    return verbs.retrain(_job(table, {"watch.batch.uri": batch}, settings), Console())


@theirs.addresses_kept()
def load(model: str, *, run: Any = None, registry: Any = None) -> Model:
    """A registered model: models:/NAME@ALIAS or models:/NAME/VERSION.

    Without settings it is looked for in runs/NAME. Raises ConfigError for another text, DataError
    for a model or version that does not exist, or whose files are not those that were registered.
    """
    for name, value in (("run", run), ("registry", registry)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} is a section", got=value, fix=f"{name}={{'dir': …}}")
    return find.find(str(model), run or {}, registry or {})


def close() -> None:
    """End the Ray cluster that earlier calls started, or leave the one that they joined."""
    connect.close()


def _uri_in(section: Any) -> str | None:
    """The address of the section's table, if it names one. The configuration looks at all else."""
    table = section.get("table") if isinstance(section, Mapping) else None
    uri = table.get("uri") if isinstance(table, Mapping) else None
    return None if uri is None else str(uri)


def _job(table: PathLike | None, given: dict[str, Any], settings: dict[str, Any]) -> Job:
    """The Job of a call. Raises ConfigError as the command line does."""
    # What is left after these is sections, whose names the configuration checks.
    config: PathLike | None = settings.pop("config", None)
    overrides: Sequence[str] = settings.pop("overrides", ())
    overrides = overrides or ()
    is_list = isinstance(overrides, (list, tuple))
    if not is_list or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(
            "overrides is a list of texts", got=overrides, fix="overrides=['train.lr=0.01']"
        )
    if config is not None and not isinstance(config, (str, PurePath)):
        raise ConfigError(
            "config is the path of a YAML file",
            got=type(config).__name__,
            fix="Settings are sections: train={'lr': 0.01}",
        )
    # A section `table` may stand in place of the address, with more of its settings.
    if isinstance(table, Mapping):
        settings["table"] = dict(table)
        table = settings["table"].get("uri")
    named = {
        "table.uri": table,
        "table.columns.label": settings.pop("label", None),
        "table.columns.image": settings.pop("image", None),
    }
    tree: dict[str, Any] = {}
    for name in settings.keys() - Job.model_fields.keys():
        close = closest(name, ARGUMENTS, 0.8)
        if close:
            raise ConfigError(
                f"There is no argument {name}", got=settings[name], fix=f"Did you mean {close!r}?"
            )
    # As on the command line, an override may name the table.
    address = (table if table is not None else table_of(overrides)) if config is None else None
    if isinstance(address, (str, PurePath)):
        tree["run"] = run_of(str(address))
    for key, value in (named | given).items():
        # None means not given; a section may still set the field to null.
        if value is not None:
            if not isinstance(value, (str, PurePath)):
                raise ConfigError(f"{key} is a text or a path", got=value)
            set_field(tree, key, str(value))
    # After the arguments: `table={"where": …}` adds to what `table` and `label` say.
    connect.prepare_environment()
    return load_config(Job, config, overrides, merge(tree, settings))
