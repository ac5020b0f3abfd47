"""What a finished model says of images that it has not seen: its reference and its test metrics.

The images are predicted as the model package predicts them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from raypipe.config import metrics_of, to_json
from raypipe.feed.dataset import Pinned
from raypipe.feed.feed import Feed, fetch
from raypipe.feed.locate import locate
from raypipe.files import write_atomic
from raypipe.models import calibrate, outcomes
from raypipe.models.finite import require_rows
from raypipe.models.labels import Kind
from raypipe.models.outcomes import Outcomes
from raypipe.models.predictor import Predictor
from raypipe.models.zoo import ImageModel
from raypipe.registry.package import Reference
from raypipe.train import belonging, learned, looked_at, trainer
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.objective import judge

BELONGING, ALL = "belonging", "all"
TEST = "test.json"  # beside a result: its metrics on the test split


@dataclass(frozen=True)
class Calibrated:
    """A model's temperature, and its calibration error on images that were not used to fit it."""

    temperature: float
    """1: the fitted one did not help images of validation that it was not fitted on."""
    fitted: float
    gain: float
    """How much the cross-entropy of such images falls, in nats an image: a cross-validation."""
    gain_error: float
    """The standard error of `gain`; infinite of few images, see models/calibrate."""
    images: int
    """Images that it was fitted on, of feed.val."""
    test_images: int
    """0: the table has no test rows, and the errors are None."""
    error_before: float | None = None
    error_after: float | None = None
    change: tuple[float, float] | None = None
    """A 95 % interval of error_after - error_before."""
    why_not: str = ""
    """Why no temperature was fitted; "": one was."""

    def __str__(self) -> str:
        """In words, for people."""
        if self.why_not:
            return f"not calibrated: {self.why_not}"
        text = f"temperature {self.temperature:.2f}, fitted on {self.images:,} validation images"
        # Nothing was changed, so there is nothing to compare.
        if self.temperature == 1:
            helps = "does not help images left out of the fit"
            if self.images < calibrate.LEAST_IMAGES:
                helps = f"fewer than {calibrate.LEAST_IMAGES} do not say whether it helps"
            text = (
                f"not changed: on {self.images:,} validation images a temperature of "
                f"{self.fitted:.2f} fits best, and {helps}"
            )
            if self.error_before is None:
                return text
            error = f"{100 * self.error_before:.1f} %"
            return f"{text}; calibration error on {self.test_images:,} test images {error}"
        if self.error_before is None or self.error_after is None or self.change is None:
            return f"{text}; no test images to measure it on"
        before, after = 100 * self.error_before, 100 * self.error_after
        low, high = (100 * end for end in self.change)
        return (
            f"{text}; calibration error on {self.test_images:,} test images {before:.1f} % before, "
            f"{after:.1f} % after (95 % interval of the change {low:+.1f} to {high:+.1f} points)"
        )


@dataclass(frozen=True)
class Unseen:
    """Images that the weights have not seen: what the model says of them, and their labels.

    labels_N: as Task.encode gives them. Rows are those of the reference. samples_N: their numbers
    among the rows of the split, of which registry.judged_images are sampled; None: not known.
    broken: how many of the split's, or of the sample's, images could not be read; they are left
    out.
    """

    split: str
    reference: Reference
    labels_N: np.ndarray
    calibrated: Calibrated | None = None
    samples_N: np.ndarray | None = None
    outcomes: Outcomes | None = None
    """Of the test split, which chose nothing; of these images where the table has none, unless
    the weights have learned from them."""
    is_inherited: bool = False
    """Have the weights that the training started from learned from them? See learned.decides."""
    broken: int = 0


