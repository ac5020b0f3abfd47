"""Fills in the model card of a finished training: its data, its metrics, what it needs."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raypipe import report
from raypipe.feed.columns import Labels
from raypipe.feed.dataset import Pinned
from raypipe.models.ensemble import Member
from raypipe.models.quality import quality
from raypipe.models.tasks import NUMERIC, tags
from raypipe.models.zoo import ModelConfig
from raypipe.registry import made_by
from raypipe.registry.card import Card, Judged, SliceMetrics
from raypipe.registry.mlflow_model import requirements
from raypipe.tables import scan
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.objective import judge
from raypipe.train.unseen import Unseen
from raypipe.version import VERSION

MOST_SLICES = 30
QUANTILES = {
    0: "least",
    0.05: "5 %",
    0.25: "25 %",
    0.5: "half",
    0.75: "75 %",
    0.95: "95 %",
    1: "all",
}
_NOT_ON_DISK = "given by its provider with the weights; not known here"
_UNKNOWN = "not stated"


def card(
    job: TrainJob,
    pinned: Pinned,
    result: TrainResult,
    unseen: Unseen,
    name: str,
    looks: int,
    members: Sequence[Member] = (),
    stay: Sequence[str] = (),
) -> Card:
    """The card of a result that is published as `name`.

    looks: how often the test images of the table were looked at before. members: of an ensemble.
    stay: the names of those that a refit on more splits left as they were.
    """
    is_number = pinned.task.kind in NUMERIC
    averaged = checkpoint.averaged(Path(result.checkpoint))
    return Card(
        name=name,
        task=pinned.task,
        made_at=datetime.now(timezone.utc),
        facts=(
            *_architecture(job, members, stay),
            ("Epochs", epochs(job, result, averaged, is_ensemble=bool(members))),
            ("Code", (made_by.commit() or "no checkout")[:12]),
            ("Key", result.key),
        ),
        data=_data(job, pinned),
        balance=() if is_number else _balance(job, pinned),
        trained=None if is_number else sum(_by_label(job, pinned).values()),
        quantiles=_quantiles(job, pinned) if is_number else (),
        judged=judged(job, pinned, unseen, looks),
        calibrated=str(unseen.calibrated or ""),
        intended_use=job.registry.intended_use,
        data_licence=job.registry.data_licence,
        licences=_licences([one.model for one in members] or [job.model]),
        environment=(
            ("Python", platform.python_version()),
            ("System", f"{platform.system()} {platform.machine()}"),
            ("raypipe", VERSION),
        ),
    )


def _architecture(job: TrainJob, members: Sequence[Member], stay: Sequence[str]) -> report.Facts:
    if not members:
        return (
            ("Backbone", job.model.name),
            ("Transfer", job.model.mode),
            ("Input", f"{job.model.pixels} x {job.model.pixels} px, RGB"),
        )
    total = sum(member.weight for member in members)
    side = max(member.model.pixels for member in members)
    facts = [("Ensemble", f"the weighted mean of {len(members)} models")]
    for place, member in enumerate(members, 1):
        what = f"{member.model.name}, {member.model.mode}, {member.model.pixels} px"
        trial = f" ({member.name})" if member.name else ""
        # The card's counts are of the rows of the others.
        without = ", trained without validation images" if member.name in stay else ""
        weight = f"weight {member.weight / total:.2f}"
        facts.append((f"Member {place}", f"{what}, {weight}{trial}{without}"))
    facts.append(("Input", f"{side} x {side} px, RGB; smaller members shrink it themselves"))
    return tuple(facts)


def epochs(job: TrainJob, result: TrainResult, averaged: int = 1, is_ensemble: bool = False) -> str:
    """How long it was trained, and of which epoch the weights are, in words.

    averaged: of how many trials the weights are the mean (a soup); the result has the best one's
    history.
    """
    count, best = len(result.history), result.best_epoch + 1
    text = "none: fitted at once" if job.train.solver != "steps" else str(count)
    if averaged > 1:
        text += f" (best trial); mean of the weights of {averaged} trials"
    elif job.train.solver == "steps" and best != count:
        text += f"; the weights are those of epoch {best}"
    # A result has its first member's history.
    return f"{text} (member 1)" if is_ensemble else text


def _data(job: TrainJob, pinned: Pinned) -> report.Facts:
    counts = ", ".join(f"{split} {n:,}" for split, n in pinned.counts.items())
    facts = [("Table", str(pinned.version)), ("Labelled images", counts)]
    if pinned.version.origin:
        facts.append(("Prepared from", pinned.version.origin))
    if job.table.where:
        facts.append(("Only rows where", report.cell(job.table.where)))
    if job.table.sample != 1:
        facts.append(("Share of its rows", report.cell(job.table.sample)))
    return tuple(facts)


def _balance(job: TrainJob, pinned: Pinned) -> tuple[tuple[str, int], ...]:
    """Training images by class or tag, most first, whatever the feed drew of them."""
    by_label = _by_label(job, pinned)
    if pinned.task.kind != "multi_label":
        return tuple(Counter(by_label).most_common())
    by_tag: Counter[str] = Counter()
    for label, images in by_label.items():
        for tag in tags(label):
            by_tag[tag] += images
    return tuple(by_tag.most_common())


def _by_label(job: TrainJob, pinned: Pinned) -> dict[str, int]:
    """Training images by their whole label; of several tags that is all of them."""
    labels = pinned.columns.labels
    assert isinstance(labels, Labels)
    return labels.counts(pinned.columns.chosen(pinned.parts(job.feed.train)))


def _quantiles(job: TrainJob, pinned: Pinned) -> tuple[tuple[str, float], ...]:
    """Below which label a share of the training images lies."""
    chosen_P = pinned.columns.chosen(pinned.parts(job.feed.train))
    number_N = pinned.columns.labels.encoded(pinned.task, chosen_P)[:, 0].astype(np.float64)
    found = []
    for share, name in QUANTILES.items():
        found.append((name, float(np.quantile(number_N, share))))
    return tuple(found)


def judged(job: TrainJob, pinned: Pinned, unseen: Unseen, looks: int = 0) -> Judged:
    """How good the model is on images that its weights have not seen; looks: see `card`."""
    # The scores are those of the package, calibrated if it is.
    task, scores_NC = pinned.task, unseen.reference.scores_NC
    targets_NC = task.targets(torch.tensor(unseen.labels_N)).numpy()
    everything = np.ones(len(scores_NC), bool)
    slices, left_out, unclear = _slices(job, pinned, unseen)
    return Judged(
        split=unseen.split,
        caution=_sample(pinned, unseen) + _caution(job, pinned, unseen, looks),
        quality=quality(task, scores_NC, targets_NC, _metrics(pinned, unseen, everything)),
        slices=slices,
        left_out=left_out,
        unclear=unclear,
    )


def _sample(pinned: Pinned, unseen: Unseen) -> str:
    """Of how many images the numbers are, if not of all."""
    images = pinned.counts[unseen.split]
    drawn = len(unseen.labels_N) + unseen.broken
    text = f"Of {drawn:,} of its {images:,} images, drawn evenly. " if drawn < images else ""
    if unseen.broken:
        text += f"{unseen.broken:,} of them cannot be read and are left out. "
    return text


def _caution(job: TrainJob, pinned: Pinned, unseen: Unseen, looks: int) -> str:
    """What else the split was used for: a number from it is only as good as its use."""
    # As after a refit of a table without a test split.
    if pinned.common(unseen.split, job.feed.train):
        return "The model was trained on them, so these numbers say nothing about other images."
    if unseen.is_inherited:
        return (
            "The weights that it started from have learned from them, so these numbers are too "
            "good."
        )
    if pinned.common(unseen.split, job.feed.val):
        used = "It chose the epoch, and settings where there was a search"
        if unseen.calibrated is not None and not unseen.calibrated.why_not:
            used += ", and the temperature was fitted on it"
        return f"{used}, so these numbers are a little too good."
    # Whoever looks often and keeps what looks best has chosen by it.
    return (
        "Nothing was chosen by it for this model. "
        f"This is look {looks + 1:,} at it that the store knows of: "
        "trainings, evaluations and comparisons on this table count."
    )


def _metrics(pinned: Pinned, unseen: Unseen, inside_N: np.ndarray) -> dict[str, float]:
    """The task's metrics of some of the images, by their plain names."""
    scores_NC = torch.from_numpy(unseen.reference.scores_NC[inside_N])
    found = judge(pinned.task, scores_NC, torch.tensor(unseen.labels_N[inside_N]))
    return {name.removeprefix("val_"): value for name, value in found.items()}


