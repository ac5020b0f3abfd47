"""Which parameters a training step reaches; computed before a model is wrapped.

DDP waits in every step for the gradient of every parameter with requires_grad. The mask_token of
DINOv2 and DINOv3 never gets one, so the second step fails. Therefore a few passes are tried on
shapes alone (device `meta`: no memory, no values).

- A parameter that no pass reaches is frozen. That changes nothing that is learned.
- A parameter that only some passes reach (in blocks that are skipped at random) stays. DDP then
  looks for such parameters in every step; strategies that shard whole blocks refuse the model.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raypipe.train.shapes import without_values

log = logging.getLogger("raypipe")
# Besides one pass in eval mode, where nothing is skipped.
TRAINING_PASSES = 3


def freeze_unreached(model: nn.Module, inputs: Tensor) -> list[str]:
    """Freeze parameters that no pass reaches; returns the names that only some passes reach.

    `inputs` has one image's shape.
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    passes = _passes(model, inputs)
    reached: set[str] = set().union(*passes)

    never = sorted(trained - reached)
    for name in never:
        model.get_parameter(name).requires_grad_(False)
    if never:
        log.info("No output depends on %s: frozen", ", ".join(never))

    # Only the passes in training mode skip blocks.
    first, *others = passes[1:]
    always = first.intersection(*others)
    return sorted(reached - always)


def _passes(model: nn.Module, inputs: Tensor) -> list[set[str]]:
    """The names that each pass reaches: one in eval mode, then TRAINING_PASSES in training mode."""
    modes = [False] + [True] * TRAINING_PASSES
    with _same_random_state():
        try:
            shapes = without_values(model)
            # Two images: batch norms may refuse one in training mode.
            two = torch.zeros(2, *inputs.shape[1:], dtype=inputs.dtype, device="meta")
            return [_reached(shapes.train(mode), two) for mode in modes]
        except Exception as e:
            # A user's model may branch on values, which `meta` does not have.
            log.debug("Tried with values, for on shapes alone it fails: %s", e)
        # A copy, so that the model's own statistics and caches stay.
        values = copy.deepcopy(model)
        device = next(model.parameters()).device
        two = torch.zeros(2, *inputs.shape[1:], dtype=inputs.dtype, device=device)
        return [_reached(values.train(mode), two) for mode in modes]


def _reached(model: nn.Module, inputs: Tensor) -> set[str]:
    """The names of parameters that get a gradient in one pass."""
    names, parameters = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            names.append(name)
            parameters.append(p)
    with torch.enable_grad():
        loss = model(inputs).float().sum()
        # allow_unused: None for a parameter that the loss does not depend on.
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name for name, grad in zip(names, grads, strict=True) if grad is not None}


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore Python's and torch's random generators at the end of the block."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before)
