"""What a trial tells Ray Tune of an epoch, and how our own code reads it back.

Tune's schedulers sort by the metric. NaN has no place in an order: HyperBand would rank at random, the median rule would stop
nobody, and PB2's Gaussian process would raise. Ray would also write NaN into its JSON files. So an epoch whose weights are lost
is told with the worst number there is and with a mark. Tune ranks it last; our code reads the mark and sees NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypipe.train.stopping import Mode, unusable

EPOCH = "epoch"  # Tune's own count of reports starts again with every restart
ENDED = "ended"  # this was the trial's last epoch
UNUSABLE = "unusable"  # a loss or the metric is not finite: the weights are lost
WORST = 1e300  # finite, so that means of it are


def metric_of(line: Mapping[str, float], metric: str) -> float:
    """The metric of one epoch of a history; NaN if the epoch is unusable."""
    value = line.get(metric, math.nan)
    return value if unusable(line) is None and math.isfinite(value) else math.nan


def told(
    line: Mapping[str, float], epoch: int, ended: bool, metric: str, mode: Mode
) -> dict[str, Any]:
    """What Tune hears of an epoch: finite numbers only."""
    said: dict[str, Any] = {name: value for name, value in line.items() if math.isfinite(value)}
    said |= {EPOCH: epoch, ENDED: ended}
    if math.isnan(metric_of(line, metric)):
        said |= {metric: -WORST if mode == "max" else WORST, UNUSABLE: True}
    return said


def metric_in(result: Mapping[str, Any], metric: str) -> float:
    """The metric of what Tune heard; NaN if that epoch was unusable."""
    return math.nan if result.get(UNUSABLE) else float(result.get(metric, math.nan))
