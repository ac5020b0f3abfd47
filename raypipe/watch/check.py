"""One drift check: predict a batch with a champion, compare with its reference, keep the evidence, draw the report.

The evidence is one row of a Delta table and one MLflow run, named by (model, batch version, settings): the same check twice is
one row. A check needs no labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import Section, key_of
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.search.tuner import SearchJob
from raypipe.serve import batch
from raypipe.serve.batch import PredictConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion, append
from raypipe.watch import report
from raypipe.watch.decide import GateConfig
from raypipe.watch.detect import DriftConfig, DriftReport, Evidence, detect

_ROW = pa.schema(
    [(n, pa.string()) for n in ("key", "name", "model", "table", "checked_at", "evidence", "unusual")]
    + [
        ("is_drift", pa.bool_()),
        ("p_value", pa.float64()),
        ("alpha", pa.float64()),
        ("reference_images", pa.int64()),
        ("batch_images", pa.int64()),
    ]
)


class WatchConfig(Section):
    """The table whose images are checked, what to call it, and how a retrain runs."""

    batch: TableConfig | None = None
    name: str = "batch"
    retrain_workers: int = 1
    force: bool = False


class WatchJob(SearchJob):
    """A search job and everything that watches its model."""

    predict: PredictConfig = PredictConfig()
    drift: DriftConfig = DriftConfig()
    watch: WatchConfig = WatchConfig()
    gate: GateConfig = GateConfig()


@dataclass(frozen=True)
class CheckResult:
    """A drift report and what it is about."""

    name: str
    model: str
    table: TableVersion
    report: DriftReport
    page: str


def check(
    store: Store,
    job: WatchJob,
    batch_table: TableConfig,
    name: str,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult:
    """Compare the pinned batch with the reference of `model` (default: the champion). Raises DataError as tables do."""
    model = model or promote.require_champion(store)
    predicted = batch.predict(store, job.run, batch_table, job.predict, model, progress)
    key = key_of(str(model), str(predicted.table), batch_table.where, job.drift, job.run.seed)
    package = promote.fetch(store, model)
    ids, embedding, scores = _predictions(predicted.out.uri, model, predicted.table)
    uri = str(job.run.path / "drift")
    found = _stored(uri, key)
    if found is None:
        found = detect(*_sides(package, embedding, scores), job.drift, job.run.seed)
        append(uri, pa.Table.from_pylist([_as_row(key, name, str(model), predicted.table, found)], _ROW), f"drift check {name}")
    if tracking.finished_run(store, key) is None:
        with tracking.run(
            store, key, f"drift {name}", {"drift": job.drift.model_dump(mode="json"), "model": str(model)}, predicted.table
        ) as run_id:
            tracking.log_metrics(store, run_id, _metrics(found))
    picture = picture_of(found, name, package, ids, scores, ImageTable.open(batch_table), predicted.table)
    page = report.Page(
        report.Header(
            f"Drift check: {name}", f"{predicted.table} against the reference of {model}", key, now(), _facts(job, model)
        ),
        checks=(picture,),
    )
    path = report.write(page, job.run.path / "reports" / f"drift-{name}-{key}.html")
    return CheckResult(name, str(model), predicted.table, found, str(path))


def picture_of(
    found: DriftReport,
    name: str,
    package: Package,
    ids: list[str],
    scores: np.ndarray,
    table: ImageTable,
    version: TableVersion,
) -> report.Check:
    """The check as the report shows it, with pictures of the most unusual and the most usual images of the batch."""
    unusual = [(ids[row], distance) for row, distance in found.unusual]
    images = _images(table, version, [i for i, _ in unusual])
    features, ref_scores = package.reference()
    positive = len(package.classes) - 1 if len(package.classes) == 2 else None
    pick = (lambda s: s[:, 0]) if positive is not None else (lambda s: s.max(axis=1))
    return report.Check(
        name=name,
        is_drift=found.is_drift,
        p_value=found.p_value,
        alpha=found.alpha,
        reference_images=found.reference_images,
        batch_images=found.batch_images,
        evidence=tuple(
            report.Evidence(e.detector, e.on, e.statistic, e.p_value, e.threshold, e.is_drift) for e in found.evidence
        ),
        reference_scores=pick(ref_scores),
        batch_scores=pick(scores),
        score_name=f"Score of {package.classes[0]!r}" if positive is not None else "Highest score",
        unusual=tuple(report.Picture(images[i], i[:8], f"{d:.1f} x the usual distance") for i, d in unusual if i in images),
    )


def now() -> datetime:
    return datetime.now(timezone.utc)


def _facts(job: WatchJob, model: ModelVersion) -> tuple[tuple[str, str], ...]:
    return (
        ("Model", str(model)),
        ("Trained on", model.tags.get("raypipe.table", "?")),
        ("Code", tracking.code_commit() or "no checkout"),
    )


def _predictions(uri: str, model: ModelVersion, version: TableVersion) -> tuple[list[str], np.ndarray, np.ndarray]:
    rows = batch.rows_of(uri, model, version, ["image_id", "embedding", "scores"]).sort_by("image_id")
    return rows["image_id"].to_pylist(), np.stack(rows["embedding"].to_numpy()), np.stack(rows["scores"].to_numpy())


def _sides(
    package: Package, embedding: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ref_embedding, ref_scores = package.reference()
    return ref_embedding, embedding, ref_scores, scores


def _images(table: ImageTable, version: TableVersion, ids: list[str]) -> dict[str, bytes]:
    c = table.columns
    found = scan.rows(table, version, [c.id, c.image], {c.id: ids}) if ids else pa.table({c.id: [], c.image: []})
    return dict(zip(found[c.id].to_pylist(), found[c.image].to_pylist(), strict=True))


def _metrics(found: DriftReport) -> dict[str, float]:
    each = {f"drift.{e.detector}.{e.on}.{what}": getattr(e, what) for e in found.evidence for what in ("p_value", "statistic")}
    return each | {"drift.p_value": found.p_value, "drift.is_drift": float(found.is_drift)}


def _as_row(key: str, name: str, model: str, version: TableVersion, found: DriftReport) -> dict[str, Any]:
    whole = asdict(found)
    evidence, unusual = json.dumps(whole.pop("evidence")), json.dumps(whole.pop("unusual"))
    return whole | {
        "key": key,
        "name": name,
        "model": model,
        "table": str(version),
        "checked_at": now().isoformat(),
        "evidence": evidence,
        "unusual": unusual,
    }


def _stored(uri: str, key: str) -> DriftReport | None:
    if not ImageTable.exists(uri):
        return None
    table = ImageTable(uri)
    rows = scan.rows(table, table.pin(), _ROW.names, {"key": key}).to_pylist()
    if not rows:
        return None
    row = rows[0]
    evidence = tuple(Evidence(**e) for e in json.loads(row["evidence"]))
    unusual = tuple((int(i), float(d)) for i, d in json.loads(row["unusual"]))
    return DriftReport(
        evidence, row["p_value"], row["is_drift"], row["alpha"], row["reference_images"], row["batch_images"], unusual
    )
