"""How good predictions are, class by class. The numbers of a model card and an evaluation.

Letters in names: N images, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.models.tasks import NUMERIC, Task


@dataclass(frozen=True)
class ClassMetrics:
    """One class or tag. A share without images to take it of is None."""

    name: str
    images: int
    """That have it as their label."""

    precision: float | None
    """Of the images predicted as it: the share that have it."""

    recall: float | None
    """Of the images that have it: the share predicted as it."""

    f1: float | None
    """The harmonic mean of both."""


def overall(task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray) -> dict[str, float]:
    """The task's metrics over all images, as a training names them without `val_`.

    Classes: accuracy, and balanced_accuracy (the mean recall of the classes that occur). Tags:
    accuracy (all tags of an image right) and f1 (the mean over tags). Numbers: mae and rmse in the
    labels' unit, and r2, which is NaN where all labels are equal; for the task probability also
    accuracy (score and label on the same side of 0.5). Raises ValueError without images.
    """
    if not len(scores_NC):
        raise ValueError("metrics are of images, and there are none")
    if task.kind in NUMERIC:
        errors = _of_numbers(scores_NC[:, 0], targets_NC[:, 0])
        if task.kind == "regression":
            return errors
        same_side_NC = (scores_NC >= 0.5) == (targets_NC >= 0.5)
        return errors | {"accuracy": float(same_side_NC.mean())}
    predicted_NC = decided(task, scores_NC)
    true_NC = targets_NC >= 0.5
    # An image is right if all of it is: its class, or every one of its tags.
    right_N = (predicted_NC == true_NC).all(1)
    accuracy = float(right_N.mean())
    if task.kind == "multi_label":
        # As in training: a tag that no image has and none is predicted to have counts as 0.
        f1_C = [m.f1 or 0.0 for m in by_class(task, scores_NC, targets_NC)]
        return {"accuracy": accuracy, "f1": float(np.mean(f1_C))}
    # A class without images has no recall.
    classes = by_class(task, scores_NC, targets_NC)
    recalls = [m.recall for m in classes if m.recall is not None]
    return {"accuracy": accuracy, "balanced_accuracy": float(np.mean(recalls))}


def _of_numbers(predicted_N: np.ndarray, true_N: np.ndarray) -> dict[str, float]:
    # In float64: sums of squares of large labels lose digits in float32.
    labels_N = true_N.astype(np.float64)
    error_N = predicted_N.astype(np.float64) - labels_N
    squares = float((error_N**2).sum())
    deviation_N = labels_N - labels_N.mean()
    spread = float((deviation_N**2).sum())
    return {
        "mae": float(np.abs(error_N).mean()),
        "rmse": float(np.sqrt(squares / len(error_N))),
        "r2": 1 - squares / spread if spread else float("nan"),
    }


def by_class(task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray) -> tuple[ClassMetrics, ...]:
    """The metrics of every class, in the task's order; () for numbers.

    scores_NC, targets_NC: as the package and Task.targets give them.
    """
    if task.kind in NUMERIC:
        return ()
    predicted_NC = decided(task, scores_NC)
    true_NC = targets_NC >= 0.5
    found = []
    for c, name in enumerate(task.classes):
        # Images that are predicted as it, that are it, and both.
        predicted = int(predicted_NC[:, c].sum())
        true = int(true_NC[:, c].sum())
        both = int((predicted_NC[:, c] & true_NC[:, c]).sum())
        metrics = ClassMetrics(
            name=name,
            images=true,
            precision=_share(both, predicted),
            recall=_share(both, true),
            f1=_share(2 * both, predicted + true),
        )
        found.append(metrics)
    return tuple(found)


def decided(task: Task, scores_NC: np.ndarray) -> np.ndarray:
    """Which classes are predicted, bool NC: the likeliest one, or all tags from 0.5 up."""
    if task.kind == "multi_label":
        return scores_NC >= 0.5
    predicted_NC = np.zeros(scores_NC.shape, bool)
    predicted_NC[np.arange(len(scores_NC)), scores_NC.argmax(1)] = True
    return predicted_NC


def confusion(scores_NC: np.ndarray, targets_NC: np.ndarray) -> np.ndarray:
    """counts_CC of one-label predictions: row = label, column = predicted class. A label that is
    none of the classes, a target of zeros, has no row."""
    classes = scores_NC.shape[1]
    counts_CC = np.zeros((classes, classes), np.int64)
    has_N = targets_NC.any(1)
    np.add.at(counts_CC, (targets_NC[has_N].argmax(1), scores_NC[has_N].argmax(1)), 1)
    return counts_CC


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
