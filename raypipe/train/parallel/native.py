"""PyTorch's unsharded strategies: single and ddp. The sharded one, fsdp, is in fsdp.py.

`Single` holds everything that the three share. Ddp and Fsdp override the methods below `load`: how
a model is placed on the device, and which part of a tensor this rank stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raypipe.errors import RaypipeError
from raypipe.torch_private import ddp_exposed_s
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.average import Average
from raypipe.train.parallel.blocks import checkpoint_activations
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
from raypipe.train.parallel.snapshot import MOMENTS, Piece, Snapshot


class Single:
    """single: one rank holds the whole model."""

    def __init__(
        self,
        model: nn.Module,
        cfg: ParallelConfig,
        device: torch.device,
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        self.rank, self.world = ranks()
        self.device = device
        self.meter = meter
        self._cfg = cfg
        self._dtype = dtype
        self._model = model = self._begin(model)
        if cfg.activation_checkpointing:
            checkpoint_activations(model)
        if cfg.compile:
            # In place, so that names in the state dict stay.
            model.compile()
        # Training batches go through it: the model, or a wrapper around it.
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
        # Batch statistics differ by rank. Rank 0's are saved, so all ranks evaluate with those.
        broadcast(self._model.buffers(), self.world)
        self._model.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        # Evaluation calls the model without its DDP wrapper: eval() made the buffers equal.
        module = self._entry if self._model.training else self._model
        with autocast(self.device, self._dtype):
            return module(inputs).float()

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        self.meter.lap("augment")
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        parts = micro_batches(inputs, targets, self._cfg.accumulate, least)
        for part, part_targets, share, last in parts:
            with self._syncing(last):
                # The shares of all micro batches add up to the mean of the whole batch.
                loss = criterion(self.forward(part), part_targets) * share
                self.meter.lap("forward")
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self.meter.lap("backward")
        self._update()
        self.meter.lap("optimizer")
        return total

    def _update(self) -> None:
        if self._cfg.clip_norm is not None:
            # The norm of the true gradients, without the loss scale.
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
            # Under EMA `weights` are the mean; the trained weights are saved beside them.
            with self._average.showing(mean=False):
                optimizer |= self._pieces("trained/", self._model.state_dict())
        for name, p in self._trained():
            # Empty before the first step.
            state = self._optimizer.state.get(p, {})
            named = {f"{key}/{name}": tensor for key, tensor in state.items()}
            optimizer |= self._pieces("", named)
        facts = {"scaler": self._scaler.state_dict(), "averaged": self._average.steps}
        return Snapshot(weights, optimizer, facts)

    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        self._fill("", weights)
        self._average.restart()
        self._average.steps = facts["averaged"]
        if any(key.startswith("trained/") for key in optimizer):
            self._fill("trained/", optimizer)
        # A parameter without saved moments begins with none, as before its first step.
        for name, p in self._trained():
            moments = {}
            for key in MOMENTS:
                saved = optimizer.get(f"{key}/{name}")
                if saved is not None:
                    moments[key] = self._like(saved, p)
            if moments:
                step = optimizer[f"step/{name}"].to(p.device)
                self._optimizer.state[p] = moments | {"step": step}
        # Checkpoints of zero by older versions hold no loss scale.
        if self._scaler.is_enabled() and facts["scaler"]:
            self._scaler.load_state_dict(facts["scaler"])

    def _shares(self) -> dict[str, Tensor]:
        """This rank's share of each tensor in the state dict, by name."""
        shares = {}
        for name, tensor in self._model.state_dict().items():
            shares[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return shares

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not frozen, with their names."""
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def _fill(self, prefix: str, saved: Mapping[str, Tensor]) -> None:
        """Copy saved whole tensors into the model's state dict."""
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(self._like(saved[prefix + name], tensor))

    def _pieces(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """This rank's piece of each tensor that it saves, by `prefix` + name."""
        pieces = {}
        for name, tensor in tensors.items():
            piece = self._piece(tensor.detach())
            if piece is not None:
                pieces[prefix + name] = piece
        return pieces

    def _begin(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, with rank 0's values."""
        model = model.to(self.device)
        broadcast([*model.parameters(), *model.buffers()], self.world)
        return model

    def _place(self, model: nn.Module) -> nn.Module:
        """The module that training batches go through: the model, perhaps wrapped."""
        if self._cfg.channels_last:
            return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return model

    def _syncing(self, last: bool) -> AbstractContextManager[None]:
        """A context around one micro batch. It may delay the sum of gradients until the last."""
        return nullcontext()

    def _stored(self) -> list[Tensor]:
        """This rank's share of the trained weights and of the running statistics."""
        weights = [p for _, p in self._trained()]
        statistics = [b for b in self._model.buffers() if b.is_floating_point()]
        return [t.detach() for t in (*weights, *statistics)]

    def _piece(self, stored: Tensor) -> Piece | None:
        """The piece of a tensor that this rank saves; None if another rank saves it."""
        return Piece.whole(stored) if self.rank == 0 else None

    def _like(self, whole: Tensor, stored: Tensor) -> Tensor:
        """This rank's share of `whole`, with the memory layout of `stored`."""
        return torch.empty_like(stored, dtype=whole.dtype).copy_(whole)


class Ddp(Single):
    """ddp: every rank holds the whole model.

    Gradients are summed while the backward pass still runs (Li et al. 2020).
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: ParallelConfig,
        device: torch.device,
        dtype: torch.dtype,
        meter: Meter,
        find_unused: bool = False,
    ) -> None:
        """`find_unused`: steps use different parameters, so DDP looks for unused ones in each."""
        self._find_unused = find_unused
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
                rule="The trial passes before the training used all of them",
                fix="Set train.workers=1, or let the model use every parameter in every step",
            ) from None

    def _place(self, model: nn.Module) -> nn.Module:
        devices = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            super()._place(model), device_ids=devices, find_unused_parameters=self._find_unused
        )
        self.meter.communication = partial(ddp_exposed_s, wrapped)
        return wrapped

    def _syncing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._entry.no_sync()  # type: ignore[operator, no-any-return]
