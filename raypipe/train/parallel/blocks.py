"""The blocks that a model repeats: transformer layers, bottlenecks.

FSDP gathers one block at a time. Activation checkpointing keeps the input of each block and
computes its inside again in the backward pass (Chen et al. 2016): about a third more compute, for
activations of one block instead of all.
"""

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
    """The innermost composite modules that a container repeats; empty if nothing repeats.

    A container repeats a module if it holds several of the same class.
    """
    repeated: list[nn.Module] = []
    for container in model.modules():
        if not isinstance(container, CONTAINERS):
            continue
        composite = [m for m in container.children() if _is_composite(m)]
        counts = Counter(type(m) for m in composite)
        for module in composite:
            if counts[type(module)] > 1:
                repeated.append(module)
    # Of nested blocks, the innermost.
    return [m for m in repeated if not _holds_any(m, repeated)]


def _is_composite(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and next(module.children(), None) is not None


def _holds_any(module: nn.Module, others: list[nn.Module]) -> bool:
    """Does one of `others` lie inside `module`?"""
    inside = list(module.modules())[1:]
    return any(m in others for m in inside)


def checkpoint_activations(model: nn.Module, reentrant: bool = False) -> None:
    """Let each block recompute its activations, in place; the whole model if nothing repeats.

    Names in the state dict stay.
    """
    for block in blocks(model) or [model]:
        if reentrant:
            block.forward = partial(_reentrant, block, block.forward)  # type: ignore[method-assign]
        else:
            block.forward = partial(  # type: ignore[method-assign]
                checkpoint,
                block.forward,
                use_reentrant=False,
                context_fn=partial(_contexts, block),
            )


def _reentrant(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Run the block without gradients now, and again with gradients in the backward pass.

    Reentrant checkpointing gives a block's parameters no gradients if no input needs one, as above
    frozen blocks. Such a block is run without checkpointing.
    """
    needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if not torch.is_grad_enabled() or not needs_grad:
        return forward(*inputs, **named)

    def run(*inputs: Any) -> Any:
        # Gradients are enabled in the second run only.
        with _fixed_statistics(block) if torch.is_grad_enabled() else nullcontext():
            return forward(*inputs, **named)

    return checkpoint(run, *inputs, use_reentrant=True)


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first run and of the second."""
    return nullcontext(), _fixed_statistics(block)


@contextmanager
def _fixed_statistics(block: nn.Module) -> Iterator[None]:
    """Keep running statistics as they are: the second run must not count its batch again."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        # While training, such a norm normalises by the batch and updates nothing.
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