def _slices(
    job: TrainJob, pinned: Pinned, unseen: Unseen
) -> tuple[tuple[SliceMetrics, ...], int, int]:
    """The metrics by source, how many sources are left out, and how many images have no source that
    is known; none where the table has no such column, or only one source.

    Sources are named as the gate's slices: a null is None.
    """
    columns = pinned.table.columns
    known = {field.name for field in pinned.table.at(pinned.version).schema().fields}
    if not {columns.source, columns.id} <= known:
        return (), 0, 0
    wanted = pinned.rows_of(unseen.split)
    judged = pa.array(sorted(set(unseen.reference.ids)), pa.string())
    sources: dict[str, str] = {}
    unclear = set()
    for rows in scan.each(pinned.table, pinned.version, [columns.id, columns.source], wanted):
        ids_N = rows[columns.id].cast(pa.string())
        is_judged = pc.is_in(ids_N, value_set=judged)
        of_N = rows[columns.source].filter(is_judged).to_pylist()
        for image_id, source in zip(ids_N.filter(is_judged).to_pylist(), of_N, strict=True):
            # An id of images from two sources says nothing about either.
            if sources.setdefault(image_id, str(source)) != str(source):
                unclear.add(image_id)
    of_row = [None if i in unclear else sources.get(i) for i in unseen.reference.ids]
    # One source is the whole split, which the card shows anyway.
    names = sorted({name for name in of_row if name is not None})
    if len(names) < 2:
        return (), 0, 0
    parts = []
    for name in names[:MOST_SLICES]:
        inside_N = np.array([one == name for one in of_row])
        found = _metrics(pinned, unseen, inside_N)
        parts.append(SliceMetrics(name, int(inside_N.sum()), found))
    return tuple(parts), len(names) - len(parts), of_row.count(None)


def _licences(models: Sequence[ModelConfig]) -> tuple[tuple[str, str, str], ...]:
    """(what, version, licence) of the packages that the models need, and of their weights."""
    found = []
    by_name = {model.name: model for model in models}
    for requirement in requirements(*by_name):
        package, _, version = requirement.partition("==")
        found.append((package, version, _licence(package)))
    # What is no package of its own. A name without a prefix is a backbone of raypipe's: its weights
    # come with a package above.
    for name, model in by_name.items():
        provider, prefixed, _ = name.partition(":")
        if provider == "file":
            found.append((f"code and weights of {name}", "–", "yours"))
        elif prefixed and model.pretrained:
            found.append((f"weights of {name}", "–", _NOT_ON_DISK))
    return tuple(found)


def _licence(package: str) -> str:
    """As the package's own metadata states it: an expression, a name, or a classifier."""
    stated: Any = metadata.metadata(package)
    expression = stated.get("License-Expression")
    if expression:
        return str(expression)
    # Some packages put the whole text of a licence here.
    name = stated.get("License") or ""
    if name and len(name) < 80 and "\n" not in name:
        return str(name)
    classifiers = stated.get_all("Classifier") or []
    names = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    return ", ".join(names) or _UNKNOWN
