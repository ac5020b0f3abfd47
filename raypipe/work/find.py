"""A registered model by its name: models:/NAME@ALIAS, models:/NAME/VERSION, or a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.config import RunConfig, Section, load, merge
from raypipe.errors import ConfigError, DataError
from raypipe.files import is_there
from raypipe.job import Job
from raypipe.registry import fetching, promote, tracking, versions
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig
from raypipe.work.model import Model

# MLflow takes no name with a colon or a quotation mark. One with an @ is there up to the last one.
MODEL = re.compile(r"models:/(?P<name>[^/:'\"]+?)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
NAMED = "models:/NAME@ALIAS or models:/NAME/VERSION"


class Where(Section):
    """Where a named model is looked for."""

    run: RunConfig = RunConfig()
    """The run whose folder holds the store, if `registry.uri` names none."""

    registry: RegistryConfig = RegistryConfig()
    """The store of models."""


def find(model: str, run: Mapping[str, Any], registry: Mapping[str, Any]) -> Model:
    """The registered model of this name; without settings it is looked for in runs/NAME.

    Raises ConfigError for another text, DataError for a model or version that does not exist, or
    whose files are not those that were registered.
    """
    return _find(model, merge(defaults(model), {"run": run, "registry": registry}), ())


def of_command(model: str, overrides: Sequence[str]) -> Model:
    """The model that a command names: as `find` does, or the champion of a YAML configuration."""
    # A registered model's name is no name of a file: it has a scheme.
    if MODEL.fullmatch(model):
        return _find(model, defaults(model), overrides)
    if not is_there(model):
        raise unknown(model, "models:/NAME@ALIAS, models:/NAME/VERSION or a YAML configuration")
    job = load(Job, model, overrides)
    store = looked_at(job)
    champion = promote.require_champion(store)
    return Model(fetching.fetch(store, champion), champion)


def defaults(model: str) -> dict[str, Any]:
    named = MODEL.fullmatch(model)
    if named is None:
        raise unknown(model, NAMED)
    name = named["name"]
    settings = {"model": name, "alias": named["alias"] or "champion"}
    return {"run": {"name": name, "dir": f"runs/{name}"}, "registry": settings}


def _find(model: str, settings: Mapping[str, Any], overrides: Sequence[str]) -> Model:
    """settings: `defaults(model)`, with the caller's own over them."""
    where = load(Where, None, overrides, settings)
    require_store(where.run, where.registry)
    store = open_store(where.run, where.registry, create=False)
    named = MODEL.fullmatch(model)
    assert named is not None, "`defaults` refuses every other text"

    # Without a number it is an alias, and `defaults` has made it the store's: so the store's
    # champion is the version that it names. It may move between two calls; now counts.
    if named["version"] is None:
        champion = promote.require_champion(store)
        return Model(fetching.fetch(store, champion), champion)
    fix = f"models:/{named['name']}@champion is the model in use"
    version = versions.require(store, int(named["version"]), fix)
    return Model(fetching.fetch(store, version), version)


def require_store(run: RunConfig, registry: RegistryConfig) -> None:
    """Opening a store makes it: a misspelt name must not leave an empty one behind."""
    file = tracking.store_file(run, registry)
    if file is not None and not file.exists():
        raise DataError(
            "There is no model store here",
            got=str(run.path if registry.uri is None else file),
            fix="Name the run's folder (run.dir; in Python run={'dir': …}) or the store "
            "(registry.uri). raypipe tune CONFIG makes a first model",
        )


def looked_at(job: Job) -> Store:
    """The job's store as it is: nothing is made in it or in the run's folder."""
    require_store(job.run, job.registry)
    return open_store(job.run, job.registry, job.artifacts, create=False)


def in_use(job: Job) -> Store:
    """The job's store, which has a champion. Without one, nothing is made either."""
    promote.require_champion(looked_at(job))
    return open_store(job.run, job.registry, job.artifacts)


def batch_of(job: Job) -> TableConfig:
    """The batch that a drift check looks at. Raises ConfigError where the job names none."""
    if job.watch.batch is None:
        raise ConfigError(
            "There is no batch to check",
            rule="watch.batch.uri names a Delta table of new images",
            fix="Add watch.batch.uri=…",
        )
    return job.watch.batch


def unknown(model: str, rule: str) -> ConfigError:
    """For a text that names no model; `rule` says what does."""
    return ConfigError(
        "This names no registered model",
        got=model,
        rule=rule,
        fix="models:/NAME@champion is the model in use",
    )
