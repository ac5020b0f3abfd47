"""A model as shapes alone, on torch's `meta` device: it can be run forward and backward, and has no values and no memory."""

from __future__ import annotations

import copy

from torch import Tensor, nn


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are shapes on `meta`; what it caches is its own."""
    memo: dict[int, Tensor] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo | {id(b): b.to("meta") for b in model.buffers()})
