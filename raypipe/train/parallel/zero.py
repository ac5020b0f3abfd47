"""zero1, zero2, zero3: DeepSpeed's stages (Rajbhandari et al. 2020).

zero1 shards the optimizer state, zero2 gradients too, zero3 parameters too. DeepSpeed's own
checkpoints are pickled and tied to the world size. Here each rank saves its share of every tensor
by name instead, so a run resumes at any world size and under any other strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.errors import ConfigError
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.average import Average
from raypipe.train.parallel.blocks import checkpoint_activations
from raypipe.train.parallel.deepspeed_private import Shares, use_dynamic_loss_scaler
from raypipe.train.parallel.deepspeed_setup import engine_config, import_deepspeed
from raypipe.train.parallel.engine import (
    Criterion,
    broadcast,
    first_not_finite,
    micro_batches,
    parameter_groups,
    ranks,
    set_rates,
)
from raypipe.train.parallel.precision import GROWS_AFTER, require_scale
from raypipe.train.parallel.settings import ParallelConfig
from raypipe.train.parallel.snapshot import MOMENTS, Piece, Snapshot, cut


class Zero:
    """One stage of DeepSpeed.

    Under zero3 every forward pass gathers layer by layer, so all ranks must call it equally often.

    Three places hold weights: the model's parameters (`_shares.local` is this rank's share of
    one), the flat float32 tensors that the optimizer updates, and its moments. `load` fills all.
    """

    def __init__(
        self,
        stage: int,
        model: nn.Module,
        cfg: ParallelConfig,
        device: torch.device,
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                f"zero{stage} shards a model over several workers",
                got="train.workers=1",
                fix="Set train.workers=2",
            )
        deepspeed = import_deepspeed(device)
        self.rank, self.world = ranks()
        self.device = device
        self.meter = meter
        self._cfg = cfg
        self._stage = stage
        _use_plain_layout(model)
        if stage < 3:
            model = model.to(device)
            broadcast(model.parameters(), self.world)
        self._saved = tuple(model.state_dict())
        if cfg.activation_checkpointing:
            checkpoint_activations(model, reentrant=stage == 3)
        optimizer = torch.optim.AdamW(parameter_groups(model, cfg), lr=cfg.lr, fused=True)
        sizes = [p.numel() for p in model.parameters()]
        config = engine_config(stage, cfg, self.world, dtype, device, sizes)
        if stage == 3:
            # Shards parameter by parameter, from rank 0. The whole model never lies on a device.
            deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        broadcast(model.buffers(), self.world)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False, config=config
        )
        self._shares = Shares(self._zero, stage, self.rank, device)
        self._scaler = use_dynamic_loss_scaler(self._zero) if dtype is torch.float16 else None
        if cfg.compile:
            self._engine.compile()
        self._average = Average(cfg.ema, self._stored)

    def train(self) -> None:
        self._shares.release()
        self._average.show(mean=False)
        self._engine.train()

    def eval(self) -> None:
        if self._scaler is not None:
            require_scale(self._scaler.cur_scale)
        self._shares.release()
        self._average.show(mean=True)
        # Batch statistics differ by rank. Rank 0's are saved, so all ranks evaluate with those.
        broadcast(self._engine.module.buffers(), self.world)
        self._engine.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self._engine(inputs).float()  # type: ignore[no-any-return]

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        self.meter.lap("augment")
        total = torch.zeros((), device=self.device)
        parts = micro_batches(inputs, targets, self._cfg.accumulate, least)
        for part, part_targets, share, last in parts:
            self._engine.set_gradient_accumulation_boundary(last)
            loss = criterion(self.forward(part), part_targets) * share
            self.meter.lap("forward")
            # `loss` holds the micro batch's share already; DeepSpeed must not divide once more.
            self._engine.backward(loss, scale_wrt_gas=False)
            self.meter.lap("backward")
            self._engine.step()
            self.meter.lap("optimizer")
            total += loss.detach()
        self._average.update()
        self.meter.lap("optimizer")
        return total

    def set_lr(self, lr: float, epoch: int) -> None:
        set_rates(self._zero.param_groups, lr, epoch, self._cfg)

    def not_finite(self) -> str | None:
        module = self._engine.module
        shares = dict(module.named_buffers())
        for name, p in module.named_parameters():
            shares[name] = self._shares.unpadded(p)
        # All ranks must list them in the same order: that of the state dict.
        saved = {name: shares[name] for name in self._saved}
        return first_not_finite(saved, self.world, self.device)

    def snapshot(self) -> Snapshot:
        self._shares.release()
        with self._average.showing(mean=True):
            weights = self._pieces("")
        optimizer: dict[str, Piece] = {}
        if self._cfg.ema:
            # Under EMA `weights` are the mean; the trained weights are saved beside them.
            with self._average.showing(mean=False):
                optimizer |= self._pieces("trained/")
        optimizer |= self._moments()
        facts = {"scaler": self._scale(), "averaged": self._average.steps}
        return Snapshot(weights, optimizer, facts)

    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Go on from a snapshot, with whole tensors by name; `snapshot` says what they are."""
        self._shares.release()
        # Under EMA `weights` are the mean. So they go into the model first, and `restart` takes
        # them over as the mean; then the trained weights replace them in the model.
        self._fill("", weights)
        self._average.restart()
        self._average.steps = facts["averaged"]
        has_trained = f"trained/{self._saved[0]}" in optimizer
        if has_trained:
            self._fill("trained/", optimizer)

        # Checkpoints of older versions hold no loss scale.
        if self._scaler is not None and facts["scaler"]:
            self._scaler.cur_scale = facts["scaler"]["scale"]
            # DeepSpeed counts steps since the last overflow: as if that was just before step 0.
            self._scaler.cur_iter = facts["scaler"]["_growth_tracker"]
            self._scaler.last_overflow_iter = -1

        # The optimizer has no state before its first step: make it, then fill it.
        step_key = next((key for key in optimizer if key.startswith("step/")), None)
        if step_key is not None:
            self._make_state(optimizer[step_key])
        # The tensors that the optimizer updates, and its moments.
        for name, p in self._trained():
            self._shares.set(p, optimizer[f"trained/{name}"] if has_trained else weights[name])
            if f"exp_avg/{name}" in optimizer:
                for key in MOMENTS:
                    self._shares.set(p, optimizer[f"{key}/{name}"], key)

    def _make_state(self, step: Tensor) -> None:
        """Give the optimizer moments of zero, after so many steps."""
        for flat in self._shares.flat():
            state = {key: torch.zeros_like(flat) for key in MOMENTS}
            state["step"] = step.to(flat.device, copy=True)
            self._zero.optimizer.state[flat] = state
        self._shares.link()

    def _scale(self) -> dict[str, Any]:
        """The loss scale under the keys of torch's GradScaler, which the native strategies load."""
        if self._scaler is None:
            return {}
        steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {
            "scale": self._scaler.cur_scale,
            "_growth_tracker": steps % GROWS_AFTER,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": GROWS_AFTER,
        }

    def parameters_held(self) -> int:
        """Elements of parameters that this rank keeps between steps; sharding reduces them."""
        return sum(self._shares.local(p).numel() for p in self._engine.module.parameters())

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not frozen, with their names."""
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]

    def _stored(self) -> list[Tensor]:
        """This rank's share of the trained weights and of the running statistics."""
        buffers = [b for b in self._engine.module.buffers() if b.is_floating_point()]
        return [self._shares.local(p) for _, p in self._trained()] + buffers

    def _moments(self) -> dict[str, Piece]:
        """This rank's share of the optimizer's state; empty before the first step."""
        self._shares.link()
        steps = [float(s["step"]) for s in self._zero.optimizer.state.values() if "step" in s]
        if not steps:
            return {}
        pieces: dict[str, Piece] = {}
        # All parameters have made equally many steps.
        step = torch.tensor(max(steps))
        for name, p in self._trained():
            for key in MOMENTS:
                piece = self._shares.moment(p, key)
                if piece is not None:
                    pieces[f"{key}/{name}"] = piece
            if self.rank == 0:
                pieces[f"step/{name}"] = Piece.whole(step)
        return pieces

    def _pieces(self, prefix: str) -> dict[str, Piece]:
        """This rank's piece of each weight and buffer that it saves, by `prefix` + name."""
        module = self._engine.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        pieces = {}
        for name in self._saved:
            piece = self._piece(tensors[name])
            if piece is not None:
                pieces[prefix + name] = piece
        return pieces

    def _piece(self, tensor: Tensor) -> Piece | None:
        """The piece of a tensor that this rank saves; None if another rank saves it."""
        # zero3 shards parameters. Buffers are whole on every rank, and rank 0 saves them.
        is_sharded = self._stage == 3 and isinstance(tensor, nn.Parameter)
        if not is_sharded:
            return Piece.whole(tensor) if self.rank == 0 else None
        return self._shares.piece(tensor)

    @torch.no_grad()
    def _fill(self, prefix: str, saved: Mapping[str, Tensor]) -> None:
        """Copy saved whole tensors into the model."""
        module = self._engine.module
        for name, p in module.named_parameters():
            share = self._shares.local(p)
            values = saved[prefix + name]
            if self._stage == 3:
                size = share.numel()
                values = cut(values, self.rank * size, size)
            share.copy_(values)
        for name, buffer in module.named_buffers():
            if name in self._saved:
                buffer.copy_(saved[prefix + name])


def _use_plain_layout(model: nn.Module) -> None:
    """Lay out every parameter as a contiguous tensor, in place.

    DeepSpeed sends parameters as flat bytes. channels_last tensors have no such view, not even
    1 x 1 kernels, although those count as contiguous.
    """
    for p in model.parameters():
        p.data = p.data.flatten().view(p.shape)
