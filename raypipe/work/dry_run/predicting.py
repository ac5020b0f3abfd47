"""The plans of verbs that predict a table with the champion."""

from __future__ import annotations

from raypipe.costs import estimate, rates
from raypipe.costs.estimate import Part
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.serve.workers import Reading
from raypipe.tables import between
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.work.dry_run.at import At
from raypipe.work.find import require_store
from raypipe.work.planned import Planned
from raypipe.work.result import Facts, prepared_from


def predict(at: At) -> Planned:
    source = at.job.predict.table or at.job.watch.batch or at.job.table
    facts, parts = predictions(at, source)
    if at.job.predict.follow == "always":
        facts["follows"] = "new versions, until SIGTERM: estimated is the version of now"
    return Planned("predict", facts, parts, most=True)


def predictions(at: At, source: TableConfig) -> tuple[Facts, tuple[Part, ...]]:
    """Predicting a table with the champion."""
    cfg = at.job.predict
    table, version = ImageTable.open_pinned(source)
    model, package = champion(at.job)
    rows = between.selected(table, version, source.where)
    images = sum(rows.counts)
    if not images:
        raise DataError(
            f"{version} has no row to predict", got=source.where, fix="Check table.where"
        )

    # What it takes.
    at.show.say("Measuring some images on this machine")
    reading = Reading.of(rows, table.columns, cfg.batch_size, table.storage_options)
    found = rates.of_package(package, rows.fragments, reading)
    at.calibrated.append(found.seconds)
    cpus = max(1.0, at.resources.get("CPU", 1))
    # A task gets about a second of work, so few images occupy few processes.
    busy = min(cpus, max(1.0, images * found.image.cpu_s))
    parts = (
        estimate.START.part("start", found.slowness),
        estimate.WORKER.part("workers", found.slowness, busy),
        estimate.predicting(images, found.image, cpus),
    )

    # What it would do.
    facts: Facts = {"table": str(version), **prepared_from(version, "prepared from")}
    facts |= {"images": images, "model": str(model)} | at.facts()
    facts["workers"] = f"{cpus:g}, a CPU each"
    if cfg.gpus:
        facts["workers"] = f"a GPU each (predict.gpus={cfg.gpus:g}); measured is this machine's CPU"
    facts["kept"] = "what this model has predicted of this version is not predicted again"
    return facts, parts


def champion(job: Job) -> tuple[ModelVersion, Package]:
    require_store(job.run, job.registry)
    store = tracking.open_store(job.run, job.registry)
    model = promote.require_champion(store)
    return model, promote.fetch(store, model)


def drift(at: At) -> Planned:
    source = at.job.watch.batch
    if source is None:
        raise ConfigError("There is no batch to check", fix="Add watch.batch.uri=…")
    facts, parts = predictions(at, source)
    facts["tests"] = f"against the reference of {facts['model']}, alpha {at.job.drift.alpha:g}"
    return Planned("drift", facts, parts, most=True, missing="the tests in their sidecar")


def evaluate(at: At) -> Planned:
    source = at.job.evaluate.table
    if source is None:
        # The test split of the job's own table.
        pinned = pin(at.job.table, at.job.feed, kind=at.job.model.task)
        split = {at.job.table.columns.split: pinned.parts(at.job.feed.test)}
        source = at.job.table.model_copy(update={"where": {**at.job.table.where, **split}})
    facts, parts = predictions(at, source)
    return Planned("evaluate", facts, parts, most=True, missing="intervals and the page")


def clean(at: At) -> Planned:
    table, version = ImageTable.open_pinned(at.job.table)
    images = sum(between.selected(table, version, at.job.table.where).counts)
    facts: Facts = {"table": str(version), "images": images} | at.facts()
    facts["tag"] = at.job.clean.tag
    return Planned("clean", facts, missing="fastdup's time")