def reference(
    job: TrainJob,
    model: Predictor,
    pinned: Pinned,
    folder: Path,
    inherited_N2: np.ndarray = learned.NONE_N2,
) -> Unseen:
    """Features and scores of images that the weights have not seen.

    Later batches are compared with them. On training images the model is overconfident, so any new
    batch would look like drift. The images are the validation split, or the test split if
    validation was trained on too. The test metrics are then stored in `folder` at once.

    With model.calibrate, the scores are calibrated, unless the weights have learned from validation
    images. inherited_N2: rows that the weights learned from before this training (learned.py);
    these have no outcomes.
    """
    job = trainer.seen_by(model, job)
    feed = job.feed
    split = feed.val
    can_test = _can_test(job, pinned)
    trained_on_val = set(pinned.parts(feed.val)) <= set(pinned.parts(feed.train))
    why_not = _why_not_calibrated(job, pinned, inherited_N2)
    calibrates = job.model.calibrate and not why_not
    if not calibrates:  # a temperature is fitted on validation, never on test images
        trained_on_val |= learned.decides(pinned, feed.val, inherited_N2)
    if trained_on_val and can_test:
        split = feed.test
    is_inherited = learned.decides(pinned, split, inherited_N2)
    predicted, labels_N, samples_N, broken = _predicted(job, model, pinned, split, ALL)
    tested, tested_labels_N, tested_broken = predicted, labels_N, broken
    if split != feed.test and can_test:
        tested, tested_labels_N, _, tested_broken = _predicted(
            job, model, pinned, feed.test, BELONGING
        )
    has_tested = can_test and (tested is not predicted or split == feed.test)
    if has_tested:
        # The images are predicted anyway.
        _store_test(job, folder, pinned, tested, tested_labels_N, tested_broken)
    judged_split = feed.test if has_tested else split

    def outcomes_of(said: Reference) -> Outcomes | None:
        if pinned.common(judged_split, feed.train):
            return None
        chose = bool(pinned.common(judged_split, feed.val))
        kept = _outcomes(pinned, said, tested_labels_N, judged_split, chose)
        is_new_N = _is_new(pinned, judged_split, said.ids, inherited_N2)
        return kept if is_new_N.all() else kept.only(np.flatnonzero(is_new_N))

    if not calibrates:
        kept = outcomes_of(tested)
        none = Calibrated(1.0, 1.0, 0.0, 0.0, 0, 0, why_not=why_not) if why_not else None
        return Unseen(split, predicted, labels_N, none, samples_N, kept, is_inherited, broken)

    # Fitted on these images, and measured on others.
    targets_NC = _targets(pinned, labels_N)
    kind = pinned.task.kind
    chosen = calibrate.choose_temperature(kind, predicted.scores_NC, targets_NC)
    calibrated = Calibrated(
        temperature=chosen.kept,
        fitted=chosen.fitted,
        gain=chosen.gain,
        gain_error=chosen.gain_error,
        images=len(targets_NC),
        test_images=0,
    )
    mended = replace(tested, scores_NC=_tempered(kind, tested.scores_NC, chosen.kept))
    if has_tested:
        tested_NC = _targets(pinned, tested_labels_N)
        calibrated = replace(
            calibrated,
            test_images=len(tested_NC),
            error_before=calibrate.calibration(kind, tested.scores_NC, tested_NC).error,
            error_after=calibrate.calibration(kind, mended.scores_NC, tested_NC).error,
            change=calibrate.change(kind, tested.scores_NC, mended.scores_NC, tested_NC),
        )
    kept = outcomes_of(mended)
    scores_NC = _tempered(kind, predicted.scores_NC, chosen.kept)
    predicted = replace(predicted, scores_NC=scores_NC)
    return Unseen(split, predicted, labels_N, calibrated, samples_N, kept, is_inherited, broken)


def _why_not_calibrated(job: TrainJob, pinned: Pinned, inherited_N2: np.ndarray) -> str:
    """Why no temperature is fitted, although model.calibrate asks for one; "": one is, or none is
    asked for.

    On images that it has learned from a model is surer than on others, and rightly so: a
    temperature that fits there leaves it too sure of all others.
    """
    feed = job.feed
    if not job.model.calibrate:
        return ""
    common = pinned.common(feed.val, feed.train)
    if common:
        return f"the model was trained on images of feed.val={feed.val}, those of {common[0]}"
    if learned.decides(pinned, feed.val, inherited_N2):
        where = f"images of feed.val={feed.val}"
        return f"the weights that it started from may have learned from {where}"
    return ""


def _outcomes(
    pinned: Pinned, said: Reference, labels_N: np.ndarray, split: str, chose: bool
) -> Outcomes:
    task = pinned.task
    error_N = outcomes.errors(task, said.scores_NC, _targets(pinned, labels_N))
    sure_N = outcomes.sure(task, said.scores_NC)
    return Outcomes(error_N, sure_N, said.domains or (), said.groups, split, chose)


def _is_new(pinned: Pinned, split: str, ids: Sequence[str], inherited_N2: np.ndarray) -> np.ndarray:
    """bool (N,): no ancestor has learned from the image; of rows that share an id, from none."""
    if not len(inherited_N2):
        return np.ones(len(ids), bool)
    rows = learned.rows_of(pinned, pinned.version, pinned.rows_of(split))
    is_known_N = learned.is_among(rows[1], inherited_N2).tolist()
    known = {i or "" for i, is_known in zip(rows[0], is_known_N, strict=True) if is_known}
    return np.array([image_id not in known for image_id in ids], bool)


def _targets(pinned: Pinned, labels_N: np.ndarray) -> np.ndarray:
    # A copy: labels in Ray's object store are read-only.
    return pinned.task.targets(torch.tensor(labels_N)).numpy()


def _tempered(kind: Kind, scores_NC: np.ndarray, temperature: float) -> np.ndarray:
    return calibrate.tempered(kind, torch.from_numpy(scores_NC), temperature).numpy()


