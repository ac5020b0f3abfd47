"""Batch norms over the global batch.

Small batches a rank need them. With them, a model with batch norms also learns the same at any
world size. PyTorch's SyncBatchNorm runs on GPUs alone. On a CPU this module sums the statistics,
with two small messages a norm.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


def sync_batch_norms(model: nn.Module, device: torch.device, world: int) -> nn.Module:
    """The model with its batch norms synchronised, in place; names in the state dict stay.

    Norms of frozen blocks, which stay in eval mode while the model trains, are left alone.
    PyTorch's conversion makes new modules. A model that holds its frozen norms in eval mode does
    not know the new ones, so their statistics would move.
    """
    if world == 1:
        return model
    mode = model.training
    model.train()
    # Collect all norms first: the loop below replaces modules.
    norms: list[tuple[nn.Module, str, _BatchNorm]] = []
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, _BatchNorm):
                norms.append((owner, name, child))
    for owner, name, norm in norms:
        if not norm.training:
            continue
        if device.type == "cpu":
            norm.__class__ = _OnCpu
        else:
            converted = nn.SyncBatchNorm.convert_sync_batchnorm(norm)  # type: ignore[no-untyped-call]
            setattr(owner, name, converted)
    return model.train(mode)


class _OnCpu(_BatchNorm):
    """Batch norm over all ranks' batches, which may differ in size."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (batch, channels, …)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        # Reduce all dimensions but the channels; `shape` spreads a channel's value over them.
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        # Values of a channel on all ranks.
        total = torch.tensor(x.numel() / x.shape[1], dtype=torch.float64)
        dist.all_reduce(total)
        count = float(total)

        sum_C = all_reduce(x.float().sum(dims))  # type: ignore[no-untyped-call]
        mean_C = sum_C / count
        centred = x.float() - mean_C.view(shape)
        squares_C = all_reduce(centred.square().sum(dims))  # type: ignore[no-untyped-call]
        variance_C = squares_C / count
        self._update_statistics(mean_C, variance_C, count)

        normed = centred * torch.rsqrt(variance_C + self.eps).view(shape)
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed.to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean_C: Tensor, variance_C: Tensor, count: float) -> None:
        """Move the running statistics, as PyTorch's batch norm does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
        factor = self.momentum
        if factor is None:
            factor = 1 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        self.running_mean.lerp_(mean_C, factor)
        # The unbiased variance.
        self.running_var.lerp_(variance_C * count / max(1.0, count - 1), factor)
