"""The work of test_uneven.py's three ranks: fit a head in batches that three cannot share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.config import validate
from raypipe.feed.feed import Source
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Engine
from raypipe.train.worker import Data, train_rank

from ..pixels import memory
from . import ranks

CASES: dict[str, dict[str, object]] = {
    "uneven": {"batch_size": 16},
    "micro": {"batch_size": 16, "accumulate": 6},  # the smallest part holds 5
    "stand-ins": {"batch_size": 2},  # one rank in three has no image of its own
}


def features(rows: int, seed: int) -> Source:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    return memory((rng.normal(labels[:, None], 1.0, (rows, 8))).astype(np.float32), labels)


def trained(case: str) -> dict[str, Tensor]:
    """The weights, and each epoch's training loss, of this rank's run."""
    settings = {
        "epochs": 2,
        "lr": 0.05,
        "precision": "fp32",
        "clip_norm": 0.1,
        "stopping": {"patience": None},
    }
    tree = {"table": {"uri": "unused"}, "model": {"dropout": 0.0}, "train": settings | CASES[case]}
    kept: dict[str, Tensor] = {}

    def save(state: LoopState, engine: Engine) -> None:
        kept.update(
            {name: piece.values.clone() for name, piece in engine.snapshot().weights.items()}
        )

    data = Data(("a", "b"), True, features(59, 0), features(20, 1))
    state = train_rank(validate(TrainJob, tree), data, None, save, lambda *_: None)
    return kept | {"losses": torch.tensor([m["train_loss"] for m in state.history])}


def _rank(rank: int, world: int, folder: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    for case in CASES:
        found = trained(case)
        if rank == 0:
            torch.save(found, folder / f"{case}.pt")
        dist.barrier()


def run(world: int, folder: Path) -> None:
    ranks.start(_rank, (world, folder), world)
