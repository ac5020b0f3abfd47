"""A rank's share of model and optimizer, as pieces of whole tensors.

Every strategy saves this way, and loads what any other has saved. A piece says where its elements
belong in the flattened whole, so the pieces of any number of ranks make one tensor again, at any
world size. A snapshot needs no other rank: a rank that died or hangs cannot stop the others from
saving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of `shape`: its flattened elements from `start` on.

    `values` is a copy on the CPU. It is flat, but a piece that is all of its tensor has its shape.
    """

    values: Tensor
    start: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(_copy(tensor), 0, tuple(tensor.shape))

    @classmethod
    def part(cls, flat: Tensor, start: int, shape: tuple[int, ...]) -> Piece:
        """From a rank's flat share. Elements beyond the tensor's end are padding and left out."""
        size = prod(shape)
        values = _copy(flat[: max(0, size - start)])
        return cls(values.view(shape) if len(values) == size else values, start, shape)


@dataclass(frozen=True)
class Snapshot:
    """One rank's share.

    weights: used for prediction (the mean, under EMA), by names of the state dict.
    optimizer: exp_avg/NAME, exp_avg_sq/NAME, step/NAME and, under EMA, trained/NAME.
    facts: a few numbers, as JSON.
    """

    weights: dict[str, Piece] = field(default_factory=dict)
    optimizer: dict[str, Piece] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def cut(whole: Tensor, start: int, size: int) -> Tensor:
    """`size` elements of the flattened tensor from `start` on, with zeros beyond its end."""
    share = torch.zeros(size, dtype=whole.dtype)
    part = whole.flatten()[start : start + size]
    share[: len(part)] = part
    return share


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
