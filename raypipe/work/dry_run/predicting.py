"""The plans of verbs that predict a table with a registered model."""

from __future__ import annotations

from raypipe.config import replace as changed
from raypipe.costs import estimate, rates
from raypipe.costs.estimate import Part
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.registry.package import Package
from raypipe.serve import batch, since
from raypipe.serve.links import batches, links
from raypipe.serve.workers import Reading
from raypipe.tables import between
from raypipe.tables import clean as cleaning
from raypipe.tables.address import resolve
from raypipe.tables.between import Rows
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import promise
from raypipe.watch.window_log import Entry
from raypipe.watch.windows import Waiting, Windows
from raypipe.work.dry_run.at import At
from raypipe.work.evaluate import columns_of, model_of
from raypipe.work.find import batch_of, looked_at
from raypipe.work.model import Model
from raypipe.work.planned import Planned
from raypipe.work.result import Facts, prepared_from


def predict(at: At) -> Planned:
    job = at.job
    source = job.predict.table or job.watch.batch or job.table
    follows = job.predict.follow
    if follows and source.version is not None:
        raise ConfigError(
            "A stream follows the newest version",
            got=f"version={source.version}",
            fix="Leave the table's version out",
        )
    facts, parts = predictions(at, source, "last" if follows else job.predict.since)
    if follows == "always":
        facts["follows"] = "new versions, until SIGTERM: estimated is the version of now"
    return Planned("predict", facts, parts, most=True)


def predictions(
    at: At, source: TableConfig, added_to: str | None
) -> tuple[Facts, tuple[Part, ...]]:
    """Predicting a table with the champion. added_to: as predict.since."""
    job = at.job
    table, version = ImageTable.open_pinned(source)
    model = _model(at, None)
    cfg = changed(job.predict, {"since": added_to})
    # What is predicted already is not predicted again.
    out = batch.open_out(job.run, source, cfg, "plan a prediction")
    target = batch.target_of(source, table, version, model.version)
    known = links(out.counts())
    if since.made(known, target) is not None:
        facts = _facts(at, table, version, model, 0)
        kept = f"this model has predicted this version already, in {out.uri}"
        return facts | {"kept": kept}, (estimate.START.part("start", 1.0),)
    claim = since.Claim.of(out, target.line) if added_to else None
    base = since.base_of(known, target, claim, bool(added_to))
    planned = since.plan(table, version, source.where, out, base, target, at.show.say)
    if not planned.size and base is None:
        raise batch.NothingToPredict(
            f"{version} has no images to predict",
            got=source.where or None,
            fix="Check the table's version, where and sample",
        )
    facts, parts = _work(at, table, version, planned.rows, model)
    if base is not None:
        facts["added to"] = f"what this model has predicted of v{base.version}"
    return facts, parts


def _work(
    at: At, table: ImageTable, version: TableVersion, rows: Rows, model: Model
) -> tuple[Facts, tuple[Part, ...]]:
    """Predicting these rows in tasks of the cluster."""
    images = sum(rows.counts)
    facts = _facts(at, table, version, model, images)
    if not images:
        return facts, (estimate.START.part("start", 1.0),)
    at.show.say("Measuring some images on this machine")
    reading = Reading.of(rows, table.columns, at.job.predict.batch_size, table.storage_options)
    found = rates.of_package(model.package, rows.fragments, reading)
    at.calibrated.append(found.seconds)
    cpus = max(1.0, at.resources.get("CPU", 1))
    # A task gets about a second of work, so few images occupy few processes.
    busy = min(cpus, max(1.0, images * found.image.cpu_s))
    return facts, (
        estimate.START.part("start", found.slowness),
        estimate.WORKER.part("workers", found.slowness, busy),
        estimate.predicting(images, found.image, cpus),
    )


def _facts(at: At, table: ImageTable, version: TableVersion, model: Model, images: int) -> Facts:
    facts: Facts = {"table": str(version), **prepared_from(version, "prepared from")}
    facts |= {"images": images, "model": str(model.version)} | at.facts()
    cpus, gpus = max(1.0, at.resources.get("CPU", 1)), at.job.predict.gpus
    facts["workers"] = f"{cpus:g}, a CPU each"
    if gpus:
        facts["workers"] = f"a GPU each (predict.gpus={gpus:g}); measured is this machine's CPU"
    return facts


