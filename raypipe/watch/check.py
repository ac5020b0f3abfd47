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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from raypipe import report
from raypipe.config import RunConfig, key_of
from raypipe.errors import DataError, Unreachable
from raypipe.files import in_name
from raypipe.registry import fetching, made_by, promote, runs
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.serve import batch
from raypipe.serve.batch import Brought, Calls, PredictConfig
from raypipe.tables.commits import rows_named, rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import ask, by_image, feedback, feedback_rows, projection, promise, severity
from raypipe.watch.detect import DriftConfig, DriftReport
from raypipe.watch.evidence_row import FORMAT, ROW, as_row, now, of_row
from raypipe.watch.examination import Examination, labels_of
from raypipe.watch.feedback_rows import Champion
from raypipe.watch.pictures import picture_of
from raypipe.watch.predicted import read_batch
from raypipe.watch.settings import WatchConfig
from raypipe.watch.window_log import Entry
from raypipe.watch.windows import Waiting, Window, Windows


@dataclass(frozen=True)
class CheckResult:
    """A drift report and what it is about. `predictions` (place, key) of the batch:
    predicted.read_batch finds them.
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
            store,
            run,
            batch_table,
            watch.name,
            predict,
            drift,
            progress=progress,
            window=window,
            watch=watch,
            log=windows.log.entries,
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
    looked_at = predicted.key if window is None else window.key
    key = _key(run, watch, drift, name, predicted, model, window)
    alpha = promise.level(run, watch, looked_at, str(model))
    package = fetching.fetch(store, model)
    options = batch_table.storage_options
    mine = read_batch(predicted.version, predicted.uri, predicted.key, options)
    champion = Champion(package, str(model), model.seal)
    examination = Examination(
        run, watch, drift, name, champion, batch_table, mine, window, log, looked_at
    )

    def made() -> pa.Table:
        row = as_row(
            key,
            name,
            str(model),
            predicted.version,
            examination.report(alpha),
            window,
            promised=watch.horizon is not None,
            about=looked_at,
            seal=model.seal,
        )
        return pa.Table.from_pylist([row], ROW)

    # The tests run only if this evidence is not stored yet. Two checks at once store it once.
    place = watch.place(run, "drift")
    why = f"drift check {name}"
    stored = rows_once(place, ROW, {"key": key}, made, why, watch.storage_options)
    found = of_row(stored.to_pylist()[0])
    # After the evidence: a check that is killed in between comes here when it is made again.
    if found.feedback.labelled:
        feedback_rows.keep(run, watch, looked_at, name, champion, lambda: examination.labels)

    params = {"drift": drift.model_dump(mode="json"), "model": str(model)}
    params |= {"drift.engine": found.engine, "drift.notes": "; ".join(found.notes)}

    def log_metrics(run_id: str) -> None:
        runs.log_metrics(store, run_id, _metrics(found))

    runs.once(store, key, f"drift {name}", params, predicted.version, log_metrics)
    page = _draw(examination, found, key, model)
    to_label = _ask(examination, page, key) if found.is_drift and watch.ask else ""
    predictions = (predicted.uri, predicted.key)
    return CheckResult(
        *(name, str(model), predicted.version, found, str(page), predictions, key, window),
        to_label,
        model.seal,
    )


def _key(
    run: RunConfig,
    watch: WatchConfig,
    drift: DriftConfig,
    name: str,
    predicted: Brought,
    model: ModelVersion,
    window: Window | None,
) -> str:
    """The key of this check's evidence: the same images, model and settings have the same one."""
    about: tuple[str | None, ...] = (predicted.key,)
    # Of a window by its number: a vacuum may leave other files to read the same images from.
    if window is not None and window.rows is not None:
        about = (window.key, str(model), model.seal)
    key = key_of("evidence", FORMAT, *about, drift, run.seed)
    if watch.horizon is not None:
        key = key_of(key, watch.horizon)
    if watch.arrived is not None and "online" in (drift.detectors or ()):
        key = key_of(key, watch.arrived)
    return _named(run, watch, key, name)


def _named(run: RunConfig, watch: WatchConfig, key: str, name: str) -> str:
    """The key of this check: the same images under another watch.name are a check of its own, which
    has its own history and its own promise."""
    place = watch.place(run, "drift")
    rows = rows_named(place, {"key": key}, ["name"], watch.storage_options)
    names = rows["name"].to_pylist() if len(rows) else []
    return key if not names or name in names else key_of(key, name)


def _draw(of: Examination, found: DriftReport, key: str, model: ModelVersion) -> Path:
    """Write the check's page. It is no evidence, and may have been deleted: each call draws it."""
    compared = f"{_looked_at(of.mine.version, of.window)} against the reference of {model}"
    header = report.Header(
        f"Drift check: {of.name}", compared, key, now(), _facts(model, of.mine.version, found)
    )
    table = ImageTable.open(of.source)
    picture = picture_of(found, of.name, of.champion.package, of.mine, table)
    page = report.Page(header, checks=(picture,))
    return report.write(page, of.run.path / "reports" / f"drift-{in_name(of.name)}-{key}.html")


def _ask(of: Examination, page: Path, key: str) -> str:
    """Write down which images are most worth a label, beside the page; returns the CSV.

    "" if all of them have one.
    """
    file = page.with_name(f"to-label-{key}.csv")
    # Somebody may have begun to fill it in, and the last window is checked again and again.
    if ask.is_filled(file):
        return str(file)
    package, mine, seed = of.champion.package, of.mine, of.run.seed
    rng = np.random.default_rng(seed)
    known_ND = projection.subsample(of.reference.features_ND, of.drift.max_rows, rng)
    distance_N = projection.unusual(known_ND, mine.features_ND)
    scores_NC = ask.compared(package.task.kind, mine.scores_NC)
    most = of.watch.ask
    # What is asked for is no random draw: a label that came by itself would never be compared.
    labelled = feedback_rows.labelled(package, of.source, mine)
    asked = ask.worth_a_label(
        scores_NC, distance_N, mine.sha256, most, mine.features_ND, seed, labelled
    )
    if not asked:
        return ""
    labels = labels_of(package, mine.scores_NC) or [""] * len(mine.ids)
    paths: Mapping[int, str | None] = {}
    # It only helps to find the picture.
    with suppress(DataError):
        paths = by_image.paths(of.source, mine, asked)
    images = [(mine.ids[row], mine.sha256[row]) for row in asked]
    different = len(set(mine.sha256) - labelled)
    # Before the list: once it is begun, nobody comes here again.
    feedback_rows.keep_asked(of.run, of.watch, key, of.name, images, different)
    ask.write(file, asked, mine.ids, mine.sha256, labels, scores_NC, distance_N, paths)
    return str(file)


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
