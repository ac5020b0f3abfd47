"""Refuses NaN and infinities in weights, features and scores.

A model of NaN looks healthy from outside: argmax of NaN is 0, so its accuracy is the share of the
first class and never NaN. So all code that writes, loads, averages or predicts with weights calls
these checks, and does not rely on a metric.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raypipe.errors import DataError


def first_bad(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or an infinity; None where all are finite."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            return name
    return None


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def require_weights(weights: Mapping[str, Tensor], where: str, fix: str) -> None:
    """Raise DataError if weights are not finite; the message names the tensor.

    where: what the weights belong to. fix: what the user can do.
    """
    name = first_bad(weights)
    if name is not None:
        raise DataError(
            f"Weights are not finite: {name} holds NaN or infinity",
            got=where,
            rule="The training that made them diverged, "
            "and such a model predicts one class whatever it sees",
            fix=fix,
        )


def require_rows(values_N: np.ndarray, what: str, fix: str) -> None:
    """Raise DataError if a row of features or scores is not finite.

    what: "scores" or "features". fix: what the user can do.
    """
    if not len(values_N):
        return
    rows_ND = values_N.reshape(len(values_N), -1)
    good_N = np.isfinite(rows_ND).all(1)
    if not good_N.all():
        bad = int((~good_N).sum())
        raise DataError(
            f"A model gave {what} that are not finite",
            got=f"{bad} of {len(good_N)} images",
            rule="NaN has no class: argmax would call it the first one",
            fix=fix,
        )
