"""Batch prediction: a pinned table version -> rows of a predictions Delta table, by Ray tasks.

Each row holds the image (id and sha256 of its bytes), label, scores, embedding, how the image
looks, model version and table version (predicted_rows.py). It also holds the `key` of its
prediction: model, hash of the package, table version, and which rows and columns were asked for.

The rows are cut into pieces (pieces.py), which are predicted by all workers of the cluster
(workers.py) and committed some at a time, each once. After a kill the same command goes on with the
pieces that are missing; of two commands at once, each piece is kept of the first that commits it.
Each row says how many rows the whole prediction has, so nobody reads a half one (links.py).

With `predict.since: last` a prediction adds to the last one of an earlier version (since.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field, field_validator

from raypipe.config import RunConfig, Section, key_of
from raypipe.errors import DataError, Unreachable
from raypipe.registry import fetching, promote
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.serve import pieces, since, workers
from raypipe.serve.commits import Calls, Commits, Stopped
from raypipe.serve.links import batches, finished, links, read_rows
from raypipe.serve.predicted_rows import CONSTANT, FORMAT, OLDEST, SCHEMA, gone
from raypipe.serve.shared_package import SharedPackage, share
from raypipe.serve.since import Plan, Target
from raypipe.serve.summary import Summary
from raypipe.serve.workers import Reading
from raypipe.tables import between, retries
from raypipe.tables.address import resolve
from raypipe.tables.between import Rows
from raypipe.tables.commits import TRIES
from raypipe.tables.parts import PartTable
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

__all__ = ["Calls", "PredictConfig", "PredictResult", "Stopped", "batches", "predict", "read_rows"]

log = logging.getLogger("raypipe")


class PredictConfig(Section):
    """What to predict, and where predictions go."""

    table: TableConfig | None = None
    """The table to predict. null: watch.batch, else the job's own table."""

    out: str | None = None
    """The address of the predictions table. null: `predictions` in the run's folder."""

    since: Literal["last"] | None = None
    """`last`: predict only rows that were added or changed since the last version that this model
    has predicted. null: all rows, unless the version has been predicted."""

    batch_size: int = Field(default=64, ge=1)
    """Images that one worker predicts at a time. It limits the memory of a worker."""

    gpus: float = Field(default=0, ge=0)
    """GPUs of each worker: 0.5 for two workers on one GPU; above 1 a whole number. 0: predict on
    all CPUs of the cluster."""

    follow: Literal["once", "always"] | None = None
    """`always`: continue with the table's new versions until SIGTERM, with since=last. `once`: end
    when all present versions are predicted; for a scheduler. null: predict one version."""

    latency_s: float = Field(default=10, gt=0)
    """With follow: seconds from a commit to the table until its predictions are committed, if the
    workers are fast enough."""

    @field_validator("gpus")
    @classmethod
    def _whole_above_one(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError("a worker has a part of one GPU, or whole ones. Take 1 or 2")
        return gpus


@dataclass(frozen=True)
class PredictResult:
    """Where the rows are, and a summary of their labels.

    labels: the number of images by label; for numeric tasks, the least, the mean and the most.
    key: names the prediction; `read_rows` selects its rows by it. broken: images without a
    prediction, because they do not decode; they are among `images`. made: how many this call
    predicted, and device_s the seconds that its workers took. since: the version that they were
    added to.
    """

    out: TableVersion
    model: str
    table: TableVersion
    images: int
    labels: dict[str, int] | dict[str, float]
    key: str
    broken: int = 0
    made: int = field(default=0, compare=False)
    device_s: float = field(default=0.0, compare=False)
    since: int | None = field(default=None, compare=False)


class NothingToPredict(DataError):
    """The version has no row that is asked for."""


def predict(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    calls: Calls | None = None,
) -> PredictResult:
    """Predict every row of the pinned version that `source` selects (where, sample).

    model: default is the champion. progress: called with (images done, all images); `calls` has it
    and more. Raises DataError as tables do, and where there is no row to predict.
    """
    done = bring(store, run, source, cfg, calls or Calls(progress), model)
    summary = Summary(done.model.tags.get("raypipe.task", "single_label"))
    columns = ["label", "error"]
    number = done.out.version
    for rows in batches(done.uri, done.key, columns, source.storage_options, number):
        summary.add(rows)
    return PredictResult(
        out=done.out,
        model=str(done.model),
        table=done.version,
        images=summary.images,
        labels=summary.labels,
        key=done.key,
        broken=summary.broken,
        made=done.made.images,
        device_s=done.made.device_s,
        since=done.since,
    )


@dataclass(frozen=True)
class Made:
    """What one call has predicted: images, and the seconds that workers took for them."""

    images: int = 0
    device_s: float = 0.0

    def __add__(self, other: Made) -> Made:
        return Made(self.images + other.images, self.device_s + other.device_s)


@dataclass(frozen=True)
class Brought:
    """A finished prediction, not read. out: the version that has it whole. since: as in
    PredictResult.
    """

    uri: str
    out: TableVersion
    model: ModelVersion
    version: TableVersion
    key: str
    made: Made
    since: int | None


def bring(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    calls: Calls,
    model: ModelVersion | None = None,
) -> Brought:
    """See to it that the version has a prediction; see `predict`. Raises Stopped, too.

    With since=last, what was begun of earlier versions is finished first.
    """
    table, version = ImageTable.open_pinned(source)
    model = model or promote.require_champion(store)
    out = open_out(run, source, cfg, f"predict {version} with {model}")
    target = target_of(source, table, version, model)
    work = _Work(table, version, source, cfg, model, out, target)
    is_last = cfg.since == "last"
    made = Made()
    left: set[int] = set()  # versions that cannot be finished
    for _ in range(TRIES):
        known = links(out.counts())
        # A finished prediction is read, and nothing is planned.
        key = since.made(known, target)
        if key is not None:
            return work.brought(key, made, None)

        claim = since.Claim.of(out, target.line) if is_last else None
        begun = set(since.unfinished(known, target, claim)) - left if is_last else set()
        if begun and min(begun) < version.version:
            # The package first: a corrupt one is no reason to leave a version unfinished.
            _shared(store, model)
            earlier = source.model_copy(update={"version": min(begun)})
            try:
                made += bring(store, run, earlier, cfg, calls, model).made
            except Unreachable:
                raise
            except DataError as e:
                left.add(min(begun))
                calls.say(
                    f"What was begun of v{min(begun)} stays unfinished ({e.what}): its rows belong "
                    "to no finished prediction, and are predicted again"
                )
            out.refresh()
            continue
        is_behind = source.version is None and begun and max(begun) > version.version
        # A number that the table does not have is left from before a restore from a backup.
        if is_behind and table.newest().version > version.version:
            # Somebody saw a newer version first, and predicts these rows with it.
            return bring(store, run, source, cfg, calls, model)

        base = since.base_of(known, target, claim, is_last)
        planned = since.plan(table, version, source.where, out, base, target, calls.say)
        mine = since.Claim(version.version, base.version if base else None)
        if planned.size and is_last and claim != mine:
            # What could refuse the work comes before the first commit.
            _require_workers(store, work)
            if not mine.make(out, target.line):
                continue
        if is_last:
            since.note_nothing(planned, target, out)
        key, more = _make(store, work, planned, calls)
        return work.brought(key, made + more, mine.base)
    raise retries.busy(out.uri, f"{TRIES} tries")


def bring_rows(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    model: ModelVersion,
    rows: Rows,
    named: str,
    calls: Calls,
) -> Brought:
    """Predict some rows of a pinned version, once. Raises as `predict` does, and Stopped.

    named: by what is in `rows`. Other predictions of the table neither add to these nor have them.
    """
    table, version = ImageTable.open_pinned(source)
    out = open_out(run, source, cfg, f"predict {sum(rows.counts)} rows of {version} with {model}")
    target = target_of(source, table, version, model)
    # The rows of a window do not change, but a vacuum may leave other files to read them from:
    # their pieces would be other pieces.
    files = [[one.file, one.row_group, one.deleted.hex()] for one in rows.fragments]
    key = key_of("rows", target.key, named, files)
    work = _Work(table, version, source, cfg, model, out, replace(target, line=key, key=key))
    if key in finished(links(out.counts())):
        return work.brought(key, Made(), None)
    key, made = _make(store, work, Plan(key, None, rows, gone([], []), costly=False), calls)
    return work.brought(key, made, None)


def open_out(run: RunConfig, source: TableConfig, cfg: PredictConfig, why: str) -> PartTable:
    """The predictions table. Raises DataError for a table of something else."""
    return PartTable(place(run, cfg), SCHEMA, CONSTANT, why, source.storage_options, OLDEST)


def place(run: RunConfig, cfg: PredictConfig) -> str:
    """The address of the predictions table."""
    return resolve(cfg.out or str(run.path / "predictions"))


def target_of(
    source: TableConfig, table: ImageTable, version: TableVersion, model: ModelVersion
) -> Target:
    """Names a prediction by everything that determines it. Raises DataError as tables do."""
    state = between.state(table, version, source.where)
    chosen = (source.where, source.sample_key, source.columns)
    by = (str(model), model.seal)
    return Target(
        # All but the version: what predictions have in common that can add to each other.
        line=key_of("line", FORMAT, *by, version.uri, version.table_id, *chosen),
        version=version.version,
        state=state,
        key=key_of("prediction", FORMAT, *by, version.identity, state, *chosen),
    )


@dataclass(frozen=True)
class _Work:
    """One prediction: what is predicted with what, and where its rows go."""

    table: ImageTable
    version: TableVersion
    source: TableConfig
    cfg: PredictConfig
    model: ModelVersion
    out: PartTable
    target: Target

    def brought(self, key: str, made: Made, since: int | None) -> Brought:
        """The finished prediction, which the version of `out` has that was read or written last."""
        assert self.out.version is not None, "a prediction is somewhere"
        return Brought(self.out.uri, self.out.version, self.model, self.version, key, made, since)


def _require_workers(store: Store, work: _Work) -> None:
    """Raise what a corrupt package or a want of GPUs raises."""
    workers.require_gpus(work.cfg.gpus)
    _shared(store, work.model)


def _make(store: Store, work: _Work, planned: Plan, calls: Calls) -> tuple[str, Made]:
    """Predict and commit what is missing; returns the key of the whole, and what was predicted.

    Raises DataError where there is no row, Stopped when the caller asks to stop.
    """
    total = planned.size
    if not total and planned.base:
        return planned.base.key, Made()  # nothing has changed
    if not total:
        raise NothingToPredict(
            f"{work.version} has no images to predict",
            got=work.source.where or None,
            fix="Check the table's version, where and sample",
        )
    cut = pieces.cut(planned.rows)
    same = {
        "model": str(work.model),
        "table": str(work.version),
        "key": planned.key,
        "format": FORMAT,
        "line": work.target.line,
        "version": work.target.version,
        "state": work.target.state,
        "base": planned.base.key if planned.base else None,
        "rows": total,
    }
    commits = Commits(work.out, same, planned.images, calls)
    missing = [piece for piece in cut if piece.number not in commits.there]
    if missing:
        shared = _shared(store, work.model)
        commits.same["classes"] = list(shared.classes)
        options = work.table.storage_options
        reading = Reading.of(planned.rows, work.table.columns, work.cfg.batch_size, options)
        commits.begin(planned.images - sum(piece.rows for piece in missing))
        done = workers.stream(missing, reading, shared, work.cfg.gpus, commits.is_there)
        commits.add_all(done)
    if calls.stop() and not commits.has(cut):
        raise Stopped
    commits.add_gone(planned.gone, len(cut))
    commits.require_all()
    calls.progress(planned.images, planned.images)
    return planned.key, Made(commits.made, commits.device_s)


_last_shared: list[SharedPackage] = []


def _shared(store: Store, model: ModelVersion) -> SharedPackage:
    """The model for the workers. The last one is kept: a stream asks for it again and again."""
    if _last_shared and _last_shared[0].is_of(model.seal):
        return _last_shared[0]
    _last_shared[:] = [share(fetching.fetch(store, model))]
    return _last_shared[0]
