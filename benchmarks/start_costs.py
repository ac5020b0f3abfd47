"""What a trial costs, before it runs: seconds once, and seconds an epoch.

A convolutional backbone's time grows with the number of pixels. One measured forward pass
calibrates it for a machine and a backbone; the rest are ratios, measured with EfficientNet-Lite0 on
one core at 96 px (benchmarks/results/2026-11-25-portfolio.md):

- a training step of all blocks takes STEP times as long as an inference;
- with the stem and the lowest blocks frozen it takes SHARES of that. Low blocks see most pixels, so
  they cost most.

No search asks it: one measurement is as good as its moment (predicted / measured .60 to 1.19), and
a trial within a budget is stopped by the clock. `python -m benchmarks.portfolio` compares it with
measured epochs.

Pure: no clock, no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raypipe.train.job import TrainJob

STEP = 3.4  # measured epochs of five starts on four tasks
BLOCKS = 16  # of EfficientNet-Lite0; other backbones are taken to have as many
# (frozen blocks, a step's time / that without frozen blocks)
SHARES = ((0, 1.0), (1, 1.0), (3, 0.71), (5, 0.62), (8, 0.58), (11, 0.43), (14, 0.31), (16, 0.25))
HEAD_S = 2.5e-5  # an image through a head on stored features, with its share of a step


@dataclass(frozen=True)
class Speed:
    """A measurement: inference of one image, in a batch."""

    forward_s: float
    side_px: int

    def at(self, side_px: int) -> float:
        """Seconds of one image at another resolution."""
        return self.forward_s * (side_px / self.side_px) ** 2


@dataclass(frozen=True)
class Cost:
    """Seconds of a trial."""

    once_s: float
    """Before the first epoch: the features of a frozen backbone. Trials of one resolution share
    them."""

    epoch_s: float

    def total_s(self, epochs: int) -> float:
        return self.once_s + epochs * self.epoch_s


def cost(
    job: TrainJob, values: Mapping[str, Any], counts: Mapping[str, int], speeds: Mapping[str, Speed]
) -> Cost | None:
    """Of a trial with these values, by dotted field; other fields are the job's.

    counts: labelled images of the splits train and val. speeds: by backbone. None: this backbone
    was not measured.
    """
    name = values.get("model.name", job.model.name)
    speed = speeds.get(name)
    if speed is None:
        return None
    side_px = values.get("model.side_px") or job.model.pixels
    forward_s = speed.at(side_px)
    train, val = counts.get("train", 0), counts.get("val", 0)
    if values.get("model.mode", job.model.mode) == "frozen":
        return Cost((train + val) * forward_s, (train + val) * HEAD_S)
    step_s = (
        forward_s * STEP * frozen_share(values.get("model.frozen_blocks", job.model.frozen_blocks))
    )
    # Predictions of fine-tuned models may be means over several views.
    return Cost(0.0, train * step_s + val * forward_s * job.model.views)


def frozen_share(blocks: int) -> float:
    """A step's time with so many frozen blocks, as a share of that without: linear between
    SHARES."""
    for (low, high_share), (high, low_share) in itertools.pairwise(SHARES):
        if blocks <= high:
            return high_share + (low_share - high_share) * (blocks - low) / (high - low)
    return SHARES[-1][1]
