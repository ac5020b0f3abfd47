"""One drift check: predict a batch with a champion, and compare it with the champion's reference.

It keeps the evidence and draws the report.

The evidence is one row of a Delta table and one MLflow run, named by (model, batch version,
settings): the same check twice is one row. A check needs no labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe import report
from raypipe.config import RunConfig, key_of, to_json
from raypipe.errors import DataError
from raypipe.images.measure import SEEN
from raypipe.models.tasks import NUMERIC
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package, Reference
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.serve import batch
from raypipe.serve.batch import PredictConfig
from raypipe.tables import scan
from raypipe.tables.commits import rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import by_domain
from raypipe.watch.detect import DriftConfig, DriftReport, Evidence, Seen, detect
from raypipe.watch.domains import Part
from raypipe.watch.pictures import Batch, picture_of

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


def check(
    store: Store,
    run: RunConfig,
    batch_table: TableConfig,
    name: str,
    predict: PredictConfig,
    drift: DriftConfig,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult:
    """Compare the pinned batch with the reference of `model` (default: the champion).

    progress: called with (done, total) images while the batch is predicted. Raises DataError as
    tables do.
    """
    model = model or promote.require_champion(store)
    predicted = batch.predict(store, run, batch_table, predict, model, progress)
    key = key_of("evidence", FORMAT, predicted.key, drift, run.seed)
    package = promote.fetch(store, model)
    options = batch_table.storage_options
    mine = read_batch(predicted.table, predicted.out.uri, predicted.key, options)
    reference = package.reference()

    def made() -> pa.Table:
        found = detect(
            reference.features_ND,
            mine.features_ND,
            reference.scores_NC,
            mine.scores_NC,
            drift,
            run.seed,
            Seen(
                _labels(package, reference.scores_NC),
                reference.looks_NK,
                by_domain.names(reference.domains, reference.features_ND),
                reference.groups,
            ),
            Seen(
                _labels(package, mine.scores_NC),
                mine.looks_NK,
                groups=_groups(package, reference, batch_table, mine),
            ),
        )
        return pa.Table.from_pylist([_as_row(key, name, str(model), predicted.table, found)], _ROW)

    # The tests run only if this evidence is not stored yet. Two checks at once store it once.
    stored = rows_once(str(run.path / "drift"), _ROW, {"key": key}, made, f"drift check {name}")
    found = _report(stored.to_pylist()[0])

    def log_metrics(run_id: str) -> None:
        tracking.log_metrics(store, run_id, _metrics(found))

    params = {"drift": drift.model_dump(mode="json"), "model": str(model)}
    params |= {"drift.engine": found.engine, "drift.notes": "; ".join(found.notes)}
    tracking.once(store, key, f"drift {name}", params, predicted.table, log_metrics)

    # The page is drawn again each time: it is not evidence, and may have been deleted.
    compared = f"{predicted.table} against the reference of {model}"
    header = report.Header(
        f"Drift check: {name}", compared, key, now(), _facts(model, predicted.table, found)
    )
    picture = picture_of(found, name, package, mine, ImageTable.open(batch_table))
    page = report.Page(header, checks=(picture,))
    path = report.write(page, run.path / "reports" / f"drift-{name}-{key}.html")
    predictions = (predicted.out.uri, predicted.key)
    return CheckResult(name, str(model), predicted.table, found, str(path), predictions)


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
    table = ImageTable.open(source)
    if reference.groups is None or column not in table.at(mine.version).schema().to_arrow().names:
        return None
    ids = table.columns.id
    read = scan.rows(table, mine.version, [ids, column])
    pairs = zip(read[ids].to_pylist(), read[column].to_pylist(), strict=True)
    by_id = {image_id: "" if group is None else str(group) for image_id, group in pairs}
    return [by_id.get(image_id, "") for image_id in mine.ids]


def read_batch(
    version: TableVersion, uri: str, key: str, storage_options: dict[str, str] | None = None
) -> Batch:
    """The rows of one prediction; batch.predict returns its key.

    They are in the order of ids and hashes, which is the same whenever they are read. Images that
    do not decode have no features, and are left out.
    """
    columns = ["image_id", "sha256", "embedding", "scores", "error", *SEEN]
    rows = batch.read_rows(uri, key, columns, storage_options)
    rows = rows.filter(pc.is_null(rows["error"]))
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
    return Batch(version, ids, hashes, features, scores, looks_NK)


def _metrics(found: DriftReport) -> dict[str, float]:
    each = {
        f"drift.{e.detector}.{e.on}.{what}": getattr(e, what)
        for e in found.evidence
        for what in ("p_value", "statistic")
    }
    return each | {"drift.p_value": found.p_value, "drift.is_drift": float(found.is_drift)}


def _as_row(
    key: str, name: str, model: str, version: TableVersion, found: DriftReport
) -> dict[str, Any]:
    whole = asdict(found)
    as_text = {name: to_json(whole.pop(name)) for name in ("evidence", "unusual", "notes", "parts")}
    return (
        whole
        | as_text
        | {
            "key": key,
            "name": name,
            "model": model,
            "table": str(version),
            "checked_at": now().isoformat(),
            "format": FORMAT,
        }
    )


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
    )
