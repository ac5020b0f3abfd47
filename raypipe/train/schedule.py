"""Learning-rate and batch-size rules: pure functions, and searches that only call a given function.

A schedule gives a factor of the peak rate as a function of progress. `factor` takes the middle of a
step: with the start, the first step of a warm-up would have a rate of 0; with the end, the last
step of a cosine would.
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
    """Divided by 10 after each third; residual networks did so after 30 of 90 epochs (He et al.
    2016)."""
    return 0.1 ** min(2, int(3 * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "one_cycle": cosine,
    "step": step,
    "constant": constant,
}
WARMUP = {"one_cycle": 0.3}
USUAL_WARMUP = 0.05
DIVISOR = 25.0  # one_cycle starts at the peak divided by this, as torch's OneCycleLR


def factor(schedule: str, done: int, steps: int, warmup: float | None = None) -> float:
    """The factor of the peak rate in the step after `done` of `steps`; above 0 in every step.

    The rate rises over the first `warmup` of the training (linearly; Goyal et al. 2017), then
    follows the schedule. one_cycle rises longer and from 1/25 (Smith and Topin 2018); it leaves
    AdamW's betas alone.
    """
    return factor_at(schedule, (done + 0.5) / steps, warmup)


def factor_at(schedule: str, progress: float, warmup: float | None = None) -> float:
    """`factor` at this progress, from 0 to 1."""
    if warmup is None:
        warmup = WARMUP.get(schedule, USUAL_WARMUP)
    if progress >= warmup:
        # The schedule takes the rest of the training as its whole.
        after_warmup = (progress - warmup) / (1 - warmup)
        return SCHEDULES[schedule](after_warmup)
    low = 1 / DIVISOR if schedule == "one_cycle" else 0.0
    return low + (1 - low) * progress / warmup


def scaled(lr: float, batch_size: int, meant_for: int | None, scaling: Scaling = "sqrt") -> float:
    """The rate for this batch size, if `lr` is meant for another one.

    For a batch n times as large, the rate grows sqrt(n) times or n times. sqrt keeps the size of
    AdamW's noise (Malladi et al. 2022), linear that of SGD's (Goyal et al. 2017).
    """
    if meant_for is None:
        return lr
    grown = batch_size / meant_for
    return lr * (math.sqrt(grown) if scaling == "sqrt" else grown)


@dataclass(frozen=True)
class LrRange:
    """The result of a learning-rate range test."""

    lr: float
    """The rate to train with."""
    lrs: tuple[float, ...]
    """The rates that were tried."""
    losses: tuple[float, ...]
    """The smoothed loss at each of them."""


def lr_range(
    train: Callable[[float], float],
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
    smoothing: float = 0.9,
    blow_up: float = 4.0,
) -> LrRange:
    """Learning-rate range test: increase the rate from step to step, and watch the loss.

    Source: Smith 2017, "Cyclical learning rates".

    train(lr): takes one step at that rate and returns its loss. The rate grows by a constant
    factor. The loss is a running mean, corrected for its start at 0. The test ends when the mean is
    `blow_up` times its lowest, or when a loss is not finite.

    It suggests the rate at which the loss falls fastest. Another custom, a tenth of the rate with
    the lowest loss, was 20 times too high where a small model learnt its data by heart (0.72
    against 0.05). Raises RaypipeError when the loss fell by less than 5 % at every rate.
    """
    lrs: list[float] = []
    losses: list[float] = []
    mean = 0.0
    for i in range(steps):
        share = i / max(1, steps - 1)
        lr = low * (high / low) ** share
        loss = train(lr)
        if not math.isfinite(loss):
            break
        mean = smoothing * mean + (1 - smoothing) * loss
        # The mean started at 0: without this division the first ones would be too low.
        smoothed = mean / (1 - smoothing ** (i + 1))
        lrs.append(lr)
        losses.append(smoothed)
        if smoothed > blow_up * min(losses):
            break
    if not losses or min(losses) > 0.95 * losses[0]:
        raise RaypipeError(
            "No learning rate made the loss fall",
            got=f"{low:g} to {high:g} in {steps} steps",
            fix="Try a wider range, more steps",
        )
    # Only falls on the way to the lowest loss count.
    lowest = losses.index(min(losses))
    until_lowest = losses[: lowest + 1]
    falls = [before - after for before, after in pairwise(until_lowest)]
    steepest = falls.index(max(falls))
    return LrRange(lrs[steepest], tuple(lrs), tuple(losses))


def find_batch_size(
    fits: Callable[[int], bool], start: int = 1, limit: int = 65_536, within: float = 0.05
) -> int:
    """The largest batch that fits, exact to a share of `within`: by doubling, then by bisection.

    `fits` is called once per size, at most 2 log2(limit) times. On a GPU it should try a training
    step in a process of its own (auto/probe.py), because memory that ran out stays fragmented.
    Raises RaypipeError when not even 1 fits.
    """
    good = 0  # the largest size that fits so far
    bad = limit + 1  # the smallest that does not
    size = min(start, limit)
    while good < limit and bad - good > max(1, within * good):
        if fits(size):
            good = size
        else:
            bad = size
        nothing_failed = bad > limit
        size = min(2 * good, limit) if nothing_failed else (good + bad) // 2
    if good == 0:
        raise RaypipeError(
            "Not even one image fits into memory",
            fix="Choose a smaller model.name or model.side_px",
        )
    return good


def fastest_batch_size(
    rate: Callable[[int], float], start: int = 8, limit: int = 1024, gain: float = 0.05
) -> int:
    """The smallest of start, 2 start, 4 start, … whose images/s are within `gain` of the best.

    For CPUs, where time counts and not memory. It ends after two sizes in a row without a gain: so
    one noisy measurement does not end it.
    """
    rates: dict[int, float] = {}
    size = min(start, limit)
    without_gain = 0
    while size <= limit and without_gain < 2:
        best = max(rates.values(), default=0.0)
        rates[size] = rate(size)
        if rates[size] > best * (1 + gain):
            without_gain = 0
        else:
            without_gain += 1
        size *= 2
    # Of the sizes that are about as fast as the fastest, the smallest.
    best = max(rates.values())
    good_enough = [n for n, measured in rates.items() if measured >= best / (1 + gain)]
    return good_enough[0]
