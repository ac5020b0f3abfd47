"""Claim: augmenting a batch on its device costs a fraction of a training step on it, whatever the
recipe.

python -m benchmarks.augment --json

32 uint8 pictures of 224 px, the process's own number of threads; a forward and backward pass of the
embedded backbone on such a batch beside it. Milliseconds are medians of rounds in which every
recipe takes its turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from raypipe.images.augment import AugmentConfig, augment
from raypipe.images.mix import mix
from raypipe.models.zoo import ImageModel, ModelConfig

BATCH, SIDE, ROUNDS = 32, 224, 9
CROP = {"crop_area": 0.35, "flip_horizontal": True}
COLOUR = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
RECIPES: dict[str, dict[str, object]] = {
    "nothing": {},
    "flip": {"flip_horizontal": True},
    "crop_flip": CROP,
    "crop_flip_colour": {**CROP, **COLOUR},
    "crop_flip_randaugment": {**CROP, "policy": "randaugment"},
    "crop_flip_trivial_erase": {**CROP, "policy": "trivial", "erase": 0.25},
    "crop_flip_mixup_cutmix": {**CROP, "mixup": 0.2, "cutmix": 1.0},
}


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1_000 * (time.perf_counter() - started)


def measure() -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8, generator=random).to(
        device
    )
    targets, model = (
        torch.eye(BATCH, device=device),
        ImageModel(ModelConfig(), classes=BATCH).to(device),
    )

    def apply(settings: dict[str, object], epoch: int) -> None:
        cfg, samples = AugmentConfig.model_validate(settings), np.arange(BATCH)
        mix(augment(pixels, cfg, 0, epoch, samples), targets, cfg, 0, epoch, samples)
        if device == "cuda":
            torch.cuda.synchronize()

    def train() -> None:
        model(pixels).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    taken: dict[str, list[float]] = {name: [] for name in (*RECIPES, "training_step")}
    for epoch in range(ROUNDS):
        for name, settings in RECIPES.items():
            taken[name].append(milliseconds(lambda: apply(settings, epoch)))  # noqa: B023
        taken["training_step"].append(milliseconds(train))
    median = {
        name: statistics.median(values[1:]) for name, values in taken.items()
    }  # the first round warms up
    return {
        "ms_per_batch": {name: round(value, 1) for name, value in median.items()},
        "ratios": {name: round(median[name] / median["training_step"], 3) for name in RECIPES},
        "batch": BATCH,
        "device": device,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    result = measure()
    print(json.dumps(result) if "--json" in sys.argv else json.dumps(result, indent=2))
