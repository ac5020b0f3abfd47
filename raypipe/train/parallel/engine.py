"""What the loop sees of a strategy, and what every strategy does alike."""

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

Criterion = Callable[[Tensor, Tensor], Tensor]  # (logits_BC, targets) -> the batch's mean loss


class Engine(Protocol):
    """A model, its optimizer and the ranks they span. Every rank calls everything.

    step: forward, backward and one update by this rank's part of a global batch; returns the part's loss. Gradients are the
    mean over the ranks: where parts differ in size, the criterion weighs. `least` is the smallest part of any rank. Tells the
    meter where each of them ends.
    not_finite: the name of the first weight or statistic that holds NaN or infinity, or None; the same on every rank.
    snapshot, load: this rank's share of everything, and the way back from whole tensors. Neither asks the other ranks.
    """

    rank: int
    world: int
    device: torch.device
    meter: Meter

    def train(self) -> None: ...
    def eval(self) -> None: ...
    def forward(self, inputs: Tensor) -> Tensor: ...
    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor: ...
    def set_lr(self, lr: float, epoch: int) -> None: ...
    def not_finite(self) -> str | None: ...
    def snapshot(self) -> Snapshot: ...
    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None: ...


def ranks() -> tuple[int, int]:
    """(rank, world size)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def micro_batches(
    inputs: Tensor, targets: Tensor, parts: int, least: int | None = None
) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """(inputs, targets, share of the batch, is it the last). Where the ranks' smallest batch (`least`; null: this one) is
    smaller than `parts`, it makes fewer, on all ranks alike."""
    parts = min(parts, len(inputs) if least is None else least)
    for i, (x, y) in enumerate(
        zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    ):
        yield x, y, len(x) / len(inputs), i + 1 == parts


def first_not_finite(tensors: Mapping[str, Tensor], world: int, device: torch.device) -> str | None:
    """The first tensor of which some rank's share is not finite. Ranks list the same names in the same order."""
    names = list(tensors)
    bad = first_bad(tensors)
    first = torch.tensor(len(names) if bad is None else names.index(bad), device=device)
    if world > 1:
        dist.all_reduce(first, dist.ReduceOp.MIN)
    return names[int(first)] if int(first) < len(names) else None


def broadcast(tensors: Iterable[Tensor], world: int) -> None:
    """Rank 0's values for all."""
    if world > 1:
        for tensor in tensors:
            sent = tensor.detach().contiguous()  # channels_last ones cannot be sent as they lie
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)


def parameter_groups(model: nn.Module, cfg: ParallelConfig) -> list[dict[str, Any]]:
    """Optimizer groups, by depth only where depths learn at different rates: each group costs kernels and messages."""
    if cfg.layer_decay < 1 or cfg.unfreeze_epochs:
        return depth.parameter_groups(model, cfg.weight_decay)
    return depth.parameter_groups(
        model, cfg.weight_decay, {name: 0 for name, _ in model.named_parameters()}
    )


def set_rates(groups: Sequence[dict[str, Any]], lr: float, epoch: int, cfg: ParallelConfig) -> None:
    """Each group's learning rate in an epoch (from 0), `lr` being the head's."""
    by_depth = depth.scales(
        1 + max(g["depth"] for g in groups), epoch, cfg.layer_decay, cfg.unfreeze_epochs
    )
    for group in groups:
        group["lr"] = lr * by_depth[group["depth"]]
