"""raypipe evaluate: how good a registered model is on a labelled table, and where it is worse."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from raypipe.cluster.connect import connect
from raypipe.config import key_of
from raypipe.errors import DataError
from raypipe.feed.dataset import parts, pin
from raypipe.job import Job
from raypipe.registry import fetching, promote, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.quality_parts import value
from raypipe.registry.store import Store, open_store
from raypipe.serve import evaluation, evaluation_page
from raypipe.serve.evaluation import Evaluation
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.table import Columns, ImageTable, TableConfig, TableVersion
from raypipe.train import learned
from raypipe.work import find
from raypipe.work.model import Model
from raypipe.work.result import Facts, Result, prepared_from
from raypipe.work.show import Show
from raypipe.work.tables import Table

FORMAT = 3  # of an evaluation: other intervals or slices are another evaluation
SHOWN = 8  # slices on a terminal; the report has all


@dataclass(frozen=True, repr=False)
class Evaluated(Result):
    """An evaluation, and its report. caution: why its numbers may be too good; "": nothing."""

    done: Evaluation
    page: Path
    caution: str = ""

    def facts(self) -> Facts:
        done = self.done
        facts: Facts = {
            "model": done.model,
            "table": str(done.table),
            **prepared_from(done.table, "prepared from"),
            "images": done.quality.images,
            "metrics": done.quality.metrics,
            "in short": evaluation_page.headline(done),
        }
        if done.skipped:
            facts["not judged"] = done.skipped
        if done.unknown:
            facts["unknown classes"] = evaluation.unknown_in_words(done.unknown)
        if self.caution:
            facts["caution"] = self.caution
        return facts | {"report": str(self.page)}

    def summary(self) -> Facts:
        done = self.done
        return {
            "model": done.model,
            "table": str(done.table),
            **prepared_from(done.table),
            "images": done.quality.images,
            "skipped": done.skipped,
            "unknown": done.unknown,
            "caution": self.caution or None,
            "metrics": done.quality.metrics,
            "interval": [done.sliced.low, done.sliced.high],
            "slices": [asdict(part) for part in done.sliced.slices],
            "calibration_error": _calibration_error(done),
            "report": str(self.page),
        }

    def tables(self) -> list[Table]:
        name = evaluation_page.metric(self.done)
        rows = []
        for part in self.done.sliced.slices[:SHOWN]:
            ends = evaluation_page.interval(self.done, part)
            verdict = "worse" if part.worse else ""
            shown = value(name, part.value)
            rows.append([evaluation_page.called(part), part.images, shown, ends, verdict])
        if not rows:
            return []
        return [
            Table("Slices, worst first", ["images where", "images", name, "interval", ""], rows)
        ]

    def report_page(self) -> str | None:
        return str(self.page)

    def key(self) -> str:
        return self.page.stem.removeprefix("evaluation-")


def evaluate(job: Job, show: Show) -> Evaluated:
    """Evaluate evaluate.model, else the champion, on evaluate.table, else the job's test split."""
    cfg = job.evaluate
    # A wrong address must not cost a cluster start.
    source = cfg.table or job.table
    ImageTable(resolve(source.uri), storage_options=source.storage_options).pin(source.version)
    # A model that is not there leaves nothing behind.
    model = model_of(find.looked_at(job), cfg.model)
    if cfg.table is not None:
        # Which columns count is the model's to say.
        source = cfg.table.model_copy(
            update={"columns": columns_of(cfg.table, model.package, job.table)}
        )
    ImageTable.open(source)
    store = open_store(job.run, job.registry, job.artifacts)
    connect(job.cluster)
    # Without a table of its own, the evaluation is of images that the search did not see.
    if cfg.table is None:
        pinned = pin(job.table, job.feed, kind=model.package.task.kind)
        table, version = pinned.table, pinned.version
        where = pinned.rows_of(job.feed.test)
        if not pinned.counts[job.feed.test]:
            raise DataError(
                f"{version} has no labelled image in the split {job.feed.test}",
                rule="Without evaluate.table, the test split of the job's table is evaluated",
                fix="Name a labelled table: evaluate.table.uri=…",
            )
    else:
        table = ImageTable.open(source)
        version, where = table.pin(cfg.table.version), cfg.table.where
    caution = _of_training_images(table, version, where, model.package)
    if caution:
        show.say(caution)

    # The same evaluation has the same name: its page is written again, its run logged once. How
    # the model and the table are called does not count; which rows are read, and as what, does.
    name = str(model.version)
    how = cfg.model_copy(update={"model": None, "table": None})
    rows = (version.identity, source.sample_key, where)
    named = key_of(
        "evaluation", FORMAT, name, model.package.seal, *rows, table.columns, how, job.run.seed
    )
    with show.progress(f"Evaluating {name} on {version}") as tick:
        done = evaluation.evaluate(
            model.package, name, table, version, where, cfg, job.run.seed, tick
        )
    page = job.run.path / "reports" / f"evaluation-{named}.html"
    evaluation_page.write(done, named, page, caution)
    _log(store, named, done, page)
    return Evaluated(done, page, caution)


def _calibration_error(done: Evaluation) -> float | None:
    calibration = done.quality.calibration
    return calibration.error if calibration else None


