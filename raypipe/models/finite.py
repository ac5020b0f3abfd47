"""Is every number a number? NaN and infinities in weights, features and scores, found at every door.

A model of NaN looks healthy from outside: argmax of NaN is 0, so its accuracy is the share of the first class and never NaN.
Whoever writes, loads, averages or predicts with weights therefore asks here and does not trust a metric.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raypipe.errors import DataError


def first_bad(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or an infinity."""
    return next((name for name, t in tensors.items() if not is_finite(t)), None)


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def require_weights(weights: Mapping[str, Tensor], where: str, fix: str) -> None:
    """Raise DataError, naming the tensor, if weights are not finite. `where` they lie, `fix`: the way out."""
    if (name := first_bad(weights)) is not None:
        raise DataError(
            f"Weights are not finite: {name} holds NaN or infinity",
            got=where,
            rule="The training that made them diverged, and such a model predicts one class whatever it sees",
            fix=fix,
        )


def require_rows(values_N: np.ndarray, what: str, fix: str) -> None:
    """Raise DataError if a row of features or scores is not finite. `what`: "scores" or "features"."""
    if not len(values_N):
        return
    good_N = np.isfinite(values_N.reshape(len(values_N), -1)).all(1)
    if not good_N.all():
        raise DataError(
            f"A model gave {what} that are not finite",
            got=f"{int((~good_N).sum())} of {len(good_N)} images",
            rule="NaN has no class: argmax would call it the first one",
            fix=fix,
        )
