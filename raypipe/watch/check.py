"""One drift check: predict a batch with a champion, and compare it with the champion's reference.

It keeps the evidence and draws the report.

The evidence is one row of a Delta table and one MLflow run, named by (model, batch version,
settings): the same check twice is one row. A check needs no labels; those that came are compared
(feedback.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe import report
from raypipe.config import RunConfig, key_of
from raypipe.errors import DataError, Unreachable
from raypipe.files import in_name
from raypipe.images.measure import SEEN
from raypipe.models.tasks import NUMERIC
from raypipe.registry import made_by, promote, runs
from raypipe.registry.package import Package, Reference
from raypipe.registry.promote import ModelVersion
from raypipe.registry.store import Store
from raypipe.serve import batch
from raypipe.serve.batch import Brought, Calls, PredictConfig
from raypipe.tables import between
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import (
    ask,
    by_domain,
    by_image,
    feedback,
    feedback_rows,
    projection,
    promise,
    records,
    severity,
    spans,
)
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.evidence_row import FORMAT, ROW, as_row, now, of_row
from raypipe.watch.feedback_rows import Came, Champion
from raypipe.watch.pictures import Batch, picture_of
from raypipe.watch.power import Known
from raypipe.watch.settings import WatchConfig
from raypipe.watch.sides import Seen
from raypipe.watch.window_log import Entry
from raypipe.watch.windows import Waiting, Window, Windows


@dataclass(frozen=True)
class CheckResult:
    """A drift report and what it is about. `predictions` (place, key) of the batch: read_batch
    finds them.
    """

    name: str
    model: str
    table: TableVersion
    report: DriftReport
    page: str
    predictions: tuple[str, str]
    key: str = ""
    window: Window | None = None
    to_label: str = ""  # a CSV of images that are most worth a label, after drift
    seal: str | None = None  # of the model's package


def check_window(
    store: Store,
    run: RunConfig,
    batch_table: TableConfig,
    watch: WatchConfig,
    predict: PredictConfig,
    drift: DriftConfig,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult | Waiting:
    """Check the images that came since the last check; see `check`.

    Waiting: there are too few. Needs a connection to Ray. A kill anywhere loses no image and checks
    none twice: the next call goes on with the same window.
    """
    windows = Windows(batch_table, watch, run, say)
    window = windows.next()
    if window.missed:
        say(f"Missed: {window.missed}; their images are in this window")
    if isinstance(window, Waiting):
        return window
    if window.again:
        say(f"Nothing came since {window}: it is looked at again")
    try:
        done = check(
            *(store, run, batch_table, watch.name, predict, drift, None, progress, window, watch),
            windows.log.entries,
        )
    except Unreachable:
        raise
    except DataError:
        # The next check has these images and more: one that fails must not stop all that follow.
        windows.leave(window)
        raise
    windows.checked(window, done.key, done.predictions)
    without = window.images - done.report.batch_images
    if window.number and without:
        say(f"{without} of {window.images} images have no prediction (broken): they are left out")
    return done


def check(
    store: Store,
    run: RunConfig,
    batch_table: TableConfig,
    name: str,
    predict: PredictConfig,
    drift: DriftConfig,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    window: Window | None = None,
    watch: WatchConfig | None = None,
    log: Sequence[Entry] = (),
) -> CheckResult:
    """Compare the pinned batch with the reference of `model` (default: the champion).

    progress: called with (done, total) images while the batch is predicted. window: the images that
    are looked at; None: all of the batch. watch: says where the evidence is kept. log: events of
    earlier windows, which watch.horizon looks back at. Raises DataError as tables do.
    """
    model = model or promote.require_champion(store)
    watch = watch or WatchConfig()
    predicted = _predict(store, run, batch_table, predict, model, window, Calls(progress))
    about: tuple[str | None, ...] = (predicted.key,)
    # Of a window by its number: a vacuum may leave other files to read the same images from.
    if window is not None and window.rows is not None:
        about = (window.key, str(model), model.seal)
    key = key_of("evidence", FORMAT, *about, drift, run.seed)
    looked_at = predicted.key if window is None else window.key
    alpha = promise.level(run, watch, looked_at, str(model))
    if watch.horizon is not None:
        key = key_of(key, watch.horizon)
    if watch.arrived is not None and "online" in (drift.detectors or ()):
        key = key_of(key, watch.arrived)
    key = _named(run, watch, key, name)
    package = promote.fetch(store, model)
    options = batch_table.storage_options
    mine = read_batch(predicted.version, predicted.uri, predicted.key, options)
    reference = package.reference()

    champion = Champion(package, str(model), model.seal)

    @cache
    def checks() -> Sequence[Mapping[str, Any]]:
        return records.checks(run, watch).rows

    @cache
    def gathered() -> Came | None:
        number = window.number if window is not None else 0
        rows = checks() if number and log else []
        before = feedback_rows.before(log, rows, champion, number, watch.feedback)
        return feedback_rows.gather(run, watch, name, champion, batch_table, mine, before)

    def made() -> pa.Table:
        def with_groups(one: Batch) -> Batch:
            return replace(one, groups=by_image.groups(package, reference, batch_table, one))

        def earlier(entry: Entry) -> Batch:
            """An earlier window, with the groups that its images had: they may have left the table,
            or it may have given their ids to others. Raises DataError where nobody knows them."""
            one = read_batch(mine.version, entry.predictions, entry.prediction, options)
            if grouped.groups is None:
                return one
            table = ImageTable.open(batch_table)
            then = table.pin(entry.version)
            one = with_groups(replace(one, version=then))
            # A table that was restored from a backup has the number again, with other rows.
            same = between.state(table, then, batch_table.where) == entry.state
            if one.groups is None or not same:
                raise DataError(f"{then} does not say the groups of the images of {entry.window}")
            return one

        grouped = with_groups(mine)
        ours = known(package, reference).seen

        def tested(one: Batch) -> Callable[[DriftConfig], DriftReport]:
            theirs = Seen(
                _labels(package, one.scores_NC),
                one.looks_NK,
                groups=one.groups,
                arrived_N=by_image.arrived(watch.arrived, batch_table, one),
            )
            embeddings = (reference.features_ND, one.features_ND)
            scores = (reference.scores_NC, one.scores_NC)
            return lambda cfg: detect(*embeddings, *scores, cfg, run.seed, ours, theirs)

        of_spans = {}
        wanted = watch.horizon.spans if watch.horizon is not None else ()
        if wanted and window is not None and window.number:
            by = (str(model), model.seal)
            before = spans.earlier(log, checks(), *by, window.number, max(wanted) - 1)
            of_spans = spans.together(grouped, before, earlier, wanted, drift.max_rows)
        each = {count: tested(one) for count, one in of_spans.items()}
        came = gathered()
        says = came.says if came else feedback.NOTHING
        found = promise.over_spans(drift, alpha, tested(grouped), each, says.found)
        # Of a package that was tampered with nothing is said: it raises.
        cost = severity.severity(package.severity(), mine.scores_NC, mine.features_ND, run.seed)
        left_out = _not_compared(package, reference, grouped, watch)
        notes = (*found.notes, *left_out, *says.notes)
        found = replace(found, severity=cost, feedback=says, notes=notes)
        is_promised = watch.horizon is not None
        row = as_row(
            *(key, name, str(model), predicted.version, found, window, is_promised, looked_at),
            model.seal,
        )
        return pa.Table.from_pylist([row], ROW)

    # The tests run only if this evidence is not stored yet. Two checks at once store it once.
    place = watch.place(run, "drift")
    why = f"drift check {name}"
    stored = rows_once(place, ROW, {"key": key}, made, why, watch.storage_options)
    found = of_row(stored.to_pylist()[0])
    # After the evidence: a check that is killed in between comes here when it is made again.
    if found.feedback.labelled:
        feedback_rows.keep(run, watch, looked_at, name, champion, gathered)

    def log_metrics(run_id: str) -> None:
        runs.log_metrics(store, run_id, _metrics(found))

    params = {"drift": drift.model_dump(mode="json"), "model": str(model)}
    params |= {"drift.engine": found.engine, "drift.notes": "; ".join(found.notes)}
    runs.once(store, key, f"drift {name}", params, predicted.version, log_metrics)

    # The page is drawn again each time: it is not evidence, and may have been deleted.
    compared = f"{_looked_at(predicted.version, window)} against the reference of {model}"
    header = report.Header(
        f"Drift check: {name}", compared, key, now(), _facts(model, predicted.version, found)
    )
    picture = picture_of(found, name, package, mine, ImageTable.open(batch_table))
    page = report.Page(header, checks=(picture,))
    path = report.write(page, run.path / "reports" / f"drift-{in_name(name)}-{key}.html")
    to_label = ""
    if found.is_drift and watch.ask:
        to_label = str(path.with_name(f"to-label-{key}.csv"))
        file, most = Path(to_label), watch.ask
        asked = _ask(file, package, reference, mine, most, drift.max_rows, run.seed, batch_table)
        feedback_rows.keep_asked(run, watch, key, name, asked, len(mine.ids))
    predictions = (predicted.uri, predicted.key)
    return CheckResult(
        *(name, str(model), predicted.version, found, str(path), predictions, key, window),
        to_label,
        model.seal,
    )


def _named(run: RunConfig, watch: WatchConfig, key: str, name: str) -> str:
    """The key of this check: the same images under another watch.name are a check of its own, which
    has its own history and its own promise."""
    place = watch.place(run, "drift")
    rows = rows_named(place, {"key": key}, ["name"], watch.storage_options)
    names = rows["name"].to_pylist() if len(rows) else []
    return key if not names or name in names else key_of(key, name)


def _ask(
    file: Path,
    package: Package,
    reference: Reference,
    mine: Batch,
    most: int,
    max_rows: int,
    seed: int,
    batch_table: TableConfig,
) -> list[tuple[str | None, str]]:
    """Write down which images are most worth a label; (id, sha256) of each."""
    rng = np.random.default_rng(seed)
    known_ND = projection.subsample(reference.features_ND, max_rows, rng)
    distance_N = projection.unusual(known_ND, mine.features_ND)
    # The scores of a numeric task are no classes.
    classes = _labels(package, mine.scores_NC)
    scores_NC = mine.scores_NC[:, :1] if classes is None else mine.scores_NC
    asked = ask.worth_a_label(scores_NC, distance_N, mine.sha256, most, mine.features_ND, seed)
    labels = classes or [""] * len(mine.ids)
    paths: Mapping[int, str | None] = {}
    # It only helps to find the picture.
    with suppress(DataError):
        paths = by_image.paths(batch_table, mine, asked)
    ask.write(file, asked, mine.ids, mine.sha256, labels, scores_NC, distance_N, paths)
    return [(mine.ids[row], mine.sha256[row]) for row in asked]


def known(package: Package, reference: Reference) -> Known:
    """The reference of a champion's package, as detectors see it."""
    seen = Seen(
        _labels(package, reference.scores_NC),
        reference.looks_NK,
        by_domain.names(reference.domains, reference.features_ND),
        reference.groups,
    )
    return Known(reference.features_ND, reference.scores_NC, seen)


