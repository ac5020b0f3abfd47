"""Which parameters a training step reaches, found before a model is wrapped.

DDP waits in every step for the gradient of every parameter that asks for one. DINOv2's and DINOv3's mask_token never gets
one, and the second step dies. So a model is tried on shapes alone (`meta`: no memory, no values): what no pass reaches is
frozen, which changes nothing that is learned. What some passes reach and others do not (blocks that are skipped at random)
is no reason to freeze: DDP then looks for them in every step, and who shards whole blocks refuses.
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
TRAINING_PASSES = 3  # beside one in eval mode, where nothing is skipped


def freeze_unreached(model: nn.Module, inputs: Tensor) -> list[str]:
    """Freeze parameters that no pass reaches; returns those that only some passes reach. `inputs` has one image's shape."""
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    passes = _passes(model, inputs)
    ever: set[str] = set().union(*passes)
    never = wanted - ever
    for name in sorted(never):
        model.get_parameter(name).requires_grad_(False)
    if never:
        log.info("No output depends on %s: frozen", ", ".join(sorted(never)))
    always = passes[1].intersection(*passes[2:])  # in training mode
    return sorted(ever - always)


def _passes(model: nn.Module, inputs: Tensor) -> list[set[str]]:
    """The names that each pass reaches: one in eval mode, then TRAINING_PASSES in training mode."""
    modes = [False] + [True] * TRAINING_PASSES
    with _generators_kept():
        try:
            shapes = without_values(model)
            two = torch.zeros(2, *inputs.shape[1:], dtype=inputs.dtype, device="meta")
            return [_reached(shapes.train(mode), two) for mode in modes]
        except Exception as e:  # a model of the user's own may branch on values
            log.debug("Tried with values, for on shapes alone it fails: %s", e)
        values = copy.deepcopy(model)  # statistics and caches of the model itself stay
        device = next(model.parameters()).device
        two = torch.zeros(2, *inputs.shape[1:], dtype=inputs.dtype, device=device)
        return [_reached(values.train(mode), two) for mode in modes]


def _reached(model: nn.Module, inputs: Tensor) -> set[str]:
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        grads = torch.autograd.grad(
            model(inputs).float().sum(), list(wanted.values()), allow_unused=True
        )
    return {name for name, grad in zip(wanted, grads, strict=True) if grad is not None}


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before)
