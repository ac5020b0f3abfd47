"""What a trial reports to Ray Tune after an epoch, and how our own code reads it back.

Tune's schedulers sort trials by the metric, and NaN has no place in an order: HyperBand would rank
at random, the median rule would stop no trial, and PB2's Gaussian process would raise. Ray would
also write NaN into its JSON files.

So an epoch that is unusable is reported with the worst finite number and with a mark. Tune ranks
such a trial last. Our code reads the mark and sees NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypipe.train.stopping import Mode, unusable

# Keys of a result, beside the epoch's metrics.
EPOCH = "epoch"  # finished epochs; Tune's own count starts again with every restart
ENDED = "ended"  # True for the trial's last epoch
WORKERS = "workers"  # that trained the epoch; without it: one
EARLIER = "earlier"  # True: trained before the trial's last start, so its time is not known
UNUSABLE = "unusable"  # True when a loss or the metric is not finite: the weights are lost

WORST = 1e300  # still finite, so a mean of such values is finite too


def metric_of(metrics: Mapping[str, float], metric: str) -> float:
    """The value of `metric` in one epoch's metrics; NaN if the epoch is unusable."""
    value = metrics.get(metric, math.nan)
    if unusable(metrics) is not None or not math.isfinite(value):
        return math.nan
    return value


def result_of(
    metrics: Mapping[str, float],
    epoch: int,
    ended: bool,
    metric: str,
    mode: Mode,
    workers: float = 1.0,
    earlier: bool = False,
) -> dict[str, Any]:
    """The result to report to Tune for one epoch: finite numbers only."""
    result: dict[str, Any] = {}
    for name, value in metrics.items():
        if math.isfinite(value):
            result[name] = value
    result[EPOCH] = epoch
    result[ENDED] = ended
    if workers != 1.0:
        result[WORKERS] = workers
    if earlier:
        result[EARLIER] = True
    if math.isnan(metric_of(metrics, metric)):
        result[metric] = -WORST if mode == "max" else WORST
        result[UNUSABLE] = True
    return result


def metric_of_result(result: Mapping[str, Any], metric: str) -> float:
    """The value of `metric` in a result that Tune received; NaN if its epoch was unusable."""
    if result.get(UNUSABLE):
        return math.nan
    return float(result.get(metric, math.nan))