def _predict(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    model: ModelVersion,
    window: Window | None,
    calls: Calls,
) -> Brought:
    if window is None:
        return batch.bring(store, run, source, cfg, calls, model)
    # The version that the window was opened with; there may be newer ones.
    pinned = source.model_copy(update={"version": window.version.version})
    if window.rows is None:
        return batch.bring(store, run, pinned, cfg, calls, model)
    return batch.bring_rows(store, run, pinned, cfg, model, window.rows, window.key, calls)


def _looked_at(version: TableVersion, window: Window | None) -> str:
    if window is None or not window.number:
        return str(version)
    return f"{version}, {window},"


def _facts(
    model: ModelVersion, version: TableVersion, found: DriftReport
) -> tuple[tuple[str, str], ...]:
    prepared = (("Prepared from", version.origin),) if version.origin else ()
    return (
        *prepared,
        ("Model", str(model)),
        ("Trained on", model.tags.get("raypipe.table", "?")),
        ("Code", made_by.commit() or "no checkout"),
        *((("Labels that came", str(found.feedback)),) if str(found.feedback) else ()),
        *(("Drift tests", note) for note in found.notes),
    )


def _labels(package: Package, scores_NC: np.ndarray) -> list[str] | None:
    """The predicted classes; None of a model that predicts numbers."""
    return None if package.task.kind in NUMERIC else package.task.predictions(scores_NC)


