"""Faster depthwise convolutions where a CPU autocasts to bf16; oneDNN's gradients of them are slow.

Measured on one thread of an Intel Xeon with AMX, torch 2.13, in milliseconds an image (672 channels
of 14 x 14, kernel 5 x 5). The forward pass takes 0.14 in bf16 and 0.21 in float32. The gradient of
the weights takes 7.7 in bf16 and 1.7 in float32. For a kernel of 5 x 3 that gradient takes 0.16 in
float32, because oneDNN is fast up to three columns. So:

- A convolution that keeps the size of the image runs forward in bf16. Its input gradient, which is
  a convolution with the flipped kernel, runs in bf16 too. Its weight gradient runs in float32, and
  for a kernel of five columns in three parts.
- All other depthwise convolutions run in float32.

Letters in names: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHANNELS_LAST = torch.channels_last
convolution = torch.ops.aten.convolution
convolution_backward = torch.ops.aten.convolution_backward


def speed_up_depthwise(model: nn.Module) -> None:
    """Change the depthwise convolutions of a model as above, in place. Names and weights stay."""
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or isinstance(module, _Quick | _Float32):
            continue
        if module.groups == module.in_channels > 1:
            kind = _Quick if _keeps_size(module) else _Float32
            # A subclass of its own class. A `forward` set on the instance would still use the
            # first module's weights in a deep copy.
            module.__class__ = type(module.__class__.__name__, (kind, module.__class__), {})


def _keeps_size(conv: nn.Conv2d) -> bool:
    """Is this a convolution that `_Same` computes: square, stride 1, zero-padded, no bias?"""
    k = conv.kernel_size[0]
    if k not in (3, 5):
        return False
    # Some models give lists instead of tuples.
    if conv.kernel_size != (k, k) or tuple(conv.padding) != (k // 2, k // 2):
        return False
    if tuple(conv.stride) != (1, 1) or tuple(conv.dilation) != (1, 1):
        return False
    if conv.padding_mode != "zeros" or conv.out_channels != conv.in_channels:
        return False
    return conv.bias is None and type(conv).forward is nn.Conv2d.forward


class _Float32(nn.Module):
    """Computes in float32; input and output keep the dtype of the neighbouring layers."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            outputs: Tensor = super().forward(inputs.float())
        return outputs.to(inputs.dtype)


class _Quick(nn.Module):
    """Computes with `_Same` under a CPU's autocast, and as before without."""

    weight: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return super().forward(inputs)  # type: ignore[no-any-return]
        inputs = inputs.to(torch.get_autocast_dtype("cpu"))
        with torch.autocast("cpu", enabled=False):
            return _Same.apply(inputs, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class _Same(torch.autograd.Function):
    """A depthwise convolution that keeps the image's size, with the fast gradients."""

    @staticmethod
    def forward(ctx: Any, inputs_BCHW: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_BCHW, weight)
        return _same(inputs_BCHW, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs_BCHW, weight = ctx.saved_tensors
        needs_input_grad, needs_weight_grad = ctx.needs_input_grad
        input_grad, weight_grad = None, None
        with torch.autocast("cpu", enabled=False):
            if needs_input_grad:
                input_grad = _same(grad_BCHW, weight.flip(2, 3))
            if needs_weight_grad:
                weight_grad = _weight_grad(inputs_BCHW, grad_BCHW, weight.shape[-1])
        return input_grad, weight_grad


def _same(inputs_BCHW: Tensor, weight: Tensor) -> Tensor:
    """The convolution of each channel with its own kernel, in the dtype of the inputs."""
    channels = len(weight)
    padding = [weight.shape[-1] // 2] * 2
    kernel = weight.to(inputs_BCHW.dtype)
    return convolution(  # type: ignore[no-any-return]
        inputs_BCHW, kernel, None, [1, 1], padding, [1, 1], False, [0, 0], channels
    )


def _weight_grad(inputs_BCHW: Tensor, grad_BCHW: Tensor, k: int) -> Tensor:
    """The gradient of a k x k kernel, in float32; k is 3 or 5.

    Column j of the kernel reads the image j - k // 2 columns to the right of its output. So the
    gradient of an outer column of five is that of the middle column for outputs moved by two.
    """
    inputs = inputs_BCHW.to(torch.float32, memory_format=CHANNELS_LAST)
    grad = grad_BCHW.to(torch.float32, memory_format=CHANNELS_LAST)
    if k == 3:
        return _columns(inputs, grad, 3, 3)

    middle = _columns(inputs, grad, k, 3)
    moved = torch.empty_like(grad)
    # The left column: outputs move two columns to the left, and zeros follow.
    moved[..., :-2] = grad_BCHW[..., 2:]
    moved[..., -2:] = 0
    left = _columns(inputs, moved, k, 1)
    # The right column, the other way round.
    moved[..., 2:] = grad_BCHW[..., :-2]
    moved[..., :2] = 0
    right = _columns(inputs, moved, k, 1)
    return torch.cat([left, middle, right], dim=3)


def _columns(inputs: Tensor, grad: Tensor, rows: int, columns: int) -> Tensor:
    """The gradient of a kernel's middle columns."""
    channels = inputs.shape[1]
    weight_shape = inputs.new_empty(channels, 1, rows, columns)
    padding = [rows // 2, columns // 2]
    # Of the gradients of input, weight and bias, compute the weight's.
    mask = [False, True, False]
    return convolution_backward(  # type: ignore[no-any-return]
        grad, inputs, weight_shape, None, [1, 1], padding, [1, 1], False, [0, 0], channels, mask
    )[1]
