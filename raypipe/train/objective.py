"""What a run minimises, and how it is judged: the loss and the metrics of its task.

Metrics are quotients of sums. Each batch adds one float64 vector, ranks add theirs, and only then
are the sums divided. So metrics are exact, however validation is cut into batches and ranks.
val_loss is the loss without class weights, smoothing and focal factor: so it compares runs that
were trained with different ones.

single_label   val_accuracy, val_balanced_accuracy
multi_label    val_accuracy (every tag of the image right), val_f1 (mean over tags of 2tp / (2tp +
               fp + fn))
probability, regression    val_mae, val_rmse (unit of the label), val_r2 (share of the variance
                           that is explained)
probability    also val_accuracy (score and label on the same side of 0.5; 0.5 is on the upper side)

Each task has a function that counts a batch, and one that divides the sums. Both work on the same
parts in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
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

ROUNDING = 1e-10  # of a sum of squares
METRICS: dict[Kind, tuple[str, ...]] = {
    "single_label": ("val_loss", "val_accuracy", "val_balanced_accuracy"),
    "multi_label": ("val_loss", "val_accuracy", "val_f1"),
    "probability": ("val_loss", "val_mae", "val_rmse", "val_r2", "val_accuracy"),
    "regression": ("val_loss", "val_mae", "val_rmse", "val_r2"),
}


@dataclass(frozen=True)
class Objective:
    """The loss of a task, and its metrics."""

    task: Task
    weights_C: Tensor
    """Weights of the classes."""
    mean: float = 0.0
    """Of the training labels; regression only."""
    spread: float = 1.0
    """Standard deviation of the training labels; regression only."""
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
        """The objective of a training set. labels_N: all its labels, the same on every rank."""
        check(task.kind, weights, smoothing, gamma)
        weights_C = class_weights(weights, task.classes, labels_N)
        if task.kind != "regression":
            return cls(task, weights_C, smoothing=smoothing, gamma=gamma)
        # Regression is judged in units of the labels' spread.
        values_N = labels_N.astype(np.float64)
        mean = float(values_N.mean())
        spread = float(values_N.std())
        # Labels that are all equal have no spread: divide by 1.
        return cls(task, weights_C, mean, spread or 1.0)

    def to(self, device: torch.device) -> Objective:
        return dataclasses.replace(self, weights_C=self.weights_C.to(device))

    def loss(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        """The mean loss of a batch, which training minimises."""
        return self.losses(logits_BC, targets_BC).mean()

    def losses(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        """losses_B: of each image, as training counts them."""
        return self._losses(logits_BC, targets_BC, self.weights_C, self.smoothing, self.gamma)

    def totals(self, logits_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Sums over a batch, float64: the loss, the images, and the task's counts.

        An empty batch gives zeros.
        """
        targets_BC = self.task.targets(labels_B)
        # The plain loss: without class weights, smoothing and focal factor.
        equal_C = torch.ones_like(self.weights_C)
        losses_B = self._losses(logits_BC, targets_BC, equal_C, smoothing=0.0, gamma=0.0)
        # A logit that is not finite must show, whatever the loss makes of it.
        losses_B = torch.where(logits_BC.isfinite().all(1), losses_B, torch.nan)
        images_B = torch.ones_like(losses_B)
        scores_BC = self.task.scores(logits_BC)
        counts = _COUNT[self.task.kind](scores_BC, targets_BC, self.mean)
        return _summed((losses_B, images_B, *counts))

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The metrics of the totals of a whole split; all NaN if a logit or a loss was not finite.

        The counts alone would look like an accuracy: argmax of NaN is class 0.
        """
        kind = self.task.kind
        loss, images, *counts = totals.tolist()
        val_loss = {"val_loss": loss / images}
        if not math.isfinite(loss):
            nothing = dict.fromkeys(METRICS[kind], math.nan)
            return nothing | val_loss
        return val_loss | _DIVIDE[kind](images, np.array(counts))

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
        loss = softmax_loss if self.task.kind == "single_label" else sigmoid_loss
        return loss(logits_BC, targets_BC, weights_C, smoothing, gamma)


def judge(task: Task, scores_NC: Tensor, labels_N: Tensor) -> dict[str, float]:
    """The task's metrics of finished predictions, without the loss; names as in validation.

    Raises DataError for scores that are not finite.
    """
    require_rows(scores_NC.numpy(), "scores", "Train again with a lower train.lr")
    targets_NC = task.targets(labels_N)
    # Only val_r2 needs a mean, and any near the labels' mean gives the same value.
    mean = float(targets_NC.mean())
    counts = _COUNT[task.kind](scores_NC, targets_NC, mean)
    sums = _summed(counts).numpy()
    return _DIVIDE[task.kind](len(scores_NC), sums)


def check(kind: Kind, weights: ClassWeights, smoothing: float, gamma: float) -> None:
    """Raise ConfigError for a setting that this task does not use."""
    # Tasks without classes have nothing to weigh or to smooth; a squared error has no probability
    # that the focal factor could use.
    unused = []
    if kind in ("probability", "regression"):
        if weights is not None:
            unused.append("class_weights")
        if smoothing > 0:
            unused.append("label_smoothing")
    if kind == "regression" and gamma > 0:
        unused.append("focal_gamma")
    if unused:
        raise ConfigError(
            f"train.{unused[0]} does not apply to model.task={kind}",
            rule="It has no classes",
            fix="Remove it",
        )


def _summed(parts: Iterable[Tensor]) -> Tensor:
    """The sums of all parts over the images, in one float64 vector."""
    return torch.cat([part.double().sum(0).reshape(-1) for part in parts])


def _count_classes(scores_BC: Tensor, targets_BC: Tensor, mean: float) -> tuple[Tensor, ...]:
    """Per class: images, and images that are predicted right."""
    right_B = scores_BC.argmax(1) == targets_BC.argmax(1)
    return targets_BC, targets_BC * right_B.unsqueeze(1)


def _divide_classes(images: float, counts: np.ndarray) -> dict[str, float]:
    images_C, right_C = np.split(counts, 2)
    # Classes without images have no recall.
    present_C = images_C > 0
    recall_C = right_C[present_C] / images_C[present_C]
    return {
        "val_accuracy": float(right_C.sum() / images),
        "val_balanced_accuracy": float(recall_C.mean()),
    }


def _count_tags(scores_BC: Tensor, targets_BC: Tensor, mean: float) -> tuple[Tensor, ...]:
    """Images with all tags right; per tag: true positives, and errors of both kinds."""
    predicted_BC = scores_BC >= 0.5
    true_BC = targets_BC >= 0.5
    all_right_B = (predicted_BC == true_BC).all(1)
    return all_right_B, predicted_BC & true_BC, predicted_BC ^ true_BC


def _divide_tags(images: float, counts: np.ndarray) -> dict[str, float]:
    all_right = counts[0]
    true_positives_C, errors_C = np.split(counts[1:], 2)
    # At least 1: a tag that no image has and none is predicted to have gives 0.
    f1_denominators_C = np.maximum(2 * true_positives_C + errors_C, 1)
    f1_C = 2 * true_positives_C / f1_denominators_C
    return {"val_accuracy": float(all_right / images), "val_f1": float(f1_C.mean())}


def _count_errors(scores_B1: Tensor, targets_B1: Tensor, mean: float) -> tuple[Tensor, ...]:
    """Errors, squared errors, and the labels' deviations from `mean` and their squares.

    Deviations from the mean, because sums of the labels themselves would cancel.
    """
    errors_B1 = scores_B1.double() - targets_B1
    deviations_B1 = targets_B1.double() - mean
    return errors_B1.abs(), errors_B1.square(), deviations_B1, deviations_B1.square()


def _divide_errors(images: float, counts: np.ndarray) -> dict[str, float]:
    absolute, squared, deviation, deviation_squared = counts.tolist()
    variation = deviation_squared - deviation**2 / images
    # Labels that are all equal leave nothing to explain. Rounding leaves a trace of a variation,
    # which would make an R2 of -1e15.
    r2 = 1 - squared / variation if variation > ROUNDING * deviation_squared else math.nan
    return {
        "val_mae": absolute / images,
        "val_rmse": (squared / images) ** 0.5,
        "val_r2": r2,
    }


def _count_probabilities(scores_B1: Tensor, targets_B1: Tensor, mean: float) -> tuple[Tensor, ...]:
    same_side_B1 = (scores_B1 >= 0.5) == (targets_B1 >= 0.5)
    return *_count_errors(scores_B1, targets_B1, mean), same_side_B1


def _divide_probabilities(images: float, counts: np.ndarray) -> dict[str, float]:
    *errors, same_side = counts
    metrics = _divide_errors(images, np.array(errors))
    return metrics | {"val_accuracy": float(same_side / images)}


# By task: count a batch, and divide the sums of a whole split.
_COUNT = {
    "single_label": _count_classes,
    "multi_label": _count_tags,
    "probability": _count_probabilities,
    "regression": _count_errors,
}
_DIVIDE = {
    "single_label": _divide_classes,
    "multi_label": _divide_tags,
    "probability": _divide_probabilities,
    "regression": _divide_errors,
}
