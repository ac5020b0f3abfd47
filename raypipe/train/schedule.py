"""Learning-rate and batch-size rules: pure functions, and drivers that know nothing but the probe they are handed.

A schedule is a factor of the peak rate as a function of progress. `factor` takes the middle of a step: at its start the first
step of a warm-up would train at a rate of 0, and at its end the last step of a cosine would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from raypipe.errors import RaypipeError

Scaling = Literal["sqrt", "linear"]
ScheduleName = Literal["cosine", "one_cycle", "step", "constant"]


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    """Half a cosine to zero (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def step(progress: float) -> float:
    """A tenth after each third, as in residual networks' 30 of 90 epochs (He et al. 2016)."""
    return 0.1 ** min(2, int(3 * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "one_cycle": cosine,
    "step": step,
    "constant": constant,
}
WARMUP = {"one_cycle": 0.3}  # the others: 0.05
DIVISOR = 25.0  # one_cycle starts at the peak divided by this, as torch's OneCycleLR


def factor(schedule: str, done: int, steps: int, warmup: float | None = None) -> float:
    """What the peak rate is multiplied by in the step after `done` of `steps`; above 0 in every one of them.

    The rate rises over the first `warmup` of the training (linearly; Goyal et al. 2017), then follows the schedule. one_cycle
    rises longer and from 1/25 (Smith and Topin 2018); it leaves AdamW's betas alone.
    """
    progress = (done + 0.5) / steps
    rise = WARMUP.get(schedule, 0.05) if warmup is None else warmup
    if progress >= rise:
        return SCHEDULES[schedule]((progress - rise) / (1 - rise))
    low = 1 / DIVISOR if schedule == "one_cycle" else 0.0
    return low + (1 - low) * progress / rise


def scaled(lr: float, batch_size: int, meant_for: int | None, scaling: Scaling = "sqrt") -> float:
    """The rate for this batch when `lr` was found with another: times sqrt(n) when it grew n times, or times n.

    sqrt keeps the size of AdamW's noise (Malladi et al. 2022), linear that of SGD's (Goyal et al. 2017).
    """
    if meant_for is None:
        return lr
    grown = batch_size / meant_for
    return lr * (math.sqrt(grown) if scaling == "sqrt" else grown)


@dataclass(frozen=True)
class LrRange:
    """A learning-rate range test: the rate to train with, and the smoothed loss at each rate that was tried."""

    lr: float
    lrs: tuple[float, ...]
    losses: tuple[float, ...]


def lr_range(
    train: Callable[[float], float],
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
    smoothing: float = 0.9,
    blow_up: float = 4.0,
) -> LrRange:
    """Learning-rate range test (Smith 2017, "Cyclical learning rates"): let the rate grow from step to step, watch the loss.

    `train(lr)` takes one step at that rate and returns its loss. The rate grows by a constant factor, the loss is a running
    mean (without its bias to the start), and the test ends when it is `blow_up` times its lowest, or no number. Suggested is
    the rate at which the loss falls fastest: a tenth of the rate with the lowest loss, the other custom, was 20 times too
    high where a small model learnt its data by heart (0.72 against 0.05). Raises RaypipeError when no rate made it fall by 5 %.
    """
    lrs: list[float] = []
    losses: list[float] = []
    mean = 0.0
    for i in range(steps):
        lr = low * (high / low) ** (i / max(1, steps - 1))
        loss = train(lr)
        if not math.isfinite(loss):
            break
        mean = smoothing * mean + (1 - smoothing) * loss
        lrs.append(lr)
        losses.append(mean / (1 - smoothing ** (i + 1)))
        if losses[-1] > blow_up * min(losses):
            break
    if not losses or min(losses) > 0.95 * losses[0]:
        raise RaypipeError(
            "No learning rate made the loss fall",
            got=f"{low:g} to {high:g} in {steps} steps",
            fix="Try a wider range, more steps",
        )
    falls = [before - after for before, after in pairwise(losses[: losses.index(min(losses)) + 1])]
    return LrRange(lrs[falls.index(max(falls))], tuple(lrs), tuple(losses))


def find_batch_size(
    fits: Callable[[int], bool], start: int = 1, limit: int = 65_536, within: float = 0.05
) -> int:
    """The largest batch that fits, to a share of `within`: by doubling from `start`, then by bisection.

    `fits` is asked once a size, at most 2 log2(limit) times; on a GPU let it try a training step in a process of its own
    (raypipe.train.probe), because memory that ran out stays in pieces. Raises RaypipeError when not even 1 fits.
    """
    good, bad = 0, limit + 1
    size = min(start, limit)
    while good < limit and bad - good > max(1, within * good):
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, limit) if bad > limit else (good + bad) // 2
    if good == 0:
        raise RaypipeError(
            "Not even one image fits into memory",
            fix="Choose a smaller model.name or model.side_px",
        )
    return good


def fastest_batch_size(
    rate: Callable[[int], float], start: int = 8, limit: int = 1024, gain: float = 0.05
) -> int:
    """The smallest of start, 2 start, 4 start, … whose images/s are within `gain` of the best: what counts on a CPU.

    It ends after two sizes in a row that gained nothing, so that one noisy measurement does not end it.
    """
    rates: dict[int, float] = {}
    size, waited = min(start, limit), 0
    while size <= limit and waited < 2:
        best = max(rates.values(), default=0.0)
        rates[size] = rate(size)
        waited = 0 if rates[size] > best * (1 + gain) else waited + 1
        size *= 2
    best = max(rates.values())
    return next(size for size in rates if rates[size] >= best / (1 + gain))
