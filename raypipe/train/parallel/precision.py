"""What a step computes in. Weights are float32 throughout; bf16 and fp16 are autocast over them (depthwise.py: on a CPU)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from raypipe.errors import RaypipeError

FIRST_SCALE, GROWS_AFTER = (
    2.0**16,
    2000,
)  # fp16's loss scale and its steps without overflow, as torch's GradScaler
LOWEST_SCALE = 2.0**-10  # 26 steps in a row overflowed


def bf16_is_fast(device: torch.device) -> bool:
    """GPUs since Ampere, and CPUs with AVX512-BF16; on a CPU without it, autocast ran 4 times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What matrix products compute in. Sets the process's TF32 switches on CUDA."""
    if precision == "auto":
        precision = "bf16" if bf16_is_fast(device) else "fp32"
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            precision != "fp32"
        )
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def require_scale(scale: float) -> None:
    """Raise RaypipeError when fp16's loss scale has fallen so low that every step so far overflowed. Such steps are skipped:
    losses stay finite, and nothing is learned."""
    if scale < LOWEST_SCALE:
        raise RaypipeError(
            "Every step overflows fp16: nothing is learned",
            got=f"a loss scale of {scale:.2g}",
            fix="Set train.precision=bf16 or fp32, or lower train.lr",
        )


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return (
        contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
    )
