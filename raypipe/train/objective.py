"""What a run minimises and how it is judged: the loss of its task, and metrics that are exact over any number of ranks.

Metrics are made of sums: each batch adds one float64 vector, ranks add theirs, only then is anything divided. So they do not
depend on how validation was cut into batches and ranks. val_loss is the plain loss, without weights, smoothing and focus: it
compares runs that were trained with different ones.

single_label   val_accuracy, val_balanced_accuracy
multi_label    val_accuracy (every tag of the image right), val_f1 (mean over tags of 2tp / (2tp + fp + fn))
probability, regression    val_mae, val_rmse (unit of the label), val_r2 (share of the variance that is explained)
probability    also val_accuracy (score and label on the same side of 0.5, which itself belongs to the upper)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypipe.errors import ConfigError
from raypipe.models.finite import require_rows
from raypipe.models.tasks import Kind, Task
from raypipe.train.losses import (
    ClassWeights,
    class_weights,
    sigmoid_loss,
    softmax_loss,
    squared_loss,
)

METRICS: dict[Kind, tuple[str, ...]] = {
    "single_label": ("val_loss", "val_accuracy", "val_balanced_accuracy"),
    "multi_label": ("val_loss", "val_accuracy", "val_f1"),
    "probability": ("val_loss", "val_mae", "val_rmse", "val_r2", "val_accuracy"),
    "regression": ("val_loss", "val_mae", "val_rmse", "val_r2"),
}


@dataclass(frozen=True)
class Objective:
    """The loss of a task and its metrics. `weights_C` weigh classes; mean and spread are those of the training labels."""

    task: Task
    weights_C: Tensor
    mean: float = 0.0
    spread: float = 1.0
    smoothing: float = 0.0
    gamma: float = 0.0

    @classmethod
    def of(
        cls,
        task: Task,
        labels_N: np.ndarray,
        weights: ClassWeights = None,
        smoothing: float = 0.0,
        gamma: float = 0.0,
    ) -> Objective:
        """The objective of a training set: all its labels, the same on every rank."""
        check(task.kind, weights, smoothing, gamma)
        weights_C = class_weights(weights, task.classes, labels_N)
        if task.kind != "regression":
            return cls(task, weights_C, 0.0, 1.0, smoothing, gamma)
        values_N = labels_N.astype(np.float64)
        return cls(task, weights_C, float(values_N.mean()), float(values_N.std()) or 1.0)

    def to(self, device: torch.device) -> Objective:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Objective(**values | {"weights_C": self.weights_C.to(device)})

    def loss(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        """The mean over the batch of what is minimised."""
        return self._losses(
            logits_BC, targets_BC, self.weights_C, self.smoothing, self.gamma
        ).mean()

    def totals(self, logits_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Sums over a batch, float64: the loss, the images, and what the task counts. Zeros if it is empty."""
        targets_BC = self.task.targets(labels_B)
        losses_B = self._losses(logits_BC, targets_BC, torch.ones_like(self.weights_C), 0.0, 0.0)
        losses_B = torch.where(
            logits_BC.isfinite().all(1), losses_B, torch.nan
        )  # whatever the loss made of such a logit
        images_B = torch.ones_like(losses_B)
        counted = _COUNTED[self.task.kind](self.task.scores(logits_BC), targets_BC, self.mean)
        return torch.cat(
            [part.double().sum(0).reshape(-1) for part in (losses_B, images_B, *counted)]
        )

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The metrics of the sums over a whole split; all NaN if a logit or a loss was not finite. What is counted would look
        like an accuracy: argmax of NaN is class 0."""
        loss, images, *counted = totals.tolist()
        if not math.isfinite(loss):
            return dict.fromkeys(METRICS[self.task.kind], math.nan) | {"val_loss": loss / images}
        return {"val_loss": loss / images, **_DIVIDED[self.task.kind](images, np.array(counted))}

    def _losses(
        self,
        logits_BC: Tensor,
        targets_BC: Tensor,
        weights_C: Tensor,
        smoothing: float,
        gamma: float,
    ) -> Tensor:
        if self.task.kind == "regression":
            return squared_loss(logits_BC, targets_BC, self.spread)
        function = softmax_loss if self.task.kind == "single_label" else sigmoid_loss
        return function(logits_BC, targets_BC, weights_C, smoothing, gamma)


def judge(task: Task, scores_NC: Tensor, labels_N: Tensor) -> dict[str, float]:
    """The task's metrics of finished predictions, without the loss; names as in validation. Raises DataError for scores that
    are not finite."""
    require_rows(scores_NC.numpy(), "scores", "Train again with a lower train.lr")
    targets_NC = task.targets(labels_N)
    counted = _COUNTED[task.kind](scores_NC, targets_NC, float(targets_NC.mean()))
    sums = torch.cat([part.double().sum(0).reshape(-1) for part in counted])
    return _DIVIDED[task.kind](len(scores_NC), sums.numpy())


def check(kind: Kind, weights: ClassWeights, smoothing: float, gamma: float) -> None:
    """Raise ConfigError for a setting that this task has no use for."""
    numeric, squared = kind in ("probability", "regression"), kind == "regression"
    for name, unused in (
        ("class_weights", weights is not None and numeric),
        ("label_smoothing", smoothing > 0 and numeric),
        ("focal_gamma", gamma > 0 and squared),
    ):
        if unused:
            raise ConfigError(
                f"train.{name} says nothing to model.task={kind}",
                rule="It has no classes",
                fix="Remove it",
            )


def _count_classes(scores_BC: Tensor, targets_BC: Tensor, mean: float) -> tuple[Tensor, ...]:
    hit_B1 = (scores_BC.argmax(1) == targets_BC.argmax(1)).unsqueeze(1)
    return targets_BC, targets_BC * hit_B1


def _divide_classes(images: float, counted: np.ndarray) -> dict[str, float]:
    images_C, hits_C = np.split(counted, 2)
    there_C = images_C > 0
    recall = (hits_C[there_C] / images_C[there_C]).mean()
    return {"val_accuracy": float(hits_C.sum() / images), "val_balanced_accuracy": float(recall)}


def _count_tags(scores_BC: Tensor, targets_BC: Tensor, mean: float) -> tuple[Tensor, ...]:
    said_BC, true_BC = scores_BC >= 0.5, targets_BC >= 0.5
    return (said_BC == true_BC).all(1), said_BC & true_BC, said_BC ^ true_BC


def _divide_tags(images: float, counted: np.ndarray) -> dict[str, float]:
    found_C, wrong_C = np.split(counted[1:], 2)
    f1_C = (
        2 * found_C / np.maximum(2 * found_C + wrong_C, 1)
    )  # a tag that nobody set or said counts 0
    return {"val_accuracy": float(counted[0] / images), "val_f1": float(f1_C.mean())}


def _count_errors(scores_B1: Tensor, targets_B1: Tensor, mean: float) -> tuple[Tensor, ...]:
    errors_B1, away_B1 = (
        scores_B1.double() - targets_B1,
        targets_B1.double() - mean,
    )  # about the mean: nothing cancels
    return errors_B1.abs(), errors_B1.square(), away_B1, away_B1.square()


def _divide_errors(images: float, counted: np.ndarray) -> dict[str, float]:
    absolute, squared, away, away_squared = counted.tolist()
    variation = away_squared - away**2 / images
    r2 = 1 - squared / variation if variation > 0 else float("nan")
    return {"val_mae": absolute / images, "val_rmse": (squared / images) ** 0.5, "val_r2": r2}


def _count_probabilities(scores_B1: Tensor, targets_B1: Tensor, mean: float) -> tuple[Tensor, ...]:
    return *_count_errors(scores_B1, targets_B1, mean), (scores_B1 >= 0.5) == (targets_B1 >= 0.5)


def _divide_probabilities(images: float, counted: np.ndarray) -> dict[str, float]:
    return _divide_errors(images, counted[:-1]) | {"val_accuracy": float(counted[-1] / images)}


_COUNTED = {
    "single_label": _count_classes,
    "multi_label": _count_tags,
    "probability": _count_probabilities,
    "regression": _count_errors,
}
_DIVIDED = {
    "single_label": _divide_classes,
    "multi_label": _divide_tags,
    "probability": _divide_probabilities,
    "regression": _divide_errors,
}
