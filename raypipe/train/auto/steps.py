"""What both finders share: the value they find, and an engine on one device to try steps with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from raypipe.train import parallel
from raypipe.train.job import TrainJob

FALLBACK_LR = 1e-3  # AdamW's default, and TrainConfig's


@dataclass(frozen=True)
class AutoValue:
    """The number in place of `auto`, and why."""

    value: float
    reason: str


def one_device_engine(
    job: TrainJob, model: nn.Module, batch_size: int, workers: int = 1
) -> parallel.Engine:
    """An engine on one device, whatever the strategy, ready to train.

    workers: whose batch it is; as many images as one of them has are computed at once.

    A sharded training has more room than this finds, and learns at the same rate.
    """
    changes = {
        "strategy": "single",
        "offload": "none",
        "compile": False,
        "batch_size": batch_size,
        "accumulate": job.train.accumulate * workers,
        "lr": FALLBACK_LR,
    }
    torch.manual_seed(job.run.seed)
    engine = parallel.build(model, job.train.model_copy(update=changes))
    engine.train()
    return engine
