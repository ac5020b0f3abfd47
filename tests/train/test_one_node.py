"""The process group of workers that share a node: its store listens nowhere, and does not stay."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypipe.train.one_node import NodeConfig

EVERYWHERE = ("0.0.0.0", "::")


def told(config: dict[str, str]) -> None:
    """In each worker: sum the ranks, and count the ports that other hosts may reach."""
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    listening = psutil.Process().net_connections("tcp")
    ports = [each for each in listening if each.status == "LISTEN" and each.laddr.ip in EVERYWHERE]
    path = Path(config["folder"]) / str(train.get_context().get_world_rank())
    env = os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
    path.write_text(f"{total.item():.0f} {env} {len(ports)}")


def killed_once(config: dict[str, str]) -> None:
    """The first worker of the first group is killed."""
    mark = Path(config["folder"]) / "killed"
    dist.all_reduce(torch.tensor([1.0]))
    if dist.get_rank() == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.tensor([1.0]))
    (Path(config["folder"]) / f"done-{dist.get_rank()}").touch()


@pytest.mark.slow  # 30 s: Ray waits before it starts the group again
def test_a_killed_worker_leaves_no_store(ray_session: str, tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("raypipe-group-*"))
    TorchTrainer(
        killed_once,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=False, resources_per_worker={"CPU": 0.5}
        ),
        torch_config=NodeConfig(backend="gloo", timeout_s=20),
        run_config=RunConfig(
            name="killed",
            storage_path=str(tmp_path / "ray"),
            failure_config=FailureConfig(max_failures=2),
        ),
    ).fit()
    assert {path.name for path in tmp_path.glob("*[d-]*")} >= {"killed", "done-0", "done-1"}
    assert set(Path(tempfile.gettempdir()).glob("raypipe-group-*")) <= before


@pytest.mark.parametrize(
    ("workers", "total"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=[pytest.mark.slow, pytest.mark.share]),
    ],
)
def test_no_store_listens_for_other_hosts_and_none_is_left(
    ray_session: str, tmp_path: Path, workers: int, total: int
) -> None:
    def left() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("raypipe-group-*"))

    before = left()
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
        env = str(rank), str(rank), str(workers)
        assert (tmp_path / str(rank)).read_text() == f"{total} {env} 1", "Ray's own port"
    assert left() <= before
