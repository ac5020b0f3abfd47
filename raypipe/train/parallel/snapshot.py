"""What a rank keeps of model and optimizer, as pieces of whole tensors: how every strategy saves, and what each can load.

A piece says where its elements belong in the flattened whole, so pieces of any number of ranks make one tensor again, and what
one strategy saved another takes up at any world size. Taking a snapshot asks no other rank for anything: a rank that died or
hangs cannot keep the others from saving.
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
    """`values`, a copy on the CPU, are the elements from `start` on of a tensor of this `shape`, flattened.

    A piece that is all of its tensor keeps its shape.
    """

    values: Tensor
    start: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(_copy(tensor), 0, tuple(tensor.shape))

    @classmethod
    def part(cls, flat: Tensor, start: int, shape: tuple[int, ...]) -> Piece:
        """Of a flat share; what lies beyond the tensor's end is padding and left out."""
        values = _copy(flat[: max(0, prod(shape) - start)])
        return cls(values.view(shape) if len(values) == prod(shape) else values, start, shape)


@dataclass(frozen=True)
class Snapshot:
    """One rank's share. `weights` are what predicts (the mean, under EMA), by the names of the state dict; `optimizer` holds
    exp_avg/NAME, exp_avg_sq/NAME, step/NAME and, under EMA, trained/NAME; `facts` the few numbers beside (JSON)."""

    weights: dict[str, Piece] = field(default_factory=dict)
    optimizer: dict[str, Piece] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def cut(whole: Tensor, start: int, size: int) -> Tensor:
    """The `size` elements from `start` on, flat; zeros beyond the end."""
    mine = torch.zeros(size, dtype=whole.dtype)
    part = whole.flatten()[start : start + size]
    mine[: len(part)] = part
    return mine


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
