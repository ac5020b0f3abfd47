"""zero1, zero2, zero3: DeepSpeed shards optimizer state, gradients too, parameters too (Rajbhandari et al. 2020).

DeepSpeed's own checkpoints are tied to the world size and pickled. Here each rank saves its share of every tensor by name, so
a run goes on at any world size, and under any other strategy. The first use compiles an operator (30 s).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.errors import ConfigError
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
from raypipe.train.parallel.precision import FIRST_SCALE, GROWS_AFTER, LOWEST_SCALE, require_scale
from raypipe.train.parallel.settings import ParallelConfig
from raypipe.train.parallel.snapshot import MOMENTS, Piece, Snapshot, cut

log = logging.getLogger("raypipe")
COMPILES_WITHIN_S = 600.0  # 30 to 100 s, seen on two busy cores
SMALLEST_BUCKET = 6_500_000  # elements: 25 MB in float32, as DDP's


class Zero:
    """One of DeepSpeed's stages. Under zero3 every forward gathers layer by layer: all ranks call it equally often."""

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
        deepspeed = _deepspeed(device)
        self.rank, self.world = ranks()
        self.device, self.meter, self._cfg, self._stage = device, meter, cfg, stage
        for p in model.parameters():  # DeepSpeed sends parameters as flat bytes: channels_last ones have no such view, not even
            p.data = p.data.flatten().view(
                p.shape
            )  # those of 1 x 1 kernels, which pass for contiguous
        if stage < 3:
            model = model.to(device)
            broadcast(model.parameters(), self.world)
        self._saved = tuple(model.state_dict())
        if cfg.activation_checkpointing:
            checkpoint_activations(model, reentrant=stage == 3)
        optimizer = torch.optim.AdamW(parameter_groups(model, cfg), lr=cfg.lr, fused=True)
        config = _config(
            stage, cfg, self.world, dtype, device, [p.numel() for p in model.parameters()]
        )
        if (
            stage == 3
        ):  # parameter by parameter, from rank 0: the whole model never lies on a device
            deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        broadcast(model.buffers(), self.world)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False, config=config
        )
        self._scaler = _scale_loss(self._zero) if dtype is torch.float16 else None
        if cfg.compile:
            self._engine.compile()
        self._average = Average(cfg.ema, self._stored)

    def train(self) -> None:
        self._release()
        self._average.show(mean=False)
        self._engine.train()

    def eval(self) -> None:
        if self._scaler is not None:
            require_scale(self._scaler.cur_scale)
        self._release()
        self._average.show(mean=True)
        broadcast(self._engine.module.buffers(), self.world)
        self._engine.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self._engine(inputs).float()  # type: ignore[no-any-return]

    def step(
        self, inputs: Tensor, targets: Tensor, criterion: Criterion, least: int | None = None
    ) -> Tensor:
        self.meter.lap("augment")
        total = torch.zeros((), device=self.device)
        for part, wanted, share, last in micro_batches(
            inputs, targets, self._cfg.accumulate, least
        ):
            self._engine.set_gradient_accumulation_boundary(last)
            loss = criterion(self.forward(part), wanted) * share
            self.meter.lap("forward")
            self._engine.backward(loss, scale_wrt_gas=False)  # the share is in the loss already
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
        shares = {n: self._local(p) for n, p in module.named_parameters()} | dict(
            module.named_buffers()
        )
        return first_not_finite({n: shares[n] for n in self._saved}, self.world, self.device)

    def snapshot(self) -> Snapshot:
        self._release()
        with self._average.showing(mean=True):
            weights = self._pieces("")
        optimizer: dict[str, Piece] = {}
        if self._cfg.ema:
            with self._average.showing(mean=False):
                optimizer |= self._pieces("trained/")
        optimizer |= self._moments()
        return Snapshot(
            weights, optimizer, {"scaler": self._scale(), "averaged": self._average.steps}
        )

    def load(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        self._release()
        self._fill("", weights)
        self._average.restart()
        self._average.steps = facts["averaged"]
        if self._scaler is not None and facts["scaler"]:  # older versions kept none
            self._scaler.cur_scale = facts["scaler"]["scale"]
            self._scaler.cur_iter, self._scaler.last_overflow_iter = (
                facts["scaler"]["_growth_tracker"],
                -1,
            )
        trained = f"trained/{self._saved[0]}" in optimizer
        if trained:
            self._fill("trained/", optimizer)
        if step := next((optimizer[key] for key in optimizer if key.startswith("step/")), None):
            for flat in self._flat():
                held = {k: torch.zeros_like(flat) for k in MOMENTS}
                self._zero.optimizer.state[flat] = held | {"step": step.to(flat.device, copy=True)}
            self._link()
        for name, p in self._trained():
            self._master(p, optimizer[f"trained/{name}"] if trained else weights[name])
            for key in MOMENTS if f"exp_avg/{name}" in optimizer else ():
                self._master(p, optimizer[f"{key}/{name}"], key)

    def _scale(self) -> dict[str, Any]:
        """The loss scale in the words of torch's GradScaler, which the native strategies load."""
        if self._scaler is None:
            return {}
        steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        steady = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": GROWS_AFTER}
        return {"scale": self._scaler.cur_scale, "_growth_tracker": steps % GROWS_AFTER, **steady}

    def _release(self) -> None:
        """DeepSpeed keeps layers gathered that it will use again soon: they would not see weights put in their place.

        The optimizer's method: the engine's collects garbage as well, which takes 0.3 s and frees nothing of ours.
        """
        if self._stage == 3:
            self._zero.empty_partition_cache()

    def parameters_held(self) -> int:
        """Elements of parameters that this rank keeps between steps: what sharding is for."""
        return sum(self._local(p).numel() for p in self._engine.module.parameters())

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]

    def _local(self, p: Tensor) -> Tensor:
        return p.ds_tensor.data if self._stage == 3 else p.data  # type: ignore[attr-defined]

    def _stored(self) -> list[Tensor]:
        buffers = [b for b in self._engine.module.buffers() if b.is_floating_point()]
        return [self._local(p) for _, p in self._trained()] + buffers

    def _flat(self) -> list[Tensor]:
        """This rank's share of the float32 weights, in a few flat tensors: what the optimizer updates."""
        zero = self._zero
        return (
            zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else zero.single_partition_of_fp32_groups
        )

    def _link(self) -> None:
        """DeepSpeed links parameters to optimizer state after the first group's first step, and misses the later groups'."""
        if self._stage < 3 and all(self._zero.optimizer.state.get(flat) for flat in self._flat()):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _master(self, p: nn.Parameter, whole: Tensor, key: str | None = None) -> None:
        """Put this rank's share of `whole` where the optimizer keeps it: the float32 weight, or a moment (`key`)."""
        if self._stage < 3:
            p.set_full_hp_param(whole.to(self.device), key)  # type: ignore[attr-defined]
            return
        size = self._local(
            p
        ).numel()  # the last share is padded; DeepSpeed's own setter of whole values overruns there
        self._zero.set_local_hp_param(cut(whole, self.rank * size, size).to(self.device), p, key)

    def _moments(self) -> dict[str, Piece]:
        """This rank's share of the optimizer's state; none before the first step."""
        self._link()
        steps = [float(s["step"]) for s in self._zero.optimizer.state.values() if "step" in s]
        pieces: dict[str, Piece] = {}
        for name, p in self._trained() if steps else []:
            pieces |= {
                f"{key}/{name}": piece
                for key in MOMENTS
                if (piece := self._moment(p, key)) is not None
            }
            if self.rank == 0:
                pieces[f"step/{name}"] = Piece.whole(torch.tensor(max(steps)))
        return pieces

    def _moment(self, p: nn.Parameter, key: str) -> Piece | None:
        if self._stage == 3:
            mine = self._zero.get_local_fp32_param(p, key).flatten()
            return Piece.part(mine, self.rank * len(mine), tuple(p.ds_shape))  # type: ignore[attr-defined]
        found = p._hp_mapping  # type: ignore[attr-defined]
        if found is None:  # all of it lies with other ranks
            return None
        start = found.lp_fragment_address.start
        return Piece.part(found.get_optim_state_fragment(key).flatten(), start, tuple(p.shape))

    def _pieces(self, prefix: str) -> dict[str, Piece]:
        module = self._engine.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        if self._stage < 3:
            return {
                prefix + name: Piece.whole(tensors[name]) for name in self._saved if self.rank == 0
            }
        pieces = {prefix + name: self._piece(tensors[name]) for name in self._saved}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    def _piece(self, t: Tensor) -> Piece | None:
        if not isinstance(t, nn.Parameter):
            return Piece.whole(t) if self.rank == 0 else None
        mine = self._local(t)
        return Piece.part(mine, self.rank * mine.numel(), tuple(t.ds_shape))  # type: ignore[attr-defined]

    @torch.no_grad()
    def _fill(self, prefix: str, saved: Mapping[str, Tensor]) -> None:
        module = self._engine.module
        for name, p in module.named_parameters():
            mine, whole = self._local(p), saved[prefix + name]
            mine.copy_(
                whole if self._stage < 3 else cut(whole, self.rank * mine.numel(), mine.numel())
            )
        for name, b in module.named_buffers():
            if name in self._saved:
                b.copy_(saved[prefix + name])


