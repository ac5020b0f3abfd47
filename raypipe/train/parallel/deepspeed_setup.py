"""How raypipe imports and configures DeepSpeed. zero.py trains with it."""

from __future__ import annotations

import logging
import os
import sysconfig
import warnings
from typing import Any

import torch

from raypipe import torch_cache
from raypipe.errors import ConfigError
from raypipe.train.parallel.deepspeed_private import build_no_operator
from raypipe.train.parallel.settings import ParallelConfig

log = logging.getLogger("raypipe")
# Elements of the smallest message: 25 MB in float32, as DDP's.
SMALLEST_BUCKET = 6_500_000


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, set up to compile its operators with the ninja beside this Python.

    Raises ConfigError if it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    _remove_dead_locks()
    # DeepSpeed 0.19 calls torch 2.13 by deprecated names. Every layer of every step would warn.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as e:
        raise ConfigError(
            f"zero needs DeepSpeed: {e}", fix="pip install 'raypipe[deepspeed]'"
        ) from None
    build_no_operator()
    return deepspeed


def engine_config(
    stage: int,
    cfg: ParallelConfig,
    world: int,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
) -> dict[str, Any]:
    """DeepSpeed's configuration for `stage` 1 to 3. `sizes`: elements of each parameter."""
    # DeepSpeed's default sizes suit billions of parameters: a buffer of 2 GB, and a model
    # below 1 billion parameters would stay gathered. So sizes follow the model here.
    bucket = max(SMALLEST_BUCKET, *sizes, sum(sizes) // 16)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
        zero["stage3_max_reuse_distance"] = bucket
        zero["sub_group_size"] = bucket
        # On a CPU, prefetching takes the memory of two layers.
        zero["stage3_prefetch_bucket_size"] = bucket if device.type == "cuda" else 0
        zero["stage3_max_live_parameters"] = 2 * bucket
    if cfg.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cfg.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    autocast = {
        "enabled": dtype is not torch.float32,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return {
        "train_micro_batch_size_per_gpu": max(1, cfg.batch_size // (world * cfg.accumulate)),
        "gradient_accumulation_steps": cfg.accumulate,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": autocast,
        "gradient_clipping": cfg.clip_norm or 0.0,
    }


def _remove_dead_locks() -> None:
    """Remove the locks of compilations that died."""
    for lock in torch_cache.dead_locks():
        # Another rank may have removed it already.
        lock.unlink(missing_ok=True)
        log.warning("Removed the lock of a compilation that died: %s", lock)
