"""Claim: the driver hashes no checkpoint twice, and 64 workers publish one in a second.

The ranks are threads of this process, one after the other, each with a tiny shard: what is measured
is the protocol, and not the disk. hash_gb_per_s: the rate at which a file of ViT-L's weights is
hashed here, of zeros that no disk holds. So an hour of hashing is 3,600 times this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale.simulated import FILE_GB
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot

TENSORS = 296  # of ViT-L, each cut into a piece for every rank


def _shard(rank: int, workers: int) -> Snapshot:
    shape = (workers,)
    pieces = {f"block.{n}": Piece(torch.zeros(1), rank, shape) for n in range(TENSORS)}
    return Snapshot(pieces, pieces)


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, Any]:
    workers, folder = sizes["workers"], Path(temporary) / checkpoint.name(1)
    began = time.perf_counter()
    for rank in range(workers):
        checkpoint.write_part(folder, _shard(rank, workers), rank, "attempt")
    parts_s = time.perf_counter() - began
    began = time.perf_counter()
    checkpoint.publish(folder, LoopState(epoch=1), workers, "attempt", 0.0)
    publish_s = time.perf_counter() - began
    began = time.perf_counter()
    problem = checkpoint.verify(folder)
    assert problem is None, problem
    verify_s = time.perf_counter() - began
    began = time.perf_counter()
    weights = dict(checkpoint.read(folder, verified=True).weights)
    return {
        "workers": workers,
        "part_ms": parts_s / workers * 1000,
        "publish_s": publish_s,
        "verify_s": verify_s,
        "read_s": time.perf_counter() - began,
        "tensors": len(weights),
        "manifest_mb": (folder / checkpoint.MANIFEST).stat().st_size / 1e6,
        "hash_gb_per_s": _hash_rate(Path(temporary) / "weights"),
    }


def _hash_rate(file: Path) -> float:
    with file.open("wb") as sparse:
        sparse.truncate(int(FILE_GB["weights"] * 1e9))
    began = time.perf_counter()
    checkpoint._sha256(file)
    return FILE_GB["weights"] / (time.perf_counter() - began)
