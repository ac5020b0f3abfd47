"""Batch norms over the global batch: what small batches a rank need, and what makes a model with batch norms learn the same at
any world size. PyTorch's own runs on GPUs alone; on a CPU the statistics are summed here, by two small messages a norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(model: nn.Module, device: torch.device, world: int) -> nn.Module:
    """The model with its batch norms synchronised, in place; names in the state dict stay.

    Norms of frozen blocks, which stay in eval mode while the model trains, are left alone. PyTorch's conversion makes new
    modules, which a model that keeps its frozen ones in eval mode does not know: their statistics would move.
    """
    if world == 1:
        return model
    mode = model.training
    owners = [
        (o, n, m)
        for o in model.train().modules()
        for n, m in o.named_children()
        if isinstance(m, _BatchNorm)
    ]
    for owner, name, norm in ((o, n, m) for o, n, m in owners if m.training):
        if device.type == "cpu":
            norm.__class__ = _OnCpu
        else:
            setattr(owner, name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))  # type: ignore[no-untyped-call]
    return model.train(mode)


class _OnCpu(_BatchNorm):
    """The mean over the global batch; ranks' shares may differ in size."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (batch, channels, …)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dims, shape = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
        total = torch.tensor(x.numel() / x.shape[1], dtype=torch.float64)
        dist.all_reduce(total)
        count = float(total)
        mean_C = all_reduce(x.float().sum(dims)) / count  # type: ignore[no-untyped-call]
        centred = x.float() - mean_C.view(shape)
        variance_C = all_reduce(centred.square().sum(dims)) / count  # type: ignore[no-untyped-call]
        if (
            self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        ):
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
            with torch.no_grad():
                factor = (
                    self.momentum
                    if self.momentum is not None
                    else 1 / float(self.num_batches_tracked)
                )  # type: ignore[arg-type]
                self.running_mean.lerp_(mean_C, factor)
                self.running_var.lerp_(variance_C * count / max(1.0, count - 1), factor)
        normed = centred * torch.rsqrt(variance_C + self.eps).view(shape)
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed.to(x.dtype)
