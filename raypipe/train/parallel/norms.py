"""Batch norms over the global batch: what small batches a rank need, and what makes a model with batch norms learn the same at
any world size. PyTorch's own runs on GPUs alone; on a CPU the statistics are summed here, by two small messages a norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(model: nn.Module, device: torch.device, world: int) -> nn.Module:
    """The model with every batch norm synchronised; names in the state dict stay."""
    if world == 1:
        return model
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for norm in (m for m in model.modules() if isinstance(m, _BatchNorm)):
        norm.__class__ = _OnCpu
    return model


class _OnCpu(_BatchNorm):
    """Ranks have equally large shares (feed/order.py), so the mean over the batch is the mean of the ranks' means."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (batch, channels, …)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        world, dims, shape = dist.get_world_size(), [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
        mean_C = all_reduce(x.float().mean(dims)) / world  # type: ignore[no-untyped-call]
        centred = x.float() - mean_C.view(shape)
        variance_C = all_reduce(centred.square().mean(dims)) / world  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            count = world * x.numel() / x.shape[1]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
            with torch.no_grad():
                factor = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)  # type: ignore[arg-type]
                self.running_mean.lerp_(mean_C, factor)
                self.running_var.lerp_(variance_C * count / max(1.0, count - 1), factor)
        normed = centred * torch.rsqrt(variance_C + self.eps).view(shape)
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed.to(x.dtype)
