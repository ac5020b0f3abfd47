"""The dtype of a step's matrix products.

Weights are float32 throughout. bf16 and fp16 are autocast over them; depthwise.py says what that
means for depthwise convolutions on a CPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from raypipe.errors import RaypipeError

# fp16's first loss scale, and the steps without overflow after which it doubles: as GradScaler.
FIRST_SCALE = 2.0**16
GROWS_AFTER = 2000
# Below it, 26 steps in a row have overflowed.
LOWEST_SCALE = 2.0**-10


def bf16_is_fast(device: torch.device) -> bool:
    """True for GPUs since Ampere, and for CPUs with AVX512-BF16.

    On a CPU without it, autocast ran 4 times slower than fp32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products. On CUDA it also sets the process's TF32 switches."""
    if precision == "auto":
        precision = "bf16" if bf16_is_fast(device) else "fp32"
    if device.type == "cuda":
        allow_tf32 = precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cudnn.allow_tf32 = allow_tf32
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def require_scale(scale: float) -> None:
    """Raise RaypipeError if fp16's loss scale is so low that every step so far overflowed.

    Such steps are skipped: losses stay finite, and the model learns nothing.
    """
    if scale < LOWEST_SCALE:
        raise RaypipeError(
            "Every step overflows fp16: nothing is learned",
            got=f"a loss scale of {scale:.2g}",
            fix="Set train.precision=bf16 or fp32, or lower train.lr",
        )


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """A context in which matrix products compute in `dtype`."""
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)
