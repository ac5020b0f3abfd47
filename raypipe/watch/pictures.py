"""A drift check as its report shows it: scores, a map of both sides, and images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from raypipe import report
from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.registry.package import Package
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch.detect import DriftReport
from raypipe.watch.predicted import Batch

MOST_UNDER_ONE_ID = 64  # images looked at to find the one that the report shows


def picture_of(
    found: DriftReport, name: str, package: Package, batch: Batch, table: ImageTable
) -> report.Check:
    """The check's part of a page: scores and map, the batch's most unusual images, usual ones."""
    rows = [row for row, _ in found.unusual]
    ids = [batch.ids[row] for row in rows]
    hashes = [batch.sha256[row] for row in rows]
    images = images_of(table, batch.version, ids, batch.features_ND[rows], package, hashes)
    unusual = []
    for image_id, image, (_, distance) in zip(ids, images, found.unusual, strict=True):
        # An image may have been removed since the check.
        if image is not None:
            text = f"{distance:.1f} x the usual distance"
            unusual.append(report.Picture(image, _short(image_id), text))

    evidence = []
    for e in found.evidence:
        on = f"{e.on} ({e.detail})" if e.detail else e.on
        line = report.Evidence(e.detector, on, e.statistic, e.p_value, e.threshold, e.is_drift)
        evidence.append(line)
    reference = package.reference()
    is_binary = len(package.classes) == 2
    return report.Check(
        name=name,
        is_drift=found.is_drift,
        p_value=found.p_value,
        alpha=found.alpha,
        reference_images=found.reference_images,
        batch_images=found.batch_images,
        evidence=tuple(evidence),
        reference_scores=_one_score(package, reference.scores_NC),
        batch_scores=_one_score(package, batch.scores_NC),
        score_name=f"Score of {package.classes[0]!r}" if is_binary else "Highest score",
        projection=_plane(reference.features_ND, batch.features_ND),
        unusual=tuple(unusual),
        typical=_typical(package, len(rows), table),
        cost=report.Cost(
            found.severity.accuracy,
            found.severity.low,
            found.severity.high,
            found.severity.known,
            found.severity.why_not,
        ),
    )


def _short(image_id: str | None) -> str:
    return image_id[:8] if image_id else "no id"


def _one_score(package: Package, scores_NC: np.ndarray) -> np.ndarray:
    """One number from 0 to 1 for each image, for the chart of scores."""
    # A regression's numbers have no such scale: nothing is drawn.
    if package.task.kind == "regression":
        return scores_NC[:0, 0]
    return scores_NC[:, 0] if len(package.classes) == 2 else scores_NC.max(axis=1)


def _plane(reference_ND: np.ndarray, batch_MD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sides on the first two principal components of their union."""
    both = np.concatenate([reference_ND, batch_MD]).astype(np.float64)
    both -= both.mean(axis=0)
    # Of the two matrices with the same components, the smaller one: there may be thousands of
    # features.
    if len(both) < both.shape[1]:
        _, vectors = np.linalg.eigh(both @ both.T)
        components = both.T @ vectors[:, -2:][:, ::-1]
        # A component without spread has length 0.
        flat = both @ components / np.maximum(np.linalg.norm(components, axis=0), 1e-12)
    else:
        _, vectors = np.linalg.eigh(both.T @ both)
        flat = both @ vectors[:, -2:][:, ::-1]
    return flat[: len(reference_ND)], flat[len(reference_ND) :]


def _typical(package: Package, count: int, batch: ImageTable) -> tuple[report.Picture, ...]:
    """Reference images nearest to the reference's centre; none if their table is gone."""
    reference, origin = package.reference(), package.info["table"]
    centre_D = reference.features_ND.mean(axis=0)
    distance_N = np.linalg.norm(reference.features_ND - centre_D, axis=1)
    rows = np.argsort(distance_N, kind="stable")[:count]
    ids = [reference.ids[i] for i in rows]
    kept = package.info["config"]["table"] | {"version": origin["version"]}
    # A package holds no credentials. The batch's are right in the same bucket.
    if kept["uri"].split("/")[:3] == batch.uri.split("/")[:3]:
        kept["storage_options"] = batch.storage_options
    try:
        table = ImageTable.open(TableConfig.model_validate(kept))
        version = TableVersion(origin["uri"], origin["version"])
        images = images_of(table, version, ids, reference.features_ND[rows], package)
    except DataError:
        return ()
    pictures = []
    for image_id, image in zip(ids, images, strict=True):
        if image is not None:
            pictures.append(report.Picture(image, _short(image_id)))
    return tuple(pictures)


def images_of(
    table: ImageTable,
    version: TableVersion,
    ids: Sequence[str | None],
    features_nD: np.ndarray,
    package: Package,
    hashes: list[str] | None = None,
) -> list[bytes | None]:
    """The image of each id and features; None if it cannot be found.

    Several images may have one id. Then it is the one with this hash, or if no hashes were kept,
    the one with these features.
    """
    c = table.columns
    candidates: dict[str | None, set[bytes]] = {i: set() for i in ids}
    # A row without an id cannot be asked for.
    known = [i for i in ids if i]
    if known:
        found = scan.rows(table, version, [c.id, c.image], {c.id: known})
        pairs = zip(found[c.id].to_pylist(), found[c.image].to_pylist(), strict=True)
        for image_id, image in pairs:
            candidates[image_id] |= {image} if image else set()
    if hashes is None:
        pairs_of = zip(ids, features_nD, strict=True)
        return [_nearest(features_D, candidates[i], package) for i, features_D in pairs_of]
    by_hash = {}
    for images in candidates.values():
        for image in images:
            by_hash[hashlib.sha256(image).hexdigest()] = image
    return [by_hash.get(sha256) for sha256 in hashes]


def _nearest(features_D: np.ndarray, candidates: set[bytes], package: Package) -> bytes | None:
    """The candidate whose features are nearest to these; None without a candidate.

    None for more than MOST_UNDER_ONE_ID candidates too: each costs a prediction.
    """
    if len(candidates) == 1:
        return next(iter(candidates))
    if len(candidates) > MOST_UNDER_ONE_ID:
        return None
    best: tuple[float, bytes] | None = None
    # Sorted, so that of equally near ones it is always the same.
    for image in sorted(candidates):
        with suppress(BadImage):
            away = float(np.linalg.norm(package.predict([image]).features_ND[0] - features_D))
            best = min(best or (away, image), (away, image))
    return best[1] if best else None
