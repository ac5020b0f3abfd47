"""How many floating-point operations a model takes for an image, and how many a GPU can do."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.train.shapes import without_values

log = logging.getLogger("raypipe")

# Dense TFLOP/s in (bf16, fp16, tf32, fp32) by words of the device's name, from NVIDIA's data
# sheets. 0: the GPU has no unit for it. Parts of a GPU (MIG) and other GPUs have no mfu.
PEAKS: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    ("H200", (989, 989, 495, 67)),
    ("H100 PCIE", (756, 756, 378, 51)),
    ("H100 NVL", (835, 835, 418, 60)),
    ("H100", (989, 989, 495, 67)),
    ("A100", (312, 312, 156, 19.5)),
    ("A30", (165, 165, 82, 10.3)),
    ("A10", (125, 125, 62.5, 31.2)),
    ("L40S", (362, 362, 183, 91.6)),
    ("L4", (121, 121, 60, 30.3)),
    ("T4", (0, 65, 8.1, 8.1)),
    ("V100 PCIE", (0, 112, 14, 14)),
    ("V100", (0, 125, 15.7, 15.7)),
)


def flops_per_image(model: nn.Module, inputs: Tensor) -> float:
    """FLOPs of a forward and a backward pass; 0 if they cannot be counted.

    They are counted on shapes alone (0.5 s for 50 layers), so a model that needs values has 0.

    inputs: one image or one row of features, on any device. Neither the model nor a random
    generator changes.
    """
    from torch.utils.flop_counter import FlopCounterMode

    rules = {torch.ops.aten.convolution_backward: _convolution_backward}
    # Two images: in training, batch norm refuses a single value.
    two = inputs.to("meta").expand(2, *inputs.shape[1:])
    try:
        with FlopCounterMode(display=False, custom_mapping=rules) as count:
            out = without_values(model)(two)
            if out.requires_grad:
                out.float().sum().backward()
    except Exception as e:
        # A model of the user's own may branch on values.
        log.debug("FLOPs are unknown: %s", e)
        return 0.0
    return count.get_total_flops() / 2


def _convolution_backward(
    out: list[int], x: list[int], w: list[int], *how: Any, **result: Any
) -> int:
    """As many FLOPs as forward for each wanted gradient, of inputs and of weights.

    torch's own rule counts grouped convolutions as dense ones: 14 times too many for
    EfficientNet-Lite0.
    """
    from torch.utils.flop_counter import conv_flop_count

    transposed, wanted = how[4], how[7]
    gradients = bool(wanted[0]) + bool(wanted[1])
    return conv_flop_count(x, w, out, transposed) * gradients


def peak_flops(name: str, dtype: torch.dtype) -> float:
    """The peak of a GPU by its name, in FLOP/s; 0 if it is unknown."""
    words = set(re.split("[ -]", name.upper()))
    if "MIG" in words:
        return 0.0
    if dtype == torch.bfloat16:
        column = 0
    elif dtype == torch.float16:
        column = 1
    elif torch.backends.cuda.matmul.allow_tf32:
        column = 2
    else:
        column = 3
    for known, tflops in PEAKS:
        if words.issuperset(known.split()):
            return 1e12 * tflops[column]
    return 0.0
