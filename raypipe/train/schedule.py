"""Learning-rate rules: pure functions from the share of training done to a factor of `train.lr`."""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    """Linear warm-up over the first 5 %, then half a cosine to zero (Loshchilov and Hutter 2017)."""
    warmup = 0.05
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "cosine": cosine}
