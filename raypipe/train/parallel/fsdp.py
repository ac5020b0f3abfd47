"""fsdp: each rank holds 1/world of parameters, gradients and optimizer state.

This is PyTorch's FSDP2 (Zhao et al. 2023). Two choices differ from ddp:

- Every micro batch sums its gradients over the ranks. Waiting for the last micro batch, as ddp
  does, would keep whole gradients.
- The root module, too, frees its gathered parameters after the forward pass. Otherwise the next
  forward pass would not see the weights that EMA put in place of the trained ones.

The whole model never lies on a device. A copy of shapes alone is sharded. Then rank 0 sends one
tensor after the other from its CPU, and each rank keeps its rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raypipe.errors import ConfigError
from raypipe.train.parallel.blocks import blocks
from raypipe.train.parallel.native import Single
from raypipe.train.parallel.snapshot import Piece, cut
from raypipe.train.shapes import without_values

# Parameters of the smallest block that is gathered on its own.
# A smaller one costs more in latency than it saves in memory.
SMALLEST_UNIT = 100_000


class Fsdp(Single):
    """Single's loop over sharded tensors (DTensor)."""

    def _begin(self, model: nn.Module) -> nn.Module:
        self._whole = model
        return without_values(model)

    def _place(self, model: nn.Module) -> nn.Module:
        if not dist.is_initialized():
            raise ConfigError(
                "fsdp shards a model over several workers",
                got="train.workers=1",
                fix="Set train.workers=2",
            )
        for p in model.parameters():
            # FSDP2 cannot cut channels_last tensors.
            p.data = p.data.contiguous()
        offloads = self._cfg.offload != "none" and self.device.type != "cpu"
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.world,)),
            "reshard_after_forward": True,
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        }
        for block in blocks(model):
            if sum(p.numel() for p in block.parameters()) >= SMALLEST_UNIT:
                fully_shard(block, **options)
        fully_shard(model, **options)
        model.to_empty(device="cpu" if offloads else self.device)
        self._receive(model)
        return model

    @torch.no_grad()
    def _receive(self, model: nn.Module) -> None:
        """Copy rank 0's values into the shards. Each whole tensor is freed once it was sent."""
        sharded = dict(model.named_parameters()) | dict(model.named_buffers())
        whole_tensors = dict(self._whole.named_parameters()) | dict(self._whole.named_buffers())
        for name, whole in whole_tensors.items():
            sent = whole.detach().to(self.device).contiguous()
            dist.broadcast(sent, 0)
            target = sharded[name]
            target.copy_(self._like(sent, target))
            # Free the whole tensor.
            whole.data = torch.empty(0, dtype=whole.dtype)
        # Buffers stay whole, and on the device even where parameters are offloaded.
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))
        del self._whole

    def _stored(self) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in super()._stored()]

    def _piece(self, stored: Tensor) -> Piece | None:
        if not isinstance(stored, DTensor):
            return super()._piece(stored)
        return Piece.part(stored.to_local().flatten(), self._start(stored), tuple(stored.shape))

    def _like(self, whole: Tensor, stored: Tensor) -> Tensor:
        if not isinstance(stored, DTensor):
            return super()._like(whole, stored)
        local = stored.to_local()
        share = cut(whole, self._start(stored), local.numel())
        return DTensor.from_local(
            share.view_as(local).to(local.device),
            stored.device_mesh,
            stored.placements,
            shape=stored.shape,
            stride=stored.stride(),
        )

    def _start(self, stored: Tensor) -> int:
        """The index of this rank's first element in the flattened whole.

        FSDP2 cuts along the first dimension, as torch.chunk does.
        """
        rows = stored.shape[0]
        rows_per_rank = -(-rows // self.world)
        first_row = min(rows, self.rank * rows_per_rank)
        elements_per_row = stored.numel() // max(1, rows)
        return first_row * elements_per_row
