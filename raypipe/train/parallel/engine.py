"""The interface between the training loop and a strategy, and the parts that strategies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.models import depth
from raypipe.models.finite import first_bad
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.settings import ParallelConfig
from raypipe.train.parallel.snapshot import Snapshot

# (logits_BC, targets) -> the batch's mean loss
Criterion = Callable[[Tensor, Tensor], Tensor]


class Engine(Protocol):
    """A model, its optimizer and the ranks they span. Every rank calls every method."""

    rank: int
    world: int
    device: torch.device
    meter: Meter

    def train(self) -> None:
        """Prepare for training steps; the model holds the trained weights."""

    def eval(self) -> None:
        """Prepare for evaluation; under EMA the model holds the mean of the weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits in float32."""
        ...

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        """One update by this rank's part of a global batch; returns the loss of the part.

        Gradients are the mean over the ranks. Where parts differ in size, the criterion weights
        them. `least` is the smallest part of any rank. The meter gets a lap after each phase.
        """
        ...

    def set_lr(self, lr: float, epoch: int) -> None:
        """Set the head's learning rate, and from it those of all parameter groups."""

    def not_finite(self) -> str | None:
        """The first weight or statistic with NaN or infinity, or None; the same on every rank."""

    def snapshot(self) -> Snapshot:
        """This rank's share of model and optimizer. It does not wait for other ranks."""
        ...

    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Restore from whole tensors. It does not wait for other ranks."""


def ranks() -> tuple[int, int]:
    """(rank, world size)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def micro_batches(
    inputs: Tensor, targets: Tensor, parts: int, least: int | None = None
) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """Yields (inputs, targets, share of the batch, is it the last?) for each micro batch.

    There are `parts` of them, but not more than images in the smallest batch of any rank (`least`;
    None: this batch), so that all ranks make equally many.
    """
    if least is None:
        least = len(inputs)
    parts = min(parts, least)
    split_inputs = inputs.tensor_split(parts)
    split_targets = targets.tensor_split(parts)
    for i in range(parts):
        share = len(split_inputs[i]) / len(inputs)
        is_last = i + 1 == parts
        yield split_inputs[i], split_targets[i], share, is_last


def first_not_finite(tensors: Mapping[str, Tensor], world: int, device: torch.device) -> str | None:
    """The first tensor that is not finite on some rank.

    All ranks must list the same names in the same order.
    """
    names = list(tensors)
    bad = first_bad(tensors)
    # Its index, or the index after the last: the minimum over the ranks is the first.
    own_index = len(names) if bad is None else names.index(bad)
    index = torch.tensor(own_index, device=device)
    if world > 1:
        dist.all_reduce(index, dist.ReduceOp.MIN)
    first = int(index)
    return names[first] if first < len(names) else None


def broadcast(tensors: Iterable[Tensor], world: int) -> None:
    """Copy rank 0's values to all ranks, in place."""
    if world > 1:
        for tensor in tensors:
            # A channels_last tensor cannot be sent in its own memory layout.
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)


def parameter_groups(model: nn.Module, cfg: ParallelConfig) -> list[dict[str, Any]]:
    """Groups for the optimizer.

    Groups are split by depth only if depths learn at different rates: each group costs kernels
    and messages.
    """
    if cfg.layer_decay < 1 or cfg.unfreeze_epochs:
        return depth.parameter_groups(model, cfg.weight_decay)
    one_depth = {name: 0 for name, _ in model.named_parameters()}
    return depth.parameter_groups(model, cfg.weight_decay, one_depth)


def set_rates(groups: Sequence[dict[str, Any]], lr: float, epoch: int, cfg: ParallelConfig) -> None:
    """Set each group's learning rate in an epoch (from 0); `lr` is the head's."""
    deepest = max(group["depth"] for group in groups)
    scales = depth.scales(deepest + 1, epoch, cfg.layer_decay, cfg.unfreeze_epochs)
    for group in groups:
        scale = scales[group["depth"]]
        group["lr"] = lr * scale
