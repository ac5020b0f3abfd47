"""What only a GPU shows, and that the loop runs without Ray (`pytest --noconftest`, gpu.py).

Ranks are processes of their own: a CUDA context cannot be inherited.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import gpu, pictures
from raypipe.models.zoo import ModelConfig
from raypipe.train import parallel

from .parallel_ranks import Scenario, tiny, train

KNOWS_NONE = """
import importlib, pkgutil, sys
import raypipe.images, raypipe.models, raypipe.train.loop, raypipe.train.parallel
for room in (raypipe.images, raypipe.models, raypipe.train.parallel):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
heavy = "ray", "deltalake", "mlflow", "deepspeed", "scipy.special"
print([name for name in heavy if name in sys.modules])
"""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def test_the_loop_and_what_it_stands_on_import_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KNOWS_NONE], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_loop_trains_from_a_folder_of_files(tmp_path: Path) -> None:
    files, cpu = pictures.jpegs(tmp_path, 6), torch.device("cpu")
    model = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    engine, objective = gpu.trained(model, cpu, strategy="single", precision="fp32")
    batch = next(gpu.from_folder(files, 4, 32, cpu)())
    assert (
        batch.inputs.shape == (4, 32, 32, 3) and batch.inputs.float().std() > 10
    )  # pictures, not what the memory held
    assert gpu.rate(engine, objective, gpu.from_folder(files, 4, 32, cpu), 4, gpu.WARM_UP + 2) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_says_in_a_line_that_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "gpu-check skipped: torch sees no GPU here\n")


def _rank(rank: int, scenarios: list[Scenario], folder: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", f"file://{folder / 'meeting'}", rank=rank, world_size=1
    )
    for scenario in scenarios:
        torch.save(train(scenario, folder), folder / f"{scenario.name}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario told that ran on the first GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    scenarios = [
        Scenario("single", "single"),
        Scenario("clipped", "single", settings={"clip_norm": 0.5}),
        Scenario("fp16", "single", settings={"precision": "fp16", "clip_norm": 0.5}),
        Scenario("bf16", "single", settings={"precision": "bf16", "clip_norm": 0.5}),
        Scenario("compiled", "single", settings={"compile": True}),
        Scenario("fsdp", "fsdp"),
        Scenario("offloaded", "fsdp", settings={"offload": "parameters"}),
    ]
    mp.spawn(_rank, (scenarios, folder), nprocs=1)
    return {s.name: torch.load(folder / f"{s.name}.pt", weights_only=True) for s in scenarios}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "like", "rel"),
    [
        ("compiled", "single", 1e-3),
        ("fsdp", "single", 1e-3),
        ("offloaded", "single", 1e-3),
        ("bf16", "clipped", 0.02),
        ("fp16", "clipped", 0.02),
    ],
)
def test_every_way_learns_on_a_gpu_what_fp32_does(
    told: dict[str, dict[str, Any]], name: str, like: str, rel: float
) -> None:
    assert told[name]["losses"] == pytest.approx(told[like]["losses"], rel=rel)


@pytest.mark.gpu
@needs_gpu
def test_fp16_skips_an_overflowing_step_and_halves_its_scale() -> None:
    cfg = parallel.ParallelConfig(strategy="single", precision="fp16", batch_size=16)
    engine = parallel.build(tiny(), cfg)
    engine.train()
    images, labels_B = (
        torch.ones(16, 8, 8, 3, device=engine.device),
        torch.zeros(16, dtype=torch.int64, device=engine.device),
    )
    before = engine.snapshot().weights
    engine.step(images, labels_B, lambda logits, targets: logits.sum() * torch.inf)
    after = engine.snapshot()
    assert all(
        torch.equal(before[name].values, piece.values) for name, piece in after.weights.items()
    )
    assert after.facts["scaler"]["scale"] == 2.0**15
