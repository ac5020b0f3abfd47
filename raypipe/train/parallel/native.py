"""PyTorch's own strategies: single, ddp and fsdp. They differ in how a model is placed and what a rank stores of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raypipe.errors import ConfigError, RaypipeError
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.average import Average
from raypipe.train.parallel.blocks import blocks, checkpoint_activations
from raypipe.train.parallel.engine import (
    Criterion,
    broadcast,
    first_not_finite,
    micro_batches,
    parameter_groups,
    ranks,
    set_rates,
)
from raypipe.train.parallel.precision import autocast, require_scale
from raypipe.train.parallel.settings import ParallelConfig
from raypipe.train.parallel.snapshot import MOMENTS, Piece, Snapshot, cut
from raypipe.train.shapes import without_values

SMALLEST_UNIT = 100_000  # parameters that fsdp gathers apart; fewer cost more in latency than they save in memory


class Single:
    """single: one rank holds the whole model. What the other native strategies do otherwise is in the methods below `load`."""

    def __init__(
        self,
        model: nn.Module,
        cfg: ParallelConfig,
        device: torch.device,
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        self.rank, self.world = ranks()
        self.device, self.meter, self._cfg, self._dtype = device, meter, cfg, dtype
        self._model = model = self._begin(model)
        if cfg.activation_checkpointing:
            checkpoint_activations(model)
        if cfg.compile:
            model.compile()  # in place: names in the state dict stay
        self._entry = self._place(model)
        # Fused: one kernel for all parameters, on CPU and CUDA, sharded or not.
        self._optimizer = torch.optim.AdamW(parameter_groups(model, cfg), lr=cfg.lr, fused=True)
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self._average = Average(cfg.ema, self._stored)

    def train(self) -> None:
        self._average.show(mean=False)
        self._model.train()

    def eval(self) -> None:
        if self._scaler.is_enabled():
            require_scale(self._scaler.get_scale())
        self._average.show(mean=True)
        broadcast(
            self._model.buffers(), self.world
        )  # batch statistics differ by rank: judge with those that are saved
        self._model.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        with autocast(
            self.device, self._dtype
        ):  # evaluation goes past DDP: eval() made the buffers equal already
            return (self._entry if self._model.training else self._model)(inputs).float()

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        self.meter.lap("augment")
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part, wanted, share, last in micro_batches(
            inputs, targets, self._cfg.accumulate, least
        ):
            with self._syncing(last):
                loss = criterion(self.forward(part), wanted) * share
                self.meter.lap("forward")
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self.meter.lap("backward")
        self._update()
        self.meter.lap("optimizer")
        return total

    def _update(self) -> None:
        if self._cfg.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._average.update()

    def set_lr(self, lr: float, epoch: int) -> None:
        set_rates(self._optimizer.param_groups, lr, epoch, self._cfg)

    def not_finite(self) -> str | None:
        return first_not_finite(self._shares(), self.world, self.device)

    def snapshot(self) -> Snapshot:
        with self._average.showing(mean=True):
            weights = self._pieces("", self._model.state_dict())
        optimizer: dict[str, Piece] = {}
        if self._cfg.ema:
            with self._average.showing(mean=False):
                optimizer |= self._pieces("trained/", self._model.state_dict())
        for name, p in self._trained():
            optimizer |= self._pieces(
                "", {f"{key}/{name}": t for key, t in self._optimizer.state.get(p, {}).items()}
            )
        return Snapshot(
            weights,
            optimizer,
            {"scaler": self._scaler.state_dict(), "averaged": self._average.steps},
        )

    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        self._fill("", weights)
        self._average.restart()
        self._average.steps = facts["averaged"]
        if any(key.startswith("trained/") for key in optimizer):
            self._fill("trained/", optimizer)
        for name, p in self._trained():
            saved = {
                key: optimizer[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in optimizer
            }
            if saved:
                moments = {key: self._like(t, p) for key, t in saved.items()}
                self._optimizer.state[p] = moments | {
                    "step": optimizer[f"step/{name}"].to(p.device)
                }
        if self._scaler.is_enabled() and facts["scaler"]:  # older versions' zero kept none
            self._scaler.load_state_dict(facts["scaler"])

    def _shares(self) -> dict[str, Tensor]:
        """What this rank holds of each tensor that is saved."""
        saved = self._model.state_dict()
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in saved.items()}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def _fill(self, prefix: str, saved: Mapping[str, Tensor]) -> None:
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(self._like(saved[prefix + name], tensor))

    def _pieces(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        pieces = ((name, self._piece(t.detach())) for name, t in tensors.items())
        return {prefix + name: piece for name, piece in pieces if piece is not None}

    def _begin(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, with rank 0's values."""
        model = model.to(self.device)
        broadcast([*model.parameters(), *model.buffers()], self.world)
        return model

    def _place(self, model: nn.Module) -> nn.Module:
        """What a training batch goes through."""
        return model.to(memory_format=torch.channels_last) if self._cfg.channels_last else model  # type: ignore[call-overload]

    def _syncing(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro batch: gradients need to be summed over the ranks only once a step."""
        return nullcontext()

    def _stored(self) -> list[Tensor]:
        """What this rank keeps of the weights, and the running statistics."""
        averaged = [
            *(p for _, p in self._trained()),
            *(b for b in self._model.buffers() if b.is_floating_point()),
        ]
        return [t.detach() for t in averaged]

    def _piece(self, stored: Tensor) -> Piece | None:
        """What this rank saves of a tensor."""
        return Piece.whole(stored) if self.rank == 0 else None

    def _like(self, whole: Tensor, stored: Tensor) -> Tensor:
        """What this rank keeps of `whole`, laid out as `stored` is."""
        return torch.empty_like(stored, dtype=whole.dtype).copy_(whole)


class Ddp(Single):
    """ddp: every rank holds the whole model and sums gradients while the backward pass still runs (Li et al. 2020)."""

    def __init__(
        self,
        model: nn.Module,
        cfg: ParallelConfig,
        device: torch.device,
        dtype: torch.dtype,
        meter: Meter,
        searching: bool = False,
    ) -> None:
        """`searching`: steps differ in the parameters they reach, so DDP looks for them in each."""
        self._searching = searching
        super().__init__(model, cfg, device, dtype, meter)

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        try:
            return super().step(inputs, targets, criterion, least)
        except RuntimeError as e:
            if "finished reduction in the prior iteration" not in str(e):
                raise
            raise RaypipeError(
                "ddp waits for gradients of parameters that this model does not use in every step",
                rule="They were used whenever the model was tried before the training",
                fix="Set train.workers=1, or let the model use every parameter in every step",
            ) from None

    def _place(self, model: nn.Module) -> nn.Module:
        on = [self.device] if self.device.type == "cuda" else None
        placed = DistributedDataParallel(
            super()._place(model), device_ids=on, find_unused_parameters=self._searching
        )
        self.meter.communication = partial(_exposed_s, placed)
        return placed

    def _syncing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._entry.no_sync()  # type: ignore[operator, no-any-return]


def _exposed_s(placed: DistributedDataParallel) -> float:
    """Seconds from the last gradient to the last sum: the mean of the steps that DDP times, the first 10 and each 100th."""
    timed = placed._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return (
        max(
            0.0,
            timed.get("avg_backward_comm_time", 0)
            - timed.get("avg_backward_compute_comm_overlap_time", 0),
        )
        / 1e9
    )


class Fsdp(Single):
    """fsdp: each rank holds 1/world of parameters, gradients and optimizer state (FSDP2; Zhao et al. 2023).

    Micro batches sum their gradients at once: waiting for the last, as ddp does, would keep whole gradients. The root gives its
    parameters back after the forward pass too, or the next one would not see weights that EMA put in place of the trained.

    The whole model never lies on a device. What is sharded is a copy of shapes alone; then one tensor after the other goes from
    rank 0's CPU to all devices, each of which keeps its rows.
    """

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
            p.data = p.data.contiguous()  # FSDP2 does not cut channels_last ones
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
        """Rank 0's values into the shards. Each whole tensor is given up when its shards are made."""
        sharded = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, whole in [*self._whole.named_parameters(), *self._whole.named_buffers()]:
            sent = whole.detach().to(self.device).contiguous()
            dist.broadcast(sent, 0)
            sharded[name].copy_(self._like(sent, sharded[name]))
            whole.data = torch.empty(0, dtype=whole.dtype)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
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
        mine = stored.to_local()
        values = cut(whole, self._start(stored), mine.numel()).view_as(mine).to(mine.device)
        return DTensor.from_local(
            values,
            stored.device_mesh,
            stored.placements,
            shape=stored.shape,
            stride=stored.stride(),
        )

    def _start(self, stored: Tensor) -> int:
        """The first element of this rank's rows. FSDP2 cuts along the first dimension, as torch.chunk does."""
        rows = stored.shape[0]
        return min(rows, self.rank * -(-rows // self.world)) * (stored.numel() // max(1, rows))
