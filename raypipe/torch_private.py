"""Torch's private names that raypipe needs, all in one file.

An upgrade of torch may move any of them; tests/test_torch_private.py names the one that moved. Each
door says why no public name does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def resize_antialiased(source_NCHW: Tensor, size_HW: Sequence[int], out_NCHW: Tensor) -> None:
    """Bilinear resampling with antialiasing into `out_NCHW`, uint8 or float.

    interpolate(antialias=True) takes no `out`. It returns NCHW, and turning that into HWC costs as
    much as the resampling.
    """
    torch.ops.aten._upsample_bilinear2d_aa.out(
        source_NCHW, size_HW, False, None, None, out=out_NCHW
    )


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of the same storage share, on the meta device too.

    There `data_ptr()` is 0 for every tensor.
    """
    return int(tensor.untyped_storage()._cdata)


def lerp_all(targets: list[Tensor], towards: list[Tensor], weight: float) -> None:
    """target += weight * (towards - target) for all pairs, in a few kernels instead of one each.

    torch.optim does its own updates this way, and offers them to nobody.
    """
    torch._foreach_lerp_(targets, towards, weight)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in a few kernels instead of one each."""
    torch._foreach_copy_(targets, sources)


def ddp_exposed_s(wrapped: DistributedDataParallel) -> float:
    """Seconds a step from the last gradient to the last sum, which no computation hides.

    It is the mean of the steps that DDP times: the first 10 and each 100th. Publicly, only its log
    has them.
    """
    times_ns = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    communication = times_ns.get("avg_backward_comm_time", 0)
    hidden = times_ns.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0.0, communication - hidden) / 1e9