def _config(
    stage: int,
    cfg: ParallelConfig,
    world: int,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
) -> dict[str, Any]:
    # DeepSpeed's own sizes suit billions of parameters: a buffer of 2 GB, and below 1 billion everything stays gathered.
    bucket = max(SMALLEST_BUCKET, *sizes, sum(sizes) // 16)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
        zero["stage3_max_reuse_distance"] = zero["sub_group_size"] = bucket
        zero["stage3_prefetch_bucket_size"] = (
            bucket if device.type == "cuda" else 0
        )  # on a CPU it takes two layers' memory
        zero["stage3_max_live_parameters"] = 2 * bucket
    if cfg.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cfg.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": max(1, cfg.batch_size // (world * cfg.accumulate)),
        "gradient_accumulation_steps": cfg.accumulate,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {
            "enabled": dtype is not torch.float32,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "gradient_clipping": cfg.clip_norm or 0.0,
    }


def _scale_loss(zero: Any) -> Any:
    """fp16's loss scale, by DeepSpeed's own DynamicLossScaler; returns it.

    Under autocast DeepSpeed (0.19) takes torch's GradScaler instead, and never asks it to unscale: an overflow never lowers
    the scale, so no step is made any more, and what is clipped is the norm times the scale.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=FIRST_SCALE,
        scale_window=GROWS_AFTER,
        min_scale=LOWEST_SCALE / 2,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
    zero.torch_autocast_gradscaler, zero.loss_scaler, zero.dynamic_loss_scale = None, scaler, True
    return scaler


def _deepspeed(device: torch.device) -> Any:
    """DeepSpeed, set up to compile its operators with the ninja that was installed beside this Python."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    _remove_dead_locks()
    # DeepSpeed 0.19 calls torch 2.13 by deprecated names, and every layer of every step would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as e:
        raise ConfigError(
            f"zero needs DeepSpeed: {e}", fix="pip install 'raypipe[deepspeed]'"
        ) from None
    return deepspeed


def _remove_dead_locks() -> None:
    """A process killed while it compiled leaves its lock, and all later ones would wait for it for ever, in silence."""
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root())).glob(
        "**/lock"
    ):
        with contextlib.suppress(OSError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > COMPILES_WITHIN_S:
                log.warning("Removed the lock of a compilation that died: %s", lock)
                lock.unlink()
