"""How good scores are, for those who judge thousands of means: by a metric, and by the loss.

The metrics are those of validation (train/objective.py), without tensors: `judge` there takes ten
times as long. NaN as a metric says that these labels cannot tell models apart by it.

Pure. Letters in names: N images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypipe.models.tasks import Kind, Task
from raypipe.train.stopping import Mode

_SMALLEST = 1e-12  # a score in a logarithm

Quality = tuple[float, float]
"""(the metric, minus the loss): the larger is the better one."""

Measure = Callable[[np.ndarray, np.ndarray], float]
"""(scores_NC, labels_N) -> a metric."""


@dataclass(frozen=True)
class Judge:
    """Judges scores by `metric`, where larger is better, and by the loss of a kind of task."""

    kind: Kind
    metric: Measure

    def __call__(self, scores_NC: np.ndarray, labels_N: np.ndarray) -> Quality:
        read = self.read(scores_NC, labels_N)
        return self.metric(scores_NC, labels_N), -self.loss(read, labels_N)

    def read(self, scores_NC: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
        """What the loss reads of scores: of single labels those of each image's own class, (N,)."""
        if self.kind == "single_label":
            own_N: np.ndarray = scores_NC[np.arange(len(labels_N)), labels_N]
            return own_N
        return scores_NC

    def loss(self, read: np.ndarray, labels_N: np.ndarray) -> float:
        """The mean loss of what was read: cross-entropy, or for a regression the squared error."""
        if self.kind == "single_label":
            return -float(np.log(np.maximum(read, _SMALLEST)).mean())
        if self.kind == "regression":
            return float(np.square(read - labels_N).mean())
        if self.kind == "multi_label":
            # Of a tag one of the two terms below is 0.
            right_NC = np.where(labels_N >= 0.5, read, 1 - read)
            return -float(np.log(np.maximum(right_NC, _SMALLEST)).mean())
        log_p_NC = np.log(np.maximum(read, _SMALLEST))
        log_not_p_NC = np.log(np.maximum(1 - read, _SMALLEST))
        return -float((labels_N * log_p_NC + (1 - labels_N) * log_not_p_NC).mean())


def judge_by(task: Task, metric: str, mode: Mode) -> Judge:
    """The judge by a metric of the task: val_accuracy, val_loss, …"""
    sign = 1.0 if mode == "max" else -1.0
    if metric == "val_loss":
        plain = Judge(task.kind, _nothing)

        def by_loss(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
            return sign * plain.loss(plain.read(scores_NC, labels_N), labels_N)

        return Judge(task.kind, by_loss)
    measure = _MEASURES[task.kind][metric]

    def signed(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
        return sign * measure(scores_NC, labels_N)

    return Judge(task.kind, signed)


def _nothing(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
    return np.nan


def _are_alike(labels_N: np.ndarray) -> bool:
    return bool((labels_N == labels_N[:1]).all())


def _accuracy(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
    # It counts image by image, so any labels say something.
    return float((scores_NC.argmax(1) == labels_N).mean())


def _balanced_accuracy(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
    """The mean recall of the classes that occur. Of one class it would praise whoever says no
    other."""
    if _are_alike(labels_N):
        return np.nan
    classes = scores_NC.shape[1]
    images_C = np.bincount(labels_N, minlength=classes)
    right_C = np.bincount(labels_N[scores_NC.argmax(1) == labels_N], minlength=classes)
    present_C = images_C > 0
    return float((right_C[present_C] / images_C[present_C]).mean())


def _accuracy_of_tags(scores_NC: np.ndarray, labels_NC: np.ndarray) -> float:
    return float(((scores_NC >= 0.5) == (labels_NC >= 0.5)).all(1).mean())


def _f1(scores_NC: np.ndarray, labels_NC: np.ndarray) -> float:
    """The mean over tags of 2tp / (2tp + fp + fn). Where all images have the same tags it would
    praise whoever always says these."""
    if _are_alike(labels_NC):
        return np.nan
    predicted_NC, true_NC = scores_NC >= 0.5, labels_NC >= 0.5
    both_C = np.count_nonzero(predicted_NC & true_NC, axis=0)
    wrong_C = np.count_nonzero(predicted_NC ^ true_NC, axis=0)
    return float((2 * both_C / np.maximum(2 * both_C + wrong_C, 1)).mean())


def _mae(scores_N1: np.ndarray, labels_N1: np.ndarray) -> float:
    return float(np.abs(scores_N1.astype(np.float64) - labels_N1).mean())


def _rmse(scores_N1: np.ndarray, labels_N1: np.ndarray) -> float:
    return float(np.square(scores_N1.astype(np.float64) - labels_N1).mean() ** 0.5)


def _r2(scores_N1: np.ndarray, labels_N1: np.ndarray) -> float:
    """The share of the labels' variance that is explained; labels that are all alike have none."""
    if _are_alike(labels_N1):
        return np.nan
    true_N1 = labels_N1.astype(np.float64)
    variance = np.square(true_N1 - true_N1.mean()).mean()
    return float(1 - np.square(scores_N1.astype(np.float64) - true_N1).mean() / variance)


_NUMBERS: dict[str, Measure] = {"val_mae": _mae, "val_rmse": _rmse, "val_r2": _r2}
_MEASURES: dict[Kind, dict[str, Measure]] = {
    "single_label": {"val_accuracy": _accuracy, "val_balanced_accuracy": _balanced_accuracy},
    "multi_label": {"val_accuracy": _accuracy_of_tags, "val_f1": _f1},
    "probability": {
        **_NUMBERS,
        "val_accuracy": lambda scores_N1, labels_N1: float(
            ((scores_N1 >= 0.5) == (labels_N1 >= 0.5)).mean()
        ),
    },
    "regression": _NUMBERS,
}
