"""A small network that writes a line for each training step: the name of its trial.

model: {name: "file:tests.chaos.counted_model:net", options: {notes: /a/file, step_s: 0.01}}

Lines are appended in one write, so those of several processes stay whole, also if one is killed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn


def net(pretrained: bool, notes: str, step_s: float = 0.0) -> nn.Module:
    """notes: a file. step_s: how much longer each training step takes."""
    return Counted(notes, step_s)


class Counted(nn.Module):
    def __init__(self, notes: str, step_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self._notes, self._step_s = notes, step_s

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.training and not images_BCHW.is_meta:
            self._note()
            time.sleep(self._step_s)
        features: Tensor = self.layers(images_BCHW)
        return features

    def _note(self) -> None:
        from ray import tune

        folder = tune.get_context().get_trial_dir()
        # Tune appends `_` and letters where a kill made it forget the trial: it is the same one.
        trial = Path(folder).name.partition("_")[0] if folder else "none"
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{trial}\n".encode())
        finally:
            os.close(file)
