"""The work of test_parallel.py's ranks: train a tiny model in each scenario, save the results."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raypipe.train import checkpoint, parallel
from raypipe.train.loop import LoopState
from raypipe.train.parallel import fsdp

from . import ranks

BATCH, CLASSES = 16, 5
SCALER = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}


class Block(nn.Module):
    def __init__(self, width: int, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Convolutions, blocks, a head; a frozen parameter, and one of uneven size for two ranks."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        # The gradient of a bias before a batch norm is noise, and AdamW makes whole steps of it.
        self.stem = nn.Conv2d(3, 11, 3, stride=2, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(11) if batch_norm else nn.GroupNorm(1, 11)
        # As in images' backbones. It counts as contiguous, but its strides differ.
        self.pointwise = nn.Conv2d(11, 11, 1, bias=False).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList([Block(11, batch_norm) for _ in range(3)])
        self.frozen = nn.Parameter(torch.ones(11), requires_grad=False)
        self.head = nn.Linear(11, CLASSES)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        x = self.norm(self.stem(images_BHWC.permute(0, 3, 1, 2))).relu()
        x = self.pointwise(x).mean((2, 3)) * self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Scenario:
    """`steps` of training from scenario `resume`, or from the seed's start. It must pickle."""

    name: str
    strategy: str
    steps: int = 20
    resume: str | None = None
    batch_norm: bool = False
    scale: float | None = None  # fp16's loss scale to begin with
    settings: dict[str, Any] = field(default_factory=dict)


def data(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, learnable: each class has its own brightness."""
    rng = torch.Generator().manual_seed(step)
    labels_B = torch.randint(CLASSES, (BATCH,), generator=rng)
    return torch.randn(BATCH, 8, 8, 3, generator=rng) + labels_B[:, None, None, None], labels_B


def tiny(batch_norm: bool = False) -> Tiny:
    torch.manual_seed(3)
    return Tiny(batch_norm)


def train(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """One scenario on this rank: losses (global means), weights, state, predictions."""
    cfg = parallel.ParallelConfig(
        **{
            "strategy": scenario.strategy,
            "batch_size": BATCH,
            "lr": 0.01,
            "weight_decay": 0.01,
            "precision": "fp32",
        }
        | scenario.settings
    )
    engine = parallel.build(tiny(scenario.batch_norm), cfg)
    start = 0
    if scenario.resume:
        saved = checkpoint.read(folder / scenario.resume)
        engine.load(saved.weights, saved.optimizer, saved.facts)
        start = saved.state.step
    if scenario.scale is not None:
        engine.load(*_scaled(engine, scenario.scale))
    losses = []
    for step in range(start, start + scenario.steps):
        engine.train()
        engine.set_lr(0.01 * 0.95**step, epoch=0)
        images, labels_B = (t[engine.rank :: engine.world].to(engine.device) for t in data(step))
        loss = engine.step(images, labels_B, cross_entropy)
        if engine.world > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / engine.world)
        if step % 7 == 0:  # judging in between must change nothing
            engine.eval()
            with torch.no_grad():
                engine.forward(images)
    engine.eval()
    with torch.no_grad():
        logits = engine.forward(data(999)[0].to(engine.device)).cpu()
    held = sum(t.numel() for t in engine._stored())  # type: ignore[attr-defined]
    checkpoint.write_part(folder / scenario.name, engine.snapshot(), engine.rank, "here")
    if engine.rank == 0:
        checkpoint.publish(
            folder / scenario.name, LoopState(step=start + scenario.steps), engine.world, "here", 30
        )
    whole = engine.not_finite()
    if engine.rank == engine.world - 1:  # one rank's share of one weight
        share = engine._stored()[0]  # type: ignore[attr-defined]
        share[(0,) * share.ndim] = torch.nan
    told = {
        "losses": losses,
        "logits": logits,
        "held": held,
        "not_finite": [whole, engine.not_finite()],
    }
    return told | {"all_held": sum(p.numel() for p in tiny().parameters())}


def _scaled(
    engine: parallel.Engine, scale: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What to load for nothing but another loss scale."""
    return tiny().state_dict(), {}, {"scaler": SCALER | {"scale": scale}, "averaged": 0}


def _rank(rank: int, world: int, scenarios: list[Scenario], folder: Path) -> None:
    fsdp.SMALLEST_UNIT = 1  # each block apart, tiny as it is
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }  # DeepSpeed asks
    for scenario in scenarios:
        try:
            told = train(scenario, folder)
        except Exception as e:
            raise RuntimeError(f"scenario {scenario.name}") from e
        if rank == 0:
            torch.save(told, folder / f"{scenario.name}.pt")
        dist.barrier()  # a later scenario may go on from this one
    os._exit(
        0
    )  # DeepSpeed's threads outlive the interpreter: once in five times it aborts on the way out


def run(world: int, scenarios: list[Scenario], folder: Path) -> None:
    """All scenarios one after the other, in `world` processes that are started once."""
    ranks.start(_rank, (world, scenarios, folder), world)


def run_here(scenarios: list[Scenario], folder: Path) -> None:
    """Scenarios of one rank, in this process."""
    for scenario in scenarios:
        torch.save(train(scenario, folder), folder / f"{scenario.name}.pt")


def result(folder: Path, name: str) -> dict[str, Any]:
    """A scenario's losses and logits, and its checkpoint's weights, optimizer and facts."""
    saved = checkpoint.read(folder / name)
    told = torch.load(folder / f"{name}.pt", weights_only=True)
    return told | {
        "weights": dict(saved.weights),
        "optimizer": dict(saved.optimizer),
        "facts": saved.facts,
    }
