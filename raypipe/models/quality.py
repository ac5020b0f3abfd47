"""How good a model is on some images: what a model card and an evaluation both say.

Letters in names: N images, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.models import calibrate, metrics
from raypipe.models.calibrate import Calibration
from raypipe.models.metrics import ClassMetrics
from raypipe.models.tasks import NUMERIC, Task


@dataclass(frozen=True)
class Quality:
    """The metrics of a task, and the numbers behind its charts."""

    task: Task
    images: int
    metrics: dict[str, float]
    classes: tuple[ClassMetrics, ...]
    """() for numbers."""

    confusion_CC: np.ndarray | None
    """Rows are labels, columns predictions. None for several tags and for numbers."""

    calibration: Calibration | None
    """None for a regression, whose scores are no probabilities."""

    numbers: tuple[np.ndarray, np.ndarray] | None
    """(labels, predictions), float64, of the tasks that predict a number."""


def quality(
    task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray, overall: dict[str, float]
) -> Quality:
    """Everything but `overall`, the metrics of all images, from scores and targets.

    targets_NC: as Task.targets gives them. Raises ValueError without images.
    """
    # Only of one label an image: tags are not confused with each other.
    confusion_CC = None
    if task.kind == "single_label":
        confusion_CC = metrics.confusion(scores_NC, targets_NC)
    calibration = None
    if task.kind != "regression":
        calibration = calibrate.calibration(task.kind, scores_NC, targets_NC)
    numbers = None
    if task.kind in NUMERIC:
        labels_N = targets_NC[:, 0].astype(np.float64)
        numbers = (labels_N, scores_NC[:, 0].astype(np.float64))
    return Quality(
        task=task,
        images=len(scores_NC),
        metrics=overall,
        classes=metrics.by_class(task, scores_NC, targets_NC),
        confusion_CC=confusion_CC,
        calibration=calibration,
        numbers=numbers,
    )