def _not_compared(
    package: Package, reference: Reference, mine: Batch, watch: WatchConfig
) -> list[str]:
    """What of the batch or of its reference the tests could not take, for people."""
    notes = []
    kept = package.info.get("config", {}).get("registry", {})
    for name in ("domain", "group"):
        asked = getattr(watch, name)
        # A champion keeps what was named when it was registered.
        if asked and not kept.get(name):
            notes.append(
                f"watch.{name}={asked} has no effect: the champion was registered without it. The "
                "command that trained it, with this setting, registers a version that has it"
            )
    if mine.broken:
        of = mine.broken + len(mine.ids)
        notes.append(f"{mine.broken} of {of} images have no prediction (broken): they are left out")
    if reference.groups is not None and mine.groups is None:
        column = package.info["config"].get("registry", {}).get("group")
        notes.append(
            f"the reference has groups by {column!r}, and the batch's table has no such column: "
            "its images are taken for independent, so neighbours of one group may look like drift"
        )
    return notes


def read_batch(
    version: TableVersion, uri: str, key: str, storage_options: dict[str, str] | None = None
) -> Batch:
    """The rows of one prediction; batch.predict returns its key.

    They are in the order of ids and hashes, which is the same whenever they are read. Images that
    do not decode have no features, and are left out.
    """
    columns = ["image_id", "sha256", "embedding", "scores", "error", *SEEN]
    rows = batch.read_rows(uri, key, columns, storage_options)
    predicted = len(rows)
    rows = rows.filter(pc.is_null(rows["error"])) if len(rows) else rows
    if not len(rows):
        raise DataError(
            f"No image of {version} decodes, so there is nothing to compare",
            fix="raypipe clean finds such images and tags a version without them",
        )
    rows = rows.sort_by([("image_id", "ascending"), ("sha256", "ascending")])
    features, scores = (np.stack(rows[name].to_numpy()) for name in ("embedding", "scores"))
    # A look that is not known is null there, and NaN here.
    looks_NK = np.stack([rows[name].cast(pa.float32()).to_numpy() for name in SEEN], axis=1)
    ids, hashes = rows["image_id"].to_pylist(), rows["sha256"].to_pylist()
    return Batch(version, ids, hashes, features, scores, looks_NK, predicted - len(rows))


def _metrics(found: DriftReport) -> dict[str, float]:
    each = {
        f"drift.{e.detector}.{e.on}.{what}": getattr(e, what)
        for e in found.evidence
        for what in ("p_value", "statistic")
    }
    cost = {
        f"drift.{name}": value
        for name, value in severity.as_row(found.severity).items()
        if isinstance(value, float)
    }
    labels = {
        f"drift.{name}": float(value)
        for name, value in feedback.as_row(found.feedback).items()
        if found.feedback.labelled and isinstance(value, int | float) and math.isfinite(value)
    }
    known = {"drift.p_value": found.p_value, "drift.is_drift": float(found.is_drift)}
    return each | cost | labels | known
