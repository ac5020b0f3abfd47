"""Claim: on a CPU that autocasts to bf16, our depthwise convolutions make a training step of the
default backbone faster.

`python -m benchmarks.depthwise --json`: EfficientNet-Lite0, 224 px, batch 32, three frozen blocks,
one thread, forward, backward and AdamW; in turn as torch autocasts it; with depthwise convolutions
in float32, before that with a copy of every image that is padded (raypipe until 2026-11-21); and as
raypipe has it (train/parallel/depthwise.py). CPU time; a round takes the best of three steps of
each, ratios are the median of five rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train.parallel import depthwise

BATCH, SIDE, ROUNDS = 32, 224, 5


def kept(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            module.__class__ = type("Kept", (depthwise._Float32, module.__class__), {})


class Padded(nn.Module):
    """Pads by a copy."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(pad(inputs, self.around))  # type: ignore[no-any-return]


def before(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.Conv2d) and type(module) is nn.Conv2d and module.padding != (0, 0):
            module.around = 4 * (int(module.padding[0]),)  # type: ignore[assignment]
            module.padding = (0, 0)
            module.__class__ = type("Copied", (Padded, nn.Conv2d), {})
    kept(model)


def stepping(prepare: Callable[[nn.Module], None]) -> Callable[[], float]:
    """A function that trains a step and says how many CPU seconds it took."""
    torch.manual_seed(0)
    model = ImageModel(ModelConfig(mode="finetune", side_px=SIDE, frozen_blocks=3), 2).train()
    prepare(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True
    )
    images, labels = (
        torch.randint(0, 256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8),
        torch.randint(0, 2, (BATCH,)),
    )

    def step() -> float:
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    keep_memory()
    ways = {
        "autocast": lambda model: None,
        "before": before,
        "float32": kept,
        "ours": depthwise.speed_up_depthwise,
    }
    steps = {name: stepping(prepare) for name, prepare in ways.items()}
    for step in steps.values():
        step()
        step()
    took = [
        {name: min(step() for _ in range(3)) for name, step in steps.items()} for _ in range(ROUNDS)
    ]
    ms = {name: 1e3 / BATCH * statistics.median(t[name] for t in took) for name in steps}
    ratios = {
        f"ours_vs_{name}": statistics.median(t["ours"] / t[name] for t in took)
        for name in list(ways)[:-1]
    }
    return {"ratios": ratios, "ms_per_image": ms, "rounds": ROUNDS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    print(json.dumps(measure(), indent=None if args.json else 1))
