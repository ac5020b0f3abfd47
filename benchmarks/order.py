"""Claim: an epoch resumes at any step under any world size, and planning 100 million images costs
nothing to speak of.

python -m benchmarks.order [--images 100000000] [--groups 1000000]

Sequences: a table of uneven row groups, 20 random steps, world sizes 1, 2, 3, 4, 6: the rest of the
epoch from each, dealt back together from the ranks, against the uninterrupted epoch. Plan: seconds
and memory from the row group sizes to the first batch, and of a batch after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time

import numpy as np

from raypipe.feed.order import Order

WORLDS = (1, 2, 3, 4, 6)


def batches(order: Order, epoch: int, world: int, step: int) -> list[list[int]]:
    """Global batches, put back together by the samples' places in the stream."""
    ranks = [order.rank(epoch, step, rank, world) for rank in range(world)]
    found = []
    for parts in zip(*ranks, strict=True):
        places, samples = (
            np.concatenate([getattr(p, name) for p in parts])
            for name in ("positions_B", "samples_B")
        )
        found.append(samples[np.argsort(places)].tolist())
    return found


def sequences(steps: int = 20) -> dict[str, object]:
    rng = np.random.default_rng(0)
    order = Order(rng.integers(1, 257, 80), batch_size=64, seed=1)
    whole = batches(order, 2, 1, 0)
    resumed = sorted(rng.choice(order.steps, steps, replace=False).tolist())
    compared = [
        batches(order, 2, world, step) == whole[step:]
        for step, world in itertools.product(resumed, WORLDS)
    ]
    return {"steps": resumed, "worlds": WORLDS, "compared": len(compared), "equal": sum(compared)}


def plan(images: int, groups: int) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    steps = Order(np.full(groups, images // groups), batch_size=256, seed=0).rank(0, 0, 0, 1)
    next(steps)
    first = time.perf_counter() - started
    started = time.perf_counter()
    for _ in itertools.islice(steps, 500):
        pass
    each = (time.perf_counter() - started) / 500
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first_batch_s": round(first, 3),
        "next_batch_ms": round(each * 1e3, 2),
        "peak_mb": after >> 10,
        "plan_mb": (after - before) >> 10,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100_000_000)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument(
        "--json",
        action="store_true",
        help="accepted for uniformity: the output is one JSON line anyway",
    )
    chosen = parser.parse_args()
    result = {"plan": plan(chosen.images, chosen.groups), "sequences": sequences()}
    print(json.dumps(result))
    found = result["sequences"]
    return 0 if found["compared"] == found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
