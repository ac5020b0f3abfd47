"""One drift check: predict a batch with a champion, and compare it with the champion's reference.

It keeps the evidence and draws the report.

The evidence is one row of a Delta table and one MLflow run, named by (model, batch version,
settings): the same check twice is one row. A check needs no labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe import report
from raypipe.config import RunConfig, key_of, to_json
from raypipe.errors import DataError, Unreachable
from raypipe.files import in_name
from raypipe.images.measure import SEEN
from raypipe.models.tasks import NUMERIC
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package, Reference
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.serve import batch
from raypipe.serve.batch import Brought, Calls, PredictConfig
from raypipe.tables import between, scan
from raypipe.tables.commits import rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import ask, by_domain, projection, promise, records, severity, spans
from raypipe.watch.detect import DriftConfig, DriftReport, Evidence, Seen, detect
from raypipe.watch.domains import Part
from raypipe.watch.pictures import Batch, picture_of
from raypipe.watch.power import Known
from raypipe.watch.settings import WatchConfig
from raypipe.watch.windows import Entry, Waiting, Window, Windows

# Of a row of evidence; a key of format 1 named fewer things, so its rows are not looked at and the
# check is made again.
FORMAT = 2
_ROW = pa.schema(
    [
        (n, pa.string())
        for n in (
            "key",
            "name",
            "model",
            "table",
            "checked_at",
            "evidence",
            "unusual",
            "engine",
            "notes",
            "parts",
        )
    ]
    + [
        ("is_drift", pa.bool_()),
        ("p_value", pa.float64()),
        ("alpha", pa.float64()),
        ("reference_images", pa.int64()),
        ("batch_images", pa.int64()),
        ("format", pa.int32()),
        # Its number; null for a batch that was named by its version.
        ("window", pa.int64()),
        # What was looked at: the key of the window, or of the prediction. The number of a window is
        # no name: the windows of another table, or of one made again, have the same numbers.
        ("about", pa.string()),
        # Of the champion's package. Its name and number are no name: a registry may be made again.
        ("seal", pa.string()),
        # Was alpha a share of watch.horizon?
        ("promised", pa.bool_()),
        ("since", pa.int64()),
        # 0 to 1; null without an estimate, and in rows of an older raypipe. accuracy_known: on
        # validation images of the mixture of domains that the batch resembles.
        ("accuracy", pa.float64()),
        ("accuracy_low", pa.float64()),
        ("accuracy_high", pa.float64()),
        ("accuracy_known", pa.float64()),
        ("no_estimate", pa.string()),
    ]
)


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
    package = promote.fetch(store, model)
    options = batch_table.storage_options
    mine = read_batch(predicted.version, predicted.uri, predicted.key, options)
    reference = package.reference()

    def made() -> pa.Table:
        def with_groups(one: Batch) -> Batch:
            return replace(one, groups=_groups(package, reference, batch_table, one))

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
                arrived_N=_arrived(watch.arrived, batch_table, one),
            )
            embeddings = (reference.features_ND, one.features_ND)
            scores = (reference.scores_NC, one.scores_NC)
            return lambda cfg: detect(*embeddings, *scores, cfg, run.seed, ours, theirs)

        of_spans = {}
        wanted = watch.horizon.spans if watch.horizon is not None else ()
        if wanted and window is not None and window.number:
            rows = records.checks(run, watch).rows
            by = (str(model), model.seal)
            before = spans.earlier(log, rows, *by, window.number, max(wanted) - 1)
            of_spans = spans.together(grouped, before, earlier, wanted, drift.max_rows)
        each = {count: tested(one) for count, one in of_spans.items()}
        found = promise.over_spans(drift, alpha, tested(grouped), each)
        # Of a package that was tampered with nothing is said: it raises.
        cost = severity.severity(package.severity(), mine.scores_NC, mine.features_ND, run.seed)
        left_out = _not_compared(package, reference, grouped)
        found = replace(found, severity=cost, notes=(*found.notes, *left_out))
        is_promised = watch.horizon is not None
        row = _as_row(
            *(key, name, str(model), predicted.version, found, window, is_promised, looked_at),
            model.seal,
        )
        return pa.Table.from_pylist([row], _ROW)

    # The tests run only if this evidence is not stored yet. Two checks at once store it once.
    place = watch.place(run, "drift")
    why = f"drift check {name}"
    stored = rows_once(place, _ROW, {"key": key}, made, why, watch.storage_options)
    found = _report(stored.to_pylist()[0])

    def log_metrics(run_id: str) -> None:
        tracking.log_metrics(store, run_id, _metrics(found))

    params = {"drift": drift.model_dump(mode="json"), "model": str(model)}
    params |= {"drift.engine": found.engine, "drift.notes": "; ".join(found.notes)}
    tracking.once(store, key, f"drift {name}", params, predicted.version, log_metrics)

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
        _ask(Path(to_label), package, reference, mine, watch.ask, drift.max_rows, run.seed)
    predictions = (predicted.uri, predicted.key)
    return CheckResult(
        name, str(model), predicted.version, found, str(path), predictions, key, window, to_label
    )


def _ask(
    file: Path,
    package: Package,
    reference: Reference,
    mine: Batch,
    most: int,
    max_rows: int,
    seed: int,
) -> None:
    """Write down which images are most worth a label."""
    rng = np.random.default_rng(seed)
    known_ND = projection.subsample(reference.features_ND, max_rows, rng)
    distance_N = projection.unusual(known_ND, mine.features_ND)
    # The scores of a numeric task are no classes.
    classes = _labels(package, mine.scores_NC)
    scores_NC = mine.scores_NC[:, :1] if classes is None else mine.scores_NC
    asked = ask.worth_a_label(scores_NC, distance_N, mine.sha256, most, mine.features_ND, seed)
    labels = classes or [""] * len(mine.ids)
    ask.write(file, asked, mine.ids, mine.sha256, labels, scores_NC, distance_N)


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


def now() -> datetime:
    return datetime.now(timezone.utc)


def _facts(
    model: ModelVersion, version: TableVersion, found: DriftReport
) -> tuple[tuple[str, str], ...]:
    prepared = (("Prepared from", version.origin),) if version.origin else ()
    return (
        *prepared,
        ("Model", str(model)),
        ("Trained on", model.tags.get("raypipe.table", "?")),
        ("Code", tracking.code_commit() or "no checkout"),
        *(("Drift tests", note) for note in found.notes),
    )


def _labels(package: Package, scores_NC: np.ndarray) -> list[str] | None:
    """The predicted classes; None of a model that predicts numbers."""
    return None if package.task.kind in NUMERIC else package.task.predictions(scores_NC)


def _groups(
    package: Package, reference: Reference, source: TableConfig, mine: Batch
) -> list[str] | None:
    """The group of each image of the batch, blank where it has none. None: its table names none."""
    column = package.info["config"].get("registry", {}).get("group")
    values = None if reference.groups is None else _column(column, source, mine)
    if values is None:
        return None
    ids, groups = (one.to_pylist() for one in values)
    found = _of_images(source, mine, ids, groups)
    return ["" if group is None else str(group) for group in found]


def _arrived(column: str | None, source: TableConfig, mine: Batch) -> list[float] | None:
    """The place of each image in the order of this column, NaN where it has none; equal values
    share a place. None: its table has no such column."""
    values = _column(column, source, mine)
    if values is None:
        return None
    ids, came = values
    # Ranks, as times may be numbers that no float tells apart.
    try:
        places = pc.rank(came, tiebreaker="dense", null_placement="at_end").to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError(
            f"The column {column!r} of {mine.version} has no order",
            got=str(came.type),
            rule="It holds times or numbers",
            fix="Name another column in watch.arrived",
        ) from None
    known = pc.invert(pc.is_null(came, nan_is_null=True)).to_pylist()
    places = [p if is_known else None for p, is_known in zip(places, known, strict=True)]
    found = _of_images(source, mine, ids.to_pylist(), places)
    return [np.nan if place is None else float(place) for place in found]


def _of_images(
    source: TableConfig, mine: Batch, ids: list[str | None], values: list[Any]
) -> list[Any]:
    """The value of each image of the batch, None where its table has none.

    ids, values: of all rows of the table. Images of one id may have several values, those without
    an id above all: then only their bytes say which one is meant, and are read.
    """
    by_id: dict[str | None, Any] = {}
    unclear = set()
    for image_id, value in zip(ids, values, strict=True):
        if by_id.setdefault(image_id, value) != value:
            unclear.add(image_id)
    by_image: dict[tuple[str | None, str], Any] = {}
    if not unclear.isdisjoint(mine.ids):
        table = ImageTable.open(source)
        names = [table.columns.id, table.columns.image]
        row = iter(values)
        for part in scan.each(table, mine.version, names):
            for image_id, image in zip(*(part[name].to_pylist() for name in names), strict=True):
                value = next(row)
                if image_id in unclear and image is not None:
                    by_image[image_id, hashlib.sha256(image).hexdigest()] = value
    return [
        by_image.get((image_id, digest)) if image_id in unclear else by_id.get(image_id)
        for image_id, digest in zip(mine.ids, mine.sha256, strict=True)
    ]


def _not_compared(package: Package, reference: Reference, mine: Batch) -> list[str]:
    """What of the batch or of its reference the tests could not take, for people."""
    notes = []
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


def _column(
    column: str | None, source: TableConfig, mine: Batch
) -> tuple[pa.ChunkedArray, pa.ChunkedArray] | None:
    """(ids, values) of a column of the batch's table; None if it has no such column."""
    table = ImageTable.open(source)
    if column not in table.at(mine.version).schema().to_arrow().names:
        return None
    read = scan.rows(table, mine.version, [table.columns.id, column])
    return read[table.columns.id], read[column]


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
    known = {"drift.p_value": found.p_value, "drift.is_drift": float(found.is_drift)}
    return each | cost | known


