"""The values that a clone tries with its donor's weights: the donor's, moved or drawn again.

The rule is that of Jaderberg et al. 2017, "Population based training of neural networks", kept
within the search space. It is pure: the caller brings the random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from raypipe.search.space.samplers import Range, Sampler

FACTORS = (0.8, 1.2)  # the paper's

# What a value may become: the members of a choice, or (low, high, logarithmic) of a range.
Draw = list[Any] | tuple[float, float, bool]


def draw_of(sampler: Sampler) -> Draw:
    """What a value of this sampler may become."""
    if isinstance(sampler, Range):
        return sampler.low, sampler.high, sampler.log
    return list(sampler.finite or ())


def explore(
    values: Mapping[str, Any], draws: Mapping[str, Draw], resample: float, rng: random.Random
) -> dict[str, Any]:
    """The donor's `values`, each of them drawn again with probability `resample`, else moved.

    A number of a choice moves to a neighbour. A number of a range is multiplied by one of FACTORS
    and stays within the range. Words and flags have no neighbours and do not move.
    """
    moved = dict(values)
    # Sorted, so that the random numbers do not depend on the order of the space.
    for name, draw in sorted(draws.items()):
        if name not in values:
            continue
        again = rng.random() < resample
        if isinstance(draw, list):
            moved[name] = _from_members(values[name], draw, again, rng)
        else:
            moved[name] = _from_range(values[name], draw, again, rng)
    return moved


def _from_members(value: Any, members: list[Any], again: bool, rng: random.Random) -> Any:
    if again or value not in members:
        return rng.choice(members)
    if not all(map(_is_number, members)):
        return value
    # One that counts twice is written twice.
    ordered = sorted(set(members))
    at = ordered.index(value)
    neighbours = ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]
    return rng.choice(neighbours or ordered)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _from_range(
    value: float, bounds: tuple[float, float, bool], again: bool, rng: random.Random
) -> float:
    low, high, logarithmic = bounds
    if again and logarithmic:
        moved = math.exp(rng.uniform(math.log(low), math.log(high)))
    elif again:
        moved = rng.uniform(low, high)
    else:
        options = [min(max(value * factor, low), high) for factor in FACTORS]
        # At an end of the range one factor would leave the value where it is.
        others = [option for option in options if option != value]
        moved = rng.choice(others or options)
    return min(max(moved, low), high)
