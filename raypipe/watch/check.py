"""One drift check: predict a batch with a champion, compare with its reference, keep the evidence,
draw the report.

The evidence is one row of a Delta table and one MLflow run, named by (model, batch version,
settings): the same check twice is one row. A check needs no labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from raypipe import report
from raypipe.config import Section, key_of, to_json
from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.search.settings import SearchJob, dotted
from raypipe.serve import batch
from raypipe.serve.batch import PredictConfig
from raypipe.tables import scan
from raypipe.tables.commits import rows_once
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch.decide import GateConfig
from raypipe.watch.detect import DriftConfig, DriftReport, Evidence, detect

# Of a row of evidence; a key of format 1 named fewer things, so its rows are not looked at and the
# check is made again.
FORMAT = 2
_ROW = pa.schema(
    [
        (n, pa.string())
        for n in ("key", "name", "model", "table", "checked_at", "evidence", "unusual")
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


class WatchConfig(Section):
    """The table whose images are checked, what to call it, and how a retrain runs."""

    batch: TableConfig | None = None
    """The table of new images that is compared with the champion's reference."""
    name: str = "batch"
    """What the evidence and the report call the batch."""
    retrain_workers: int = Field(default=1, ge=1)
    """Workers of each trial of a retrain, or of its refit if the job has a search.refit."""
    retrain_samples: int = Field(default=8, ge=1)
    """Trials of a retrain. The first has the champion's settings, the others are near them. 1: the
    champion's settings alone."""
    retrain_space: Annotated[dict[str, str], Field(min_length=1)] | None = None
    """Fields that the trials draw, written as search.space. null: rate, weight decay and dropout,
    near the champion's."""
    retrain_sampling: Literal["auto", "natural", "balanced", "sources", "weighted"] = "auto"
    """feed.sampling of the challenger. auto: if the champion's is natural, old and new sources are
    drawn equally often, or by feed.mix; else the champion's is kept."""
    force: bool = False
    """Retrain without drift."""

    @field_validator("retrain_space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """Nested names become dotted ones, as in search.space."""
        return dotted(space) if isinstance(space, dict) else space


class WatchJob(SearchJob):
    """A search job and everything that watches its model."""

    predict: PredictConfig = PredictConfig()
    """What is predicted, and where the predictions go."""
    drift: DriftConfig = DriftConfig()
    """The tests of a drift check."""
    watch: WatchConfig = WatchConfig()
    """The batch that is checked, and the retrain after drift."""
    gate: GateConfig = GateConfig()
    """When a challenger is better than the champion."""


MOST_UNDER_ONE_ID = 64  # images looked at to find the one that a report shows


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


@dataclass(frozen=True)
class Batch:
    """A predicted batch: row i of both arrays is the image ids[i] whose bytes have the hash
    sha256[i].
    """

    version: TableVersion
    ids: list[str | None]
    sha256: list[str]
    features_ND: np.ndarray
    scores_NC: np.ndarray


def check(
    store: Store,
    job: WatchJob,
    batch_table: TableConfig,
    name: str,
    model: ModelVersion | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult:
    """Compare the pinned batch with the reference of `model` (default: the champion). Raises
    DataError as tables do.
    """
    model = model or promote.require_champion(store)
    predicted = batch.predict(store, job.run, batch_table, job.predict, model, progress)
    key = key_of("evidence", FORMAT, predicted.key, job.drift, job.run.seed)
    package = promote.fetch(store, model)
    mine = read_batch(
        predicted.table, predicted.out.uri, predicted.key, batch_table.storage_options
    )
    reference = package.reference()

    def made() -> pa.Table:
        found = detect(
            reference.features_ND,
            mine.features_ND,
            reference.scores_NC,
            mine.scores_NC,
            job.drift,
            job.run.seed,
        )
        return pa.Table.from_pylist([_as_row(key, name, str(model), predicted.table, found)], _ROW)

    stored = rows_once(str(job.run.path / "drift"), _ROW, {"key": key}, made, f"drift check {name}")
    found = _report(stored.to_pylist()[0])
    params = {"drift": job.drift.model_dump(mode="json"), "model": str(model)}
    tracking.once(
        store,
        key,
        f"drift {name}",
        params,
        predicted.table,
        lambda run_id: tracking.log_metrics(store, run_id, _metrics(found)),
    )
    picture = picture_of(found, name, package, mine, ImageTable.open(batch_table))
    page = report.Page(
        report.Header(
            f"Drift check: {name}",
            f"{predicted.table} against the reference of {model}",
            key,
            now(),
            _facts(job, model),
        ),
        checks=(picture,),
    )
    path = report.write(page, job.run.path / "reports" / f"drift-{name}-{key}.html")
    return CheckResult(
        name, str(model), predicted.table, found, str(path), (predicted.out.uri, predicted.key)
    )


def picture_of(
    found: DriftReport, name: str, package: Package, batch: Batch, table: ImageTable
) -> report.Check:
    """The check as the report shows it: scores and a map of both sides, the batch's most unusual
    images and usual ones.
    """
    rows = [row for row, _ in found.unusual]
    ids = [batch.ids[row] for row in rows]
    hashes = [batch.sha256[row] for row in rows]
    images = _images(table, batch.version, ids, batch.features_ND[rows], package, hashes)
    unusual = [
        (i, image, distance)
        for i, image, (_, distance) in zip(ids, images, found.unusual, strict=True)
    ]
    reference = package.reference()
    binary = len(package.classes) == 2
    return report.Check(
        name=name,
        is_drift=found.is_drift,
        p_value=found.p_value,
        alpha=found.alpha,
        reference_images=found.reference_images,
        batch_images=found.batch_images,
        evidence=tuple(
            report.Evidence(e.detector, e.on, e.statistic, e.p_value, e.threshold, e.is_drift)
            for e in found.evidence
        ),
        reference_scores=_one_score(package, reference.scores_NC),
        batch_scores=_one_score(package, batch.scores_NC),
        score_name=f"Score of {package.classes[0]!r}" if binary else "Highest score",
        projection=_plane(reference.features_ND, batch.features_ND),
        unusual=tuple(
            report.Picture(image, _short(i), f"{d:.1f} x the usual distance")
            for i, image, d in unusual
            if image is not None
        ),
        typical=_typical(package, len(unusual), table),
    )


def _short(image_id: str | None) -> str:
    return image_id[:8] if image_id else "no id"


def _one_score(package: Package, scores_NC: np.ndarray) -> np.ndarray:
    """What the report draws of each image, from 0 to 1; nothing of a regression, whose numbers have
    no such scale.
    """
    if package.task.kind == "regression":
        return scores_NC[:0, 0]
    return scores_NC[:, 0] if len(package.classes) == 2 else scores_NC.max(axis=1)


def _plane(reference_ND: np.ndarray, batch_MD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sides on the first two principal components of their union."""
    both = np.concatenate([reference_ND, batch_MD]).astype(np.float64)
    both -= both.mean(axis=0)
    if (
        len(both) < both.shape[1]
    ):  # the smaller of two matrices with the same components: features may be thousands
        _, vectors = np.linalg.eigh(both @ both.T)
        flat = both @ (both.T @ vectors[:, -2:][:, ::-1])
        flat /= np.maximum(np.linalg.norm(both.T @ vectors[:, -2:][:, ::-1], axis=0), 1e-12)
    else:
        _, vectors = np.linalg.eigh(both.T @ both)
        flat = both @ vectors[:, -2:][:, ::-1]
    return flat[: len(reference_ND)], flat[len(reference_ND) :]


def _typical(package: Package, count: int, batch: ImageTable) -> tuple[report.Picture, ...]:
    """Reference images nearest to the reference's centre; none when the table they came from is
    gone.
    """
    reference, origin = package.reference(), package.info["table"]
    distance = np.linalg.norm(reference.features_ND - reference.features_ND.mean(axis=0), axis=1)
    rows = np.argsort(distance, kind="stable")[:count]
    ids = [reference.ids[i] for i in rows]
    kept = package.info["config"]["table"] | {"version": origin["version"]}
    if (
        kept["uri"].split("/")[:3] == batch.uri.split("/")[:3]
    ):  # a package keeps no credentials: those of the same bucket do
        kept["storage_options"] = batch.storage_options
    try:
        table = ImageTable.open(TableConfig.model_validate(kept))
        images = _images(
            table,
            TableVersion(origin["uri"], origin["version"]),
            ids,
            reference.features_ND[rows],
            package,
        )
    except DataError:
        return ()
    return tuple(
        report.Picture(image, _short(i))
        for i, image in zip(ids, images, strict=True)
        if image is not None
    )


def now() -> datetime:
    return datetime.now(timezone.utc)


def _facts(job: WatchJob, model: ModelVersion) -> tuple[tuple[str, str], ...]:
    return (
        ("Model", str(model)),
        ("Trained on", model.tags.get("raypipe.table", "?")),
        ("Code", tracking.code_commit() or "no checkout"),
    )


def read_batch(
    version: TableVersion, uri: str, key: str, storage_options: dict[str, str] | None = None
) -> Batch:
    """The rows of one prediction (batch.predict returns its key), in the order of ids and hashes:
    the same whenever read.
    """
    rows = batch.read_rows(uri, key, ["image_id", "sha256", "embedding", "scores"], storage_options)
    rows = rows.sort_by([("image_id", "ascending"), ("sha256", "ascending")])
    features, scores = (np.stack(rows[name].to_numpy()) for name in ("embedding", "scores"))
    return Batch(
        version, rows["image_id"].to_pylist(), rows["sha256"].to_pylist(), features, scores
    )


def _images(
    table: ImageTable,
    version: TableVersion,
    ids: Sequence[str | None],
    features_nD: np.ndarray,
    package: Package,
    hashes: list[str] | None = None,
) -> list[bytes | None]:
    """The image of each id and features; None where it cannot be found. Of several images under one
    id it is the one that has this sha256 or, where nobody kept it, these features."""
    c = table.columns
    candidates: dict[str | None, set[bytes]] = {i: set() for i in ids}
    # A row without an id cannot be asked for.
    known = [i for i in ids if i]
    if known:
        found = scan.rows(table, version, [c.id, c.image], {c.id: known})
        for image_id, image in zip(
            found[c.id].to_pylist(), found[c.image].to_pylist(), strict=True
        ):
            candidates[image_id] |= {image} if image else set()
    if hashes is not None:
        named = {
            hashlib.sha256(image).hexdigest(): image
            for images in candidates.values()
            for image in images
        }
        return [named.get(sha256) for sha256 in hashes]
    return [
        _of(features_D, candidates[i], package)
        for i, features_D in zip(ids, features_nD, strict=True)
    ]


def _of(features_D: np.ndarray, candidates: set[bytes], package: Package) -> bytes | None:
    if len(candidates) == 1:
        return next(iter(candidates))
    best: tuple[float, bytes] | None = None
    for image in sorted(candidates) if len(candidates) <= MOST_UNDER_ONE_ID else ():
        with suppress(BadImage):
            away = float(np.linalg.norm(package.predict([image]).features_ND[0] - features_D))
            best = min(best or (away, image), (away, image))
    return best[1] if best else None


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
    evidence, unusual = to_json(whole.pop("evidence")), to_json(whole.pop("unusual"))
    return whole | {
        "key": key,
        "name": name,
        "model": model,
        "table": str(version),
        "checked_at": now().isoformat(),
        "evidence": evidence,
        "unusual": unusual,
        "format": FORMAT,
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
    )
