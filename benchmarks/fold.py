"""Claim: folding batch norms into convolutions makes the embedded backbone's forward pass faster on
a CPU, and changes nothing.

python -m benchmarks.fold --json
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from raypipe.models.zoo import ImageModel, ModelConfig

BATCHES = (16, 64)
PAIRS = 5


def rate(model: ImageModel, pixels_BHWC: torch.Tensor) -> float:
    """Images a second of one forward pass."""
    started = time.perf_counter()
    with torch.inference_mode():
        model.embed(pixels_BHWC)
    return len(pixels_BHWC) / (time.perf_counter() - started)


def measure() -> dict[str, object]:
    plain = ImageModel(ModelConfig(), classes=2).eval()
    folded = plain.for_inference()
    ratios, rates, apart = {}, {}, 0.0
    for batch in BATCHES:
        pixels = torch.randint(
            0,
            256,
            (batch, 224, 224, 3),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(batch),
        )
        with torch.inference_mode():
            apart = max(apart, float((plain.embed(pixels) - folded.embed(pixels)).abs().max()))
        pairs = [(rate(folded, pixels), rate(plain, pixels)) for _ in range(PAIRS + 1)][1:]
        ratios[f"folded_vs_plain_{batch}"] = round(statistics.median(f / p for f, p in pairs), 3)
        rates[str(batch)] = {
            "folded": round(statistics.median(f for f, _ in pairs), 1),
            "plain": round(statistics.median(p for _, p in pairs), 1),
        }
    return {
        "ratios": ratios,
        "images_per_s": rates,
        "largest_difference": apart,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    result = measure()
    print(json.dumps(result) if "--json" in sys.argv else json.dumps(result, indent=2))
