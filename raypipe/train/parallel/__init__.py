"""Strategies: how one model lives on one or many devices.

The training loop calls `forward` and `step` of an `Engine` and does not know the strategy. single,
ddp and fsdp are PyTorch's (gloo on CPU, nccl on GPU). zero1 to zero3 are DeepSpeed's, which is
imported only for them. At equal seed and global batch their losses agree to rounding, and each
loads the checkpoints of every other: a strategy changes memory and speed alone. To add one, write
a class with the eight methods of `Engine` and a line in `build`.

Tensor and pipeline parallelism are left out. They pay when one layer's activations or one sample
outgrow a device, or when a model spans nodes with slow links. The largest backbones of this field
(ViT-g, 1.0 billion parameters, 16 GB with AdamW in float32) fit two devices of 16 GB sharded, and
each layer of them is many times smaller than a device.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError
from raypipe.models.allocator import keep_memory
from raypipe.train.measure.meter import Meter
from raypipe.train.parallel.depthwise import speed_up_depthwise
from raypipe.train.parallel.engine import Criterion, Engine, ranks
from raypipe.train.parallel.memory import Choice, Need, choose, device_memory, need_of
from raypipe.train.parallel.norms import sync_batch_norms
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
    """The engine of this rank; `meter` times its steps.

    `example` has the shape of one input, on any device. With several ranks it serves to find
    parameters that no step reaches. Strategy `auto` is chosen by memory, and rank 0 logs why.
    Raises ConfigError if the strategy does not fit the model or the number of workers.
    """
    device = _current_device()
    dtype = compute_dtype(cfg.precision, device)
    _, world = ranks()
    meter = meter or Meter()
    meter.on(device, dtype, world)

    # Adapt the model before it is wrapped.
    skipped: list[str] = []
    if example is not None and world > 1:
        skipped = freeze_unreached(model, example)
    if device.type == "cpu" and dtype is not torch.float32:
        speed_up_depthwise(model)
    if cfg.sync_bn:
        model = sync_batch_norms(model, device, world)

    if cfg.strategy == "auto":
        cfg = _choose_strategy(model, cfg, device, dtype, example)
    if skipped and cfg.strategy not in ("single", "ddp"):
        raise ConfigError(
            f"{cfg.strategy} needs the same parameters in every step, "
            "and this model skips some at random",
            got=", ".join(skipped[:3]),
            fix="Set train.strategy=ddp, or switch the skipping off in model.options",
        )
    return _make_engine(model, cfg, device, dtype, meter, find_unused=bool(skipped))


def _make_engine(
    model: nn.Module,
    cfg: ParallelConfig,
    device: torch.device,
    dtype: torch.dtype,
    meter: Meter,
    find_unused: bool,
) -> Engine:
    """The engine of `cfg.strategy`, which is not auto any more."""
    from raypipe.train.parallel.fsdp import Fsdp
    from raypipe.train.parallel.native import Ddp, Single

    _, world = ranks()
    if cfg.strategy.startswith("zero"):
        from raypipe.train.parallel.zero import Zero

        stage = int(cfg.strategy[-1])
        return Zero(stage, model, cfg, device, dtype, meter)
    if cfg.strategy == "single" and world > 1:
        raise ConfigError(
            "single trains on one worker",
            got=f"train.workers={world}",
            fix="Set train.strategy=ddp",
        )
    if cfg.strategy == "fsdp":
        return Fsdp(model, cfg, device, dtype, meter)
    if device.type == "cpu":
        # Not for sharded models: the allocator would keep what each gathered layer frees,
        # and zero3 would save nothing over ddp.
        keep_memory()
    if world > 1:
        return Ddp(model, cfg, device, dtype, meter, find_unused=find_unused)
    return Single(model, cfg, device, dtype, meter)


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _choose_strategy(
    model: nn.Module,
    cfg: ParallelConfig,
    device: torch.device,
    dtype: torch.dtype,
    example: Tensor | None,
) -> ParallelConfig:
    """`cfg` with the strategy that the model's memory needs, and with its offloading on a GPU."""
    rank, world = ranks()
    # Rounded up: the largest micro batch counts.
    micro_batches = world * cfg.accumulate
    micro_batch = -(-int(cfg.batch_size) // micro_batches)
    need = need_of(
        model,
        example,
        micro_batch,
        dtype,
        ema=cfg.ema is not None,
        checkpointing=cfg.activation_checkpointing,
    )
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    choice = choose(need, world, device_memory(device, ranks_here))
    if rank == 0:
        log.info("Strategy: %s", choice.reason)
    # A user's own offload is kept. On a CPU there is no other memory to offload to.
    offload: str = cfg.offload
    if offload == "none" and device.type == "cuda":
        offload = choice.offload
    return cfg.model_copy(update={"strategy": choice.strategy, "offload": offload})
