"""Depthwise convolutions where a CPU autocasts to bf16: oneDNN's gradients of them are slow, and how they are put matters.

One thread of an Intel Xeon with AMX, torch 2.13, milliseconds an image (672 channels of 14 x 14, kernel 5 x 5): the forward
pass takes 0.14 in bf16 and 0.21 in float32, the gradient of the weights 7.7 and 1.7; of a kernel of 5 x 3 it takes 0.16 in
float32, for oneDNN is fast up to three columns. So:

- those that keep the size of the image compute forward, and the gradient of the input (a convolution, too, with the kernel
  turned round), in bf16; the gradient of the weights in float32, and of a kernel of five columns in three parts;
- all others compute in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHANNELS_LAST = torch.channels_last
convolution, convolution_backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward


def quicken(model: nn.Module) -> None:
    """Let the depthwise convolutions of a model compute as above under a CPU's autocast, in place. Names and weights stay."""
    for module in model.modules():
        if (
            isinstance(module, nn.Conv2d)
            and module.groups == module.in_channels > 1
            and not isinstance(module, _Quick | _Float32)
        ):
            # A subclass of its own class: `forward` set on the instance would, in a copy, still use the first one's weights.
            how = _Quick if _keeps_size(module) else _Float32
            module.__class__ = type(module.__class__.__name__, (how, module.__class__), {})


def _keeps_size(conv: nn.Conv2d) -> bool:
    k = conv.kernel_size[0]
    same = (
        conv.kernel_size == (k, k)
        and tuple(conv.padding) == (k // 2, k // 2)
        and conv.padding_mode == "zeros"
    )
    plain = (
        type(conv).forward is nn.Conv2d.forward
        and conv.bias is None
        and conv.out_channels == conv.in_channels
    )
    return same and plain and k in (3, 5) and tuple(conv.stride) == tuple(conv.dilation) == (1, 1)


class _Float32(nn.Module):
    """Takes and gives what the layers around it compute in."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            outputs: Tensor = super().forward(inputs.float())
        return outputs.to(inputs.dtype)


class _Quick(nn.Module):
    weight: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return super().forward(inputs)  # type: ignore[no-any-return]
        with torch.autocast("cpu", enabled=False):
            return _Same.apply(inputs.to(torch.get_autocast_dtype("cpu")), self.weight)  # type: ignore[no-untyped-call, no-any-return]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs_BCHW: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_BCHW, weight)
        return _same(inputs_BCHW, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs_BCHW, weight = ctx.saved_tensors
        of_inputs, of_weight = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            return (
                _same(grad_BCHW, weight.flip(2, 3)) if of_inputs else None,
                _weight_grad(inputs_BCHW, grad_BCHW, weight.shape[-1]) if of_weight else None,
            )


def _same(inputs_BCHW: Tensor, weight: Tensor) -> Tensor:
    k, c = weight.shape[-1], len(weight)
    kernel = weight.to(inputs_BCHW.dtype)
    return convolution(
        inputs_BCHW, kernel, None, [1, 1], [k // 2, k // 2], [1, 1], False, [0, 0], c
    )  # type: ignore[no-any-return]


def _weight_grad(inputs_BCHW: Tensor, grad_BCHW: Tensor, k: int) -> Tensor:
    """float32. Column j of a kernel of k sees the image j - k // 2 columns further right than where its output lies; so the
    outer columns of five are the middle one of a kernel whose outputs are moved by two."""
    inputs = inputs_BCHW.to(torch.float32, memory_format=CHANNELS_LAST)
    grad = grad_BCHW.to(torch.float32, memory_format=CHANNELS_LAST)
    if k == 3:
        return _columns(inputs, grad, 3, 3)
    moved = torch.empty_like(grad)
    moved[..., :-2], moved[..., -2:] = grad_BCHW[..., 2:], 0
    left = _columns(inputs, moved, k, 1)
    moved[..., 2:], moved[..., :2] = grad_BCHW[..., :-2], 0
    return torch.cat([left, _columns(inputs, grad, k, 3), _columns(inputs, moved, k, 1)], dim=3)


def _columns(inputs: Tensor, grad: Tensor, rows: int, columns: int) -> Tensor:
    """The gradient of the middle columns."""
    c = inputs.shape[1]
    shape, padding = inputs.new_empty(c, 1, rows, columns), [rows // 2, columns // 2]
    wanted = [False, True, False]
    return convolution_backward(
        grad, inputs, shape, None, [1, 1], padding, [1, 1], False, [0, 0], c, wanted
    )[1]  # type: ignore[no-any-return]