def _as_row(
    key: str,
    name: str,
    model: str,
    version: TableVersion,
    found: DriftReport,
    window: Window | None = None,
    promised: bool = False,
    about: str = "",
    seal: str | None = None,
) -> dict[str, Any]:
    whole = asdict(found)
    del whole["severity"]
    as_text = {name: to_json(whole.pop(name)) for name in ("evidence", "unusual", "notes", "parts")}
    return {
        **whole,
        **as_text,
        **severity.as_row(found.severity),
        "key": key,
        "name": name,
        "model": model,
        "table": str(version),
        "checked_at": now().isoformat(),
        "format": FORMAT,
        "window": window.number if window is not None and window.number else None,
        "since": window.since if window is not None else None,
        "promised": promised,
        "about": about,
        "seal": seal,
    }


def _report(row: dict[str, Any]) -> DriftReport:
    evidence = tuple(Evidence(**e) for e in json.loads(row["evidence"]))
    unusual = tuple((int(i), float(d)) for i, d in json.loads(row["unusual"]))
    return DriftReport(
        evidence,
        row["p_value"],
        row["is_drift"],
        row["alpha"],
        row["reference_images"],
        row["batch_images"],
        unusual,
        row["engine"],
        tuple(json.loads(row["notes"])),
        tuple(Part(**part) for part in json.loads(row["parts"])),
        severity.of_row(row),
    )
