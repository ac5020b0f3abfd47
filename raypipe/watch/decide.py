"""Evidence + policy -> Decision. Pure: no cluster, no clock, no registry.

Two questions are decided here: does drift call for a retrain, and is the challenger better than the champion. The second is a
paired comparison on the same rows. Labels and tags are right or wrong: where both models are right or both wrong says nothing,
so the exact McNemar test looks only at the rows on which they differ (McNemar 1947; Dietterich 1998). Numbers are near or far:
if the models were alike, the sign of each row's difference in absolute error would be a coin's (Fisher 1935); of differences
that are all 1 or -1 that is McNemar's test again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.stats import binomtest

from raypipe.config import Section


class GateConfig(Section):
    """What a challenger must show. `worse_by` is a share of images, 0.02 is two points of accuracy; where models predict
    numbers it is a mean absolute error, of probabilities as they are, of other numbers in standard deviations of the labels."""

    alpha: float = Field(default=0.05, gt=0, lt=1)
    worse_by: float = Field(default=0.02, ge=0, le=1)
    least_rows: int = Field(default=20, ge=1)


@dataclass(frozen=True)
class Comparison:
    """Champion and challenger on the same rows of one slice. `p_value` is of 'no difference', two-sided.

    Without a unit they are shares of images that each has right. With one they are mean absolute errors, and their difference
    is counted in it.
    """

    slice: str
    images: int
    champion: float
    challenger: float
    p_value: float
    is_new: bool
    unit: float | None = None

    @property
    def difference(self) -> float:
        """What the challenger is better by: a share of images, or so many units less error."""
        return self.challenger - self.champion if self.unit is None else (self.champion - self.challenger) / self.unit

    @property
    def change(self) -> str:
        """The difference for people."""
        if self.unit is None:
            return f"{points(self.difference)} on {self.slice}"
        return f"error {self.champion:.3g} to {self.challenger:.3g} on {self.slice}"


@dataclass(frozen=True)
class Decision:
    """`act` is what to do: promote or keep, retrain or wait. `reason` is for people."""

    act: bool
    reason: str


Rows = Sequence[bool] | Sequence[float]


def compare(name: str, champion: Rows, challenger: Rows, is_new: bool, unit: float | None = None) -> Comparison:
    """A paired test over what each model has right on the same rows or, where there is a `unit`, over absolute errors."""
    first, second = (np.asarray(rows, bool if unit is None else float) for rows in (champion, challenger))
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"paired rows of equal length and at least one, got {first.shape} and {second.shape}")
    p_value = _mcnemar(first, second) if unit is None else _coins(first - second)
    return Comparison(name, first.size, float(first.mean()), float(second.mean()), p_value, is_new, unit)


def _mcnemar(first_N: np.ndarray, second_N: np.ndarray) -> float:
    won, lost = int((second_N & ~first_N).sum()), int((first_N & ~second_N).sum())
    return float(binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0


def _coins(gains_N: np.ndarray, tosses: int = 9_999) -> float:
    """How often random signs make a sum as far from 0 as the true ones do, which count as a toss."""
    rng = np.random.default_rng(0)  # asked twice, it says the same
    at_a_time = max(1, 1_000_000 // gains_N.size)  # 8 MB of them
    far, farther = abs(gains_N.sum()) * (1 - 1e-9), 1
    for start in range(0, tosses, at_a_time):
        signs = 2.0 * rng.integers(0, 2, (min(at_a_time, tosses - start), gains_N.size), dtype=np.int8) - 1
        farther += int((abs(signs @ gains_N) >= far).sum())
    return farther / (1 + tosses)


def gate(slices: Sequence[Comparison], cfg: GateConfig) -> Decision:
    """Promote when the challenger is better, beyond chance, on a new domain (or, with none new, on an old one) and on no old
    domain worse than the margin."""
    small = [s for s in slices if s.images < cfg.least_rows]
    if not slices or small:
        what = f"{small[0].slice} has {small[0].images} labelled test images" if small else "there are no labelled test images"
        return Decision(False, f"Not compared: {what}, the gate asks for {cfg.least_rows}")
    for s in slices:
        if not s.is_new and not s.difference >= -cfg.worse_by - 1e-9:  # 0.88 - 0.9 is a little less than -0.02
            margin = points(-cfg.worse_by) if s.unit is None else f"{cfg.worse_by * s.unit:.3g}"
            return Decision(False, f"Refused: {s.change}, worse than the margin of {margin}")
    wanted = [s for s in slices if s.is_new] or list(slices)
    better = [s for s in wanted if s.difference > 0 and s.p_value < cfg.alpha]
    if not better:
        best = max(wanted, key=lambda s: s.difference)
        return Decision(False, f"Refused: {best.change} could be chance (p = {best.p_value:.2g})")
    gains = ", ".join(f"{s.change} (p = {s.p_value:.2g})" for s in better)
    rest = [f"{s.change}, {'no worse' if s.difference >= 0 else 'within the margin'}" for s in slices if s not in better]
    return Decision(True, "; ".join([f"Promoted: {gains}", *rest]))


def retrain(
    is_drift: bool, labelled_by_source: Mapping[str, int], known_sources: Sequence[str], force: bool = False
) -> Decision:
    """Retrain when there is drift and labelled training rows of a source that the champion has not seen."""
    new = {s: n for s, n in labelled_by_source.items() if s not in known_sources}
    if force:
        return Decision(True, "Retraining was asked for")
    if not is_drift:
        return Decision(False, "No drift: the champion stays")
    if not new:
        return Decision(
            False,
            f"Drift, but no labelled images beyond {', '.join(known_sources) or 'what the champion knows'}: waiting for labels",
        )
    return Decision(True, "Drift, and labels: " + ", ".join(f"{n} images of {s}" for s, n in sorted(new.items())))


def headline(metrics: Mapping[str, float]) -> str:
    """The accuracies among the metrics, or where numbers are predicted the mean absolute error, for people."""
    accuracies = [f"{name} {value:.1%}" for name, value in metrics.items() if "accuracy" in name]
    return ", ".join(accuracies) or f"val_mae {metrics['val_mae']:.4g}"


def points(share: float) -> str:
    return f"{share * 100:+.1f} points"
