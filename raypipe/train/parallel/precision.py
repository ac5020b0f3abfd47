"""What a step computes in. Weights are float32 throughout; bf16 and fp16 are autocast over them (depthwise.py: on a CPU)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


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
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
