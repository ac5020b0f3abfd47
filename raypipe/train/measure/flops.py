"""How many floating-point operations a model takes for an image, and how many a GPU could do: what utilisation is made of."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.train.shapes import without_values

log = logging.getLogger("raypipe")

# Dense TFLOP/s in (bf16, fp16, tf32, fp32) by words of the device's name, from NVIDIA's data sheets. 0: no unit for it. Parts
# of a GPU (MIG) and GPUs that are not here have no mfu.
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
    """Of the forward and the backward pass, counted on shapes alone (0.5 s for 50 layers); 0 for a model that needs values.

    `inputs` are one image or one row of features, of any device. Neither the model nor a generator changes.
    """
    from torch.utils.flop_counter import FlopCounterMode

    rules = {torch.ops.aten.convolution_backward: _convolution_backward}
    two = inputs.to("meta").expand(
        2, *inputs.shape[1:]
    )  # batch norms refuse to learn from one value
    try:
        with FlopCounterMode(display=False, custom_mapping=rules) as count:
            out = without_values(model)(two)
            if out.requires_grad:
                out.float().sum().backward()
    except Exception as e:  # a model of the user's own may branch on values
        log.debug("FLOPs are unknown: %s", e)
        return 0.0
    return count.get_total_flops() / 2


def _convolution_backward(
    out: list[int], x: list[int], w: list[int], *how: Any, **result: Any
) -> int:
    """As many as forward for each wanted gradient, of inputs and of weights. torch's own rule takes grouped convolutions for
    dense ones, and counts 14 times too many for EfficientNet-Lite0."""
    from torch.utils.flop_counter import conv_flop_count

    transposed, wanted = how[4], how[7]
    return conv_flop_count(x, w, out, transposed) * (bool(wanted[0]) + bool(wanted[1]))


def peak_flops(name: str, dtype: torch.dtype) -> float:
    """Of a GPU by its name, in FLOP/s; 0 where it is not known."""
    words = set(re.split("[ -]", name.upper()))
    if "MIG" in words:
        return 0.0
    precise = 2 if torch.backends.cuda.matmul.allow_tf32 else 3
    column = {torch.bfloat16: 0, torch.float16: 1}.get(dtype, precise)
    return 1e12 * next(
        (row[column] for known, row in PEAKS if words.issuperset(known.split())), 0.0
    )