def _model(at: At, wanted: str | None) -> Model:
    """A registered model; the champion where none is named."""
    return model_of(looked_at(at.job), wanted)


def champion(job: Job) -> Package:
    return model_of(looked_at(job), None).package


def _window(at: At) -> tuple[Facts, tuple[Part, ...]]:
    """Predicting the images that the next check looks at. `waits`: too few came for one."""
    job, source = at.job, batch_of(at.job)
    windows = Windows(source, job.watch, job.run, at.show.say)
    windows.log.only_look()
    model = _model(at, None)
    window = windows.next()
    if isinstance(window, Waiting):
        facts: Facts = {"table": str(window.table), "images": window.images, "waits": str(window)}
        return facts | at.facts(), (estimate.START.part("start", 1.0),)

    # There may be a newer version than the one that the window was opened with.
    source = source.model_copy(update={"version": window.version.version})
    if window.rows is None:
        facts, parts = predictions(at, source, job.predict.since)
    elif window.again and _has_predicted(model, windows.log.checked[-1], source):
        facts = _facts(at, ImageTable.open(source), window.version, model, 0)
        facts["kept"] = "nothing came since the last check, and this model has predicted its images"
        parts = (estimate.START.part("start", 1.0),)
    else:
        table = ImageTable.open(source)
        facts, parts = _work(at, table, window.version, window.rows, model)
    return facts | ({"window": str(window)} if window.number else {}), parts


def _has_predicted(model: Model, checked: Entry, source: TableConfig) -> bool:
    """Are the predictions of a checked window this model's? There may be another champion since."""
    options = source.storage_options
    for rows in batches(checked.predictions, checked.prediction, ["model"], options):
        return rows["model"].to_pylist()[:1] == [str(model.version)]
    return False


def drift(at: At) -> Planned:
    facts, parts = _window(at)
    if "waits" in facts:
        return Planned("drift", facts, parts, most=True)
    model = str(facts["model"])
    alpha = promise.level(at.job.run, at.job.watch, "the next images", model)
    cautions = promise.too_little(at.job.watch, alpha)
    if alpha is None:
        alpha = at.job.drift.alpha
    facts["tests"] = f"against the reference of {model}, alpha {alpha:.3g}"
    for note in cautions:
        facts["caution"] = note
    return Planned("drift", facts, parts, most=True, missing="the drift tests")


def evaluate(at: At) -> Planned:
    job = at.job
    source = job.evaluate.table
    # A wrong table comes before a wrong model, as in the verb.
    named = source or job.table
    ImageTable(resolve(named.uri), storage_options=named.storage_options).pin(named.version)
    model = _model(at, job.evaluate.model)
    if source is None:
        # The test split of the job's own table.
        pinned = pin(job.table, job.feed, kind=model.package.task.kind)
        table, version, where = pinned.table, pinned.version, pinned.rows_of(job.feed.test)
    else:
        columns = columns_of(source, model.package, job.table)
        table, version = ImageTable.open_pinned(source.model_copy(update={"columns": columns}))
        where = source.where
    rows = between.selected(table, version, where)
    if not sum(rows.counts):
        raise DataError(
            f"{version} has no image to evaluate on", got=where or None, fix="Check evaluate.table"
        )
    facts, parts = _work(at, table, version, rows, model)
    return Planned("evaluate", facts, parts, most=True, missing="intervals and the page")


def clean(at: At) -> Planned:
    table, version = ImageTable.open_pinned(at.job.table)
    images = sum(between.selected(table, version, at.job.table.where).counts)
    # A version that was cleaned before is refused here, too.
    cleaning.earlier(table, version, at.job.table, at.job.clean)
    facts: Facts = {"table": str(version), "images": images} | at.facts()
    facts["tag"] = at.job.clean.tag
    return Planned("clean", facts, missing="fastdup's time")
