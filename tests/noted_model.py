"""A small network that notes on which machine it is built, trains and predicts.

model: {name: "file:tests.noted_model:net", options: {notes: /shared/notes}}
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from torch import Tensor, nn


def net(pretrained: bool, notes: str, step_s: float = 0.0) -> nn.Module:
    """notes: an existing folder. step_s: how much longer each training step takes."""
    return Noted(notes, step_s)


class Noted(nn.Module):
    """A file for each thing that a process of a machine does: WHAT-MACHINE-PROCESS."""

    def __init__(self, notes: str, step_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self._notes, self._step_s = Path(notes), step_s
        self._note("built")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if not images_BCHW.is_meta:
            self._note("trained" if self.training else "predicted")
        if self.training:
            time.sleep(self._step_s)
        features: Tensor = self.layers(images_BCHW)
        return features

    def _note(self, what: str) -> None:
        (self._notes / f"{what}-{socket.gethostname()}-{os.getpid()}").touch()
