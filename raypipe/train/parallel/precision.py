"""What a step computes in. Weights are float32 throughout; bf16 and fp16 are autocast over them.

On a CPU, oneDNN's bf16 gradient of a depthwise convolution is 5 times slower than its float32 one, while its other
convolutions gain 2 to 3 times (Intel Xeon with AMX, torch 2.13). So depthwise ones stay in float32: EfficientNet-Lite0 trains
at 32 ms an image instead of 75, against 44 in float32 alone (160 px, 3 frozen blocks, one thread, 2026-11-21).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


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


def keep_depthwise_float32(model: nn.Module) -> None:
    """Let the depthwise convolutions of a model compute in float32 under autocast, in place. Names and weights stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1 and not isinstance(module, _Float32):
            # A subclass of its own class: `forward` set on the instance would, in a copy, still use the first one's weights.
            module.__class__ = type(module.__class__.__name__, (_Float32, module.__class__), {})


class _Float32(nn.Module):
    """Takes and gives what the layers around it compute in."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            outputs: Tensor = super().forward(inputs.float())
        return outputs.to(inputs.dtype)
