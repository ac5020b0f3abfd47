"""Where a model is cut: the blocks it repeats (transformer layers, bottlenecks). FSDP gathers one at a time, activation
checkpointing keeps the input of each and computes the rest again in the backward pass (Chen et al. 2016): about a third more
compute for the memory of one block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The innermost modules of more than one layer that a container of the model repeats; none where nothing repeats."""
    found: list[nn.Module] = []
    for container in (m for m in model.modules() if isinstance(m, CONTAINERS)):
        layered = [
            m
            for m in container.children()
            if not isinstance(m, CONTAINERS) and any(True for _ in m.children())
        ]
        times = Counter(type(m) for m in layered)
        found += [m for m in layered if times[type(m)] > 1]
    outer = {id(m) for m in found if any(inner in found for inner in list(m.modules())[1:])}
    return [m for m in found if id(m) not in outer]


def checkpoint_activations(model: nn.Module, reentrant: bool = False) -> None:
    """Let each block, or the whole model where nothing repeats, forget its activations. Names in the state dict stay."""
    for block in blocks(model) or [model]:
        if reentrant:
            block.forward = partial(_reentrant, block, block.forward)  # type: ignore[method-assign]
        else:
            again = partial(_contexts, block)
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=again
            )  # type: ignore[method-assign]


def _reentrant(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Checkpointing that runs the block without gradients, and again with them in the backward pass.

    Of inputs that need no gradient (above frozen blocks) it would give the block's own parameters none: there it is left out.
    """
    if not torch.is_grad_enabled() or not any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    ):
        return forward(*inputs, **named)

    def run(*inputs: Any) -> Any:
        with _statistics_kept(block) if torch.is_grad_enabled() else nullcontext():
            return forward(*inputs, **named)

    return checkpoint(run, *inputs, use_reentrant=True)


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """The second forward pass must not count its batch into the running statistics again."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False  # in training: normalise by the batch, update nothing
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