def test(planned: trainer.Plan, result: TrainResult) -> dict[str, float]:
    """Metrics of the result on the split feed.test (test_accuracy, …); {} if it has no rows, or
    any that were trained on.

    The images are predicted as the package predicts them. The metrics are stored beside the result,
    and computed once.
    """
    stored = planned.folder / TEST
    job, pinned = planned.job, planned.pinned
    # An older raypipe stored metrics of images that were trained on.
    if not _can_test(job, pinned):
        return {}
    if not stored.exists():
        model = trainer.assemble(job, result)
        seen = trainer.seen_by(model, job)
        predicted, labels_N, _, broken = _predicted(seen, model, pinned, job.feed.test)
        _store_test(job, planned.folder, pinned, predicted, labels_N, broken)
    return metrics_of(json.loads(stored.read_text()))


def _can_test(job: TrainJob, pinned: Pinned) -> bool:
    """Has feed.test images, none of which are trained on?"""
    return bool(pinned.counts[job.feed.test]) and not pinned.common(job.feed.test, job.feed.train)


def _store_test(
    job: TrainJob,
    folder: Path,
    pinned: Pinned,
    predicted: Reference,
    labels_N: np.ndarray,
    broken: int,
) -> None:
    # A copy: labels in Ray's object store are read-only.
    labels = torch.tensor(labels_N)
    scores = torch.from_numpy(predicted.scores_NC)
    metrics = judge(pinned.task, scores, labels)
    # judge names metrics as in validation.
    renamed = {name.replace("val_", "test_"): value for name, value in metrics.items()}
    if len(labels) + broken < pinned.counts[job.feed.test]:
        renamed["test_images"] = len(labels)  # a sample
    if broken:
        renamed["test_broken"] = broken
    write_atomic(folder / TEST, to_json(renamed))


def predict_split(
    job: TrainJob, model: Predictor, pinned: Pinned, split: str
) -> tuple[Reference, np.ndarray]:
    """Features and scores of a split, and the labels of the images they are of.

    Of a split with more images than registry.judged_images, they are of a sample. Broken images are
    left out.
    """
    return _predicted(trainer.seen_by(model, job), model, pinned, split)[:2]


def _predicted(
    job: TrainJob, model: Predictor, pinned: Pinned, split: str, described: str = ""
) -> tuple[Reference, np.ndarray, np.ndarray, int]:
    """What `predict_split` says, the numbers of the samples among the split's rows, and how many
    could not be read.

    described: BELONGING, the domains and groups of the images too; ALL, how they look, too.
    """
    source = trainer.sources(job, pinned, [split], most=job.registry.judged_images)[split]
    feed = Feed(source, source, source.judged_at_once, job.run.seed)
    frozen = job.model.mode == "frozen"
    predictor = model if frozen else model.for_inference()
    samples, features, scores = [], [], []
    for batch in feed.val():
        inputs = batch.inputs
        if frozen:
            # The inputs are features already: only the head is left to compute.
            assert isinstance(model, ImageModel)
            with torch.inference_mode():
                features_BD = inputs.numpy()
                scores_BC = model.scores(model.head(inputs)).numpy()
        else:
            features_BD, scores_BC = predictor.predict(inputs.numpy())
        samples.append(batch.samples_B)
        features.append(features_BD)
        scores.append(scores_BC)
    samples_N = np.concatenate(samples)
    features_ND = np.concatenate(features)
    scores_NC = np.concatenate(scores)
    require_rows(scores_NC, "scores", "Train again with a lower train.lr")
    rows = fetch(source.rows)
    broken = len(rows) - len(samples_N)
    # Images are read without the footer, which ids need: no file is asked for it again.
    rows = replace(rows, fragments=pinned.columns.with_footers(rows.fragments))
    # A package keeps ids as text: a null one is blank, and not the name "None".
    ids = tuple(image_id or "" for image_id in rows.ids_of(samples_N))
    labels_N = rows.labels(samples_N)
    if not described:
        return Reference(features_ND, scores_NC, ids), labels_N, samples_N, broken
    if frozen:
        # Features come without the places of their images. The samples are the same.
        rows = locate(pinned, split, job.feed).sampled(job.registry.judged_images)
    domains, groups = belonging.names(job.registry, pinned, rows, samples_N)
    if described == BELONGING:
        known = Reference(features_ND, scores_NC, ids, None, domains, groups)
        return known, labels_N, samples_N, broken
    looks_NK = looked_at.looks(rows, samples_N, job.model.pixels, job.feed.cpu_threads)
    described_too = Reference(features_ND, scores_NC, ids, looks_NK, domains, groups)
    return described_too, labels_N, samples_N, broken
