"""A model as shapes alone, on torch's `meta` device.

It runs forward and backward, but has no values and takes no memory.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are shapes on `meta`; what it caches is its own."""
    # deepcopy takes these in place of the tensors with these ids.
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        memo[id(parameter)] = on_meta
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)
