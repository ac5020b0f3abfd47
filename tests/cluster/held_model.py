"""A small network that trains as soon as a file is there.

model: {name: "file:tests.cluster.held_model:net", options: {until: /a/file}}
"""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, nn


def net(pretrained: bool, until: str) -> nn.Module:
    """until: the file. A step of training waits for it."""
    return Held(until)


class Held(nn.Module):
    def __init__(self, until: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self._until = Path(until)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        while self.training and not images_BCHW.is_meta and not self._until.exists():
            time.sleep(0.1)
        features: Tensor = self.layers(images_BCHW)
        return features
