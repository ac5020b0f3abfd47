"""The process group of workers that share a node: who can reach its store."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypipe.train.one_node import NodeConfig


def told(config: dict[str, str]) -> None:
    """In each worker: sum the ranks, and note where the store listens."""
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    port = int(os.environ["MASTER_PORT"])
    hosts = {
        each.laddr.ip
        for each in psutil.net_connections("tcp")
        if each.status == "LISTEN" and each.laddr.port == port
    }
    path = Path(config["folder"]) / str(train.get_context().get_world_rank())
    path.write_text(f"{total.item():.0f} {dist.get_world_size()} {' '.join(hosts)}")


@pytest.mark.parametrize(("workers", "total"), [(1, 1), (2, 3)])
def test_the_store_listens_on_loopback_alone(
    ray_session: str, tmp_path: Path, workers: int, total: int
) -> None:
    TorchTrainer(
        told,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=False, resources_per_worker={"CPU": 0.5}
        ),
        torch_config=NodeConfig(backend="gloo", timeout_s=60),
        run_config=RunConfig(name="store", storage_path=str(tmp_path / "ray")),
    ).fit()
    for rank in range(workers):
        assert (tmp_path / str(rank)).read_text() == f"{total} {workers} 127.0.0.1"