def model_of(store: Store, wanted: str | None) -> Model:
    """The version that evaluate.model names; the champion where it names none."""
    number, alias = None, store.alias
    named = find.MODEL.fullmatch(wanted or "")
    if named is not None:
        # It may be a model of another name than the configuration's.
        store = replace(store, model=named["name"])
        number, alias = named["version"], named["alias"]
    elif wanted is not None and wanted.isdecimal():
        number = wanted
    elif wanted is not None:
        # runs:/… and files are MLflow's names, and no aliases.
        if not re.fullmatch(r"\w[\w-]*", wanted):
            raise find.unknown(wanted, f"evaluate.model is a number, an alias, {find.NAMED}")
        alias = wanted
    if number is None:
        version = promote.require_champion(replace(store, alias=alias))
    else:
        fix = f"models:/{store.model}@champion is the model in use"
        version = versions.require(store, int(number), fix)
    return Model(fetching.fetch(store, version), version)


def columns_of(source: TableConfig, package: Package, named: TableConfig) -> Columns:
    """The columns that the user names; the others are those of the table that the model was trained
    on.

    named: the job's own table. `evaluate(MODEL, TABLE, label=…)` names the columns there.
    """
    own = package.info.get("config", {}).get("table", {}).get("columns")
    columns = Columns.model_validate(own) if own else source.columns
    is_same = resolve(named.uri) == resolve(source.uri)
    for says in (named.columns, source.columns) if is_same else (source.columns,):
        columns = columns.model_copy(update=says.model_dump(exclude_unset=True))
    return columns


def _of_training_images(
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    package: Package,
) -> str:
    """What is to be said if images of the model's own training may be judged: the metrics are too
    good then. "": nothing."""
    way_out = _way_out(table, version, where, package)
    by_split = ""
    if way_out:
        may = "The model was trained on images of this table, and they may be evaluated too"
        by_split = f"{may}: {way_out}"
    known_M2 = learned.by(package)
    if known_M2 is None:
        return by_split
    # Of a prepared table and its source, an older package lists the rows of one alone. The other
    # has them under another id, and in other bytes.
    is_named = package.info.get("table", {}).get("uri") in version.uris
    if by_split and not is_named and not _is_its_table(version, package):
        return by_split
    # The package lists its images, and those behind the weights that it started from.
    ids, rows_N2 = learned.of_table(table, version, where, package.task.kind)
    is_old_N = learned.is_old(rows_N2, known_M2)
    known = int(is_old_N.sum())
    is_unclear_N = learned.is_unclear(rows_N2, known_M2)
    if known:
        text = f"The model has learned from {known:,} of the {len(ids):,} labelled images here"
        if is_unclear_N.any():
            text += (
                f" ({int(is_unclear_N.sum()):,} more have an id that it has learned from, and "
                "other bytes)"
            )
        text += ", so the metrics are too good"
        return f"{text}: {way_out}" if way_out else text
    # Rows that have neither an id of its own table nor a hash are not told by the list.
    is_told_N = np.full(len(ids), False)
    if _is_its_table(version, package):
        is_told_N |= rows_N2[:, 0] != 0
    if known_M2[:, 1].any():
        is_told_N |= rows_N2[:, 1] != 0
    is_told_N &= ~is_unclear_N
    return "" if is_told_N.all() else by_split


def _is_its_table(version: TableVersion, package: Package) -> bool:
    """By its id: one table has many addresses. A prepared table and its source are one."""
    made = package.info.get("made", {})
    theirs = {made.get("table_id"), made.get("source_table_id")}
    return any(one and one in theirs for one in (version.table_id, version.origin_id))


def _way_out(
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    package: Package,
) -> str:
    """How to leave images of the training out, if the split column says that there may be some; ""
    if the table is another one, or its rows are of other splits."""
    trained_on = package.info.get("table", {})
    prepared_from = trained_on.get("prepared_from", "").rpartition("@v")[0]
    # An older package has the address alone. A prepared table and its source have the same images.
    addresses = {trained_on.get("uri"), prepared_from}
    if not _is_its_table(version, package) and not addresses & {*version.uris}:
        return ""
    column = table.columns.split
    names = {field.name for field in table.at(version).schema().fields}
    if column not in names:
        return f"no column {column!r} says which, evaluate.table.columns.split can name another"
    # Without a condition on the split, all of its values are judged.
    judged = where.get(column)
    values = [judged] if isinstance(judged, str) else judged
    trained = parts(package.info["config"]["feed"]["train"], values or ())
    if values is None or set(values) & set(trained):
        return f"evaluate.table.where={{{column}: test}} leaves them out"
    return ""


def _log(store: Store, key: str, done: Evaluation, page: Path) -> None:
    """An MLflow run of the evaluation; the same evaluation is logged once."""

    def log_into(run_id: str) -> None:
        runs.log_metrics(store, run_id, {f"eval.{k}": v for k, v in done.quality.metrics.items()})
        runs.log_text(store, run_id, page.read_text(encoding="utf-8"), page.name)

    params = {"model": done.model}
    runs.once(store, key, f"evaluate {done.model}", params, done.table, log_into)
