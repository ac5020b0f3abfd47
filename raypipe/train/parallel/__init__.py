"""Strategies: how one model lives on one or many devices. The loop calls `forward` and `step` and never asks which it is.

single, ddp and fsdp are PyTorch's (gloo on CPU, nccl on GPU), zero1 to zero3 are DeepSpeed's, which is imported only when asked
for. At equal seed and global batch their losses agree to rounding, and what one saved another loads: a strategy is a matter of
memory and speed alone. A new one is a class with the eight methods of `Engine`, and a line in `build`.

Tensor and pipeline parallelism are left out. They pay when one layer's activations or one sample outgrow a device, or when a
model spans nodes that are linked slowly; the largest backbones of this field (ViT-g, 1.0 billion parameters, 16 GB with
AdamW in float32) fit two devices of 16 GB sharded, and any one layer of them fits a device many times.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError
from raypipe.models.allocator import keep_memory
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.depthwise import quicken
from raypipe.train.parallel.engine import Criterion, Engine, ranks
from raypipe.train.parallel.memory import Choice, Need, choose, device_memory, need_of
from raypipe.train.parallel.norms import synchronise
from raypipe.train.parallel.precision import compute_dtype
from raypipe.train.parallel.reach import freeze_unreached
from raypipe.train.parallel.settings import ParallelConfig
from raypipe.train.parallel.snapshot import Snapshot

__all__ = [
    "Choice",
    "Criterion",
    "Engine",
    "Need",
    "ParallelConfig",
    "Snapshot",
    "build",
    "choose",
    "ranks",
]

log = logging.getLogger("raypipe")


def build(
    model: nn.Module, cfg: ParallelConfig, meter: Meter | None = None, example: Tensor | None = None
) -> Engine:
    """The engine for this rank, timed by `meter`. `auto` chooses by memory, and rank 0 says why.

    `example` has the shape of one input, on any device: several ranks need it to find parameters that no step reaches.
    """
    from raypipe.train.parallel.native import Ddp, Fsdp, Single

    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    dtype = compute_dtype(cfg.precision, device)
    world = ranks()[1]
    meter = meter or Meter()
    meter.on(device, dtype, world)
    sometimes = freeze_unreached(model, example) if example is not None and world > 1 else []
    if device.type == "cpu" and dtype is not torch.float32:
        quicken(model)
    if cfg.sync_bn:
        model = synchronise(model, device, world)
    if cfg.strategy == "auto":
        cfg = _decided(model, cfg, device, dtype, example)
    if sometimes and cfg.strategy not in ("single", "ddp"):
        raise ConfigError(
            f"{cfg.strategy} needs the same parameters in every step, and this model skips some at random",
            got=", ".join(sometimes[:3]),
            fix="Set train.strategy=ddp, or switch the skipping off in model.options",
        )
    if cfg.strategy.startswith("zero"):
        from raypipe.train.parallel.zero import Zero

        return Zero(int(cfg.strategy[-1]), model, cfg, device, dtype, meter)
    if cfg.strategy == "single" and world > 1:
        raise ConfigError(
            "single trains on one worker",
            got=f"train.workers={world}",
            fix="Set train.strategy=ddp",
        )
    if cfg.strategy == "fsdp":
        return Fsdp(model, cfg, device, dtype, meter)
    if device.type == "cpu":
        keep_memory()  # not where a model is sharded: what each gathering frees would stay, and zero3 save nothing over ddp
    if world > 1:
        return Ddp(model, cfg, device, dtype, meter, searching=bool(sometimes))
    return Single(model, cfg, device, dtype, meter)


def _decided(
    model: nn.Module,
    cfg: ParallelConfig,
    device: torch.device,
    dtype: torch.dtype,
    example: Tensor | None,
) -> ParallelConfig:
    rank, world = ranks()
    micro_batch = -(-int(cfg.batch_size) // (world * cfg.accumulate))
    need = need_of(
        model, example, micro_batch, dtype, cfg.ema is not None, cfg.activation_checkpointing
    )
    choice = choose(
        need, world, device_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    )
    if rank == 0:
        log.info("Strategy: %s", choice.reason)
    offload = choice.offload if cfg.offload == "none" and device.type == "cuda" else cfg.offload
    return cfg.model_copy(update={"strategy": choice.strategy, "offload": offload})
