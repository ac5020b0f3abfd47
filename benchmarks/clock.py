"""A backbone that notes when each training step starts: both sides of benchmarks/step.py train it,
and it tells its own time.

A rank's file has a line when the backbone is built and one at each training forward pass: time
(monotonic, the same for all processes of a machine), CPU seconds of the process, and its resident
memory's peak above what it had before the backbone.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.models.backbones import BACKBONES

# 32 x 32 x 3: a layer of 38 MB, which the allocator takes from the system and gives back to it.
WIDTH = 3072


class Clocked(nn.Module):
    """`net`, timed from outside its graph."""

    def __init__(self, net: nn.Module, file: Path, before_mb: float) -> None:
        super().__init__()
        self.net, self._file, self._before_mb = net, file, before_mb

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.training:
            self.note()
        return self.net(images_BCHW)

    def note(self, **more: Any) -> None:
        """40 us: a ten-thousandth of a step."""
        line = {
            "t": time.monotonic(),
            "cpu": time.process_time(),
            "peak_mb": status_mb("VmHWM") - self._before_mb,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | more) + "\n")


def clocked(pretrained: bool, backbone: str, folder: str, deepspeed: bool) -> nn.Module:
    """`backbone` is one of ours, or wide-N: N square layers. `deepspeed` imports it before memory
    is counted.
    """
    if deepspeed:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed as _  # type: ignore[import-untyped]  # noqa: F401
    before_mb = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    net = (
        wide(pretrained, int(backbone[5:]))
        if backbone.startswith("wide-")
        else BACKBONES[backbone].build(pretrained)
    )
    # The driver builds it once, to see whether a package could: that is no rank's note.
    who = f"rank-{dist.get_rank()}" if dist.is_initialized() else "driver"
    model = Clocked(net, Path(folder) / f"{who}.jsonl", before_mb)
    model.note(threads=torch.get_num_threads(), nice=os.nice(0))
    return model


def wide(pretrained: bool, layers: int) -> nn.Module:
    """Nearly all of its memory is parameters, gradients and optimizer state."""
    return nn.Sequential(nn.Flatten(), *(Layer() for _ in range(layers)))


class Layer(nn.Module):
    """A block that repeats, which fsdp gathers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).relu()


def status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
