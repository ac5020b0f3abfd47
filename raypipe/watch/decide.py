"""Evidence + policy -> Decision. Pure: no cluster, no clock, no registry.

Two questions are decided here: does drift call for a retrain, and is the challenger better than the champion. The second is a
paired comparison on the same rows: where both models are right or both wrong says nothing, so the exact McNemar test looks only
at the rows on which they differ (McNemar 1947; Dietterich 1998).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.stats import binomtest

from raypipe.config import Section


class GateConfig(Section):
    """What a challenger must show. Margins are shares of images: 0.02 is two points of accuracy."""

    alpha: float = Field(default=0.05, gt=0, lt=1)
    worse_by: float = Field(default=0.02, ge=0, le=1)
    least_rows: int = Field(default=20, ge=1)


@dataclass(frozen=True)
class Comparison:
    """Champion and challenger on the same rows of one slice. `p_value` is of 'no difference', two-sided."""

    slice: str
    images: int
    champion: float
    challenger: float
    p_value: float
    is_new: bool

    @property
    def difference(self) -> float:
        return self.challenger - self.champion


@dataclass(frozen=True)
class Decision:
    """`act` is what to do: promote or keep, retrain or wait. `reason` is for people."""

    act: bool
    reason: str


def compare(name: str, champion_hits: Sequence[bool], challenger_hits: Sequence[bool], is_new: bool) -> Comparison:
    """The exact McNemar test over paired hits of the same rows."""
    first, second = np.asarray(champion_hits, bool), np.asarray(challenger_hits, bool)
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"paired hits of equal length and at least one row, got {first.shape} and {second.shape}")
    won, lost = int((second & ~first).sum()), int((first & ~second).sum())
    p_value = float(binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0
    return Comparison(name, first.size, float(first.mean()), float(second.mean()), p_value, is_new)


def gate(slices: Sequence[Comparison], cfg: GateConfig) -> Decision:
    """Promote when the challenger is better, beyond chance, on a new domain (or, with none new, on an old one) and on no old
    domain worse than the margin."""
    small = [s for s in slices if s.images < cfg.least_rows]
    if not slices or small:
        what = f"{small[0].slice} has {small[0].images} labelled test images" if small else "there are no labelled test images"
        return Decision(False, f"Not compared: {what}, the gate asks for {cfg.least_rows}")
    for s in slices:
        if not s.is_new and s.difference < -cfg.worse_by - 1e-9:  # 0.88 - 0.9 is a little less than -0.02
            return Decision(
                False, f"Refused: {points(s.difference)} on {s.slice}, worse than the margin of {points(-cfg.worse_by)}"
            )
    wanted = [s for s in slices if s.is_new] or list(slices)
    better = [s for s in wanted if s.difference > 0 and s.p_value < cfg.alpha]
    if not better:
        best = max(wanted, key=lambda s: s.difference)
        return Decision(False, f"Refused: {points(best.difference)} on {best.slice} could be chance (p = {best.p_value:.2g})")
    gains = ", ".join(f"{points(s.difference)} on {s.slice} (p = {s.p_value:.2g})" for s in better)
    rest = [
        f"{points(s.difference)} on {s.slice}, {'no worse' if s.difference >= 0 else 'within the margin'}"
        for s in slices
        if s not in better
    ]
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


def percentages(metrics: Mapping[str, float]) -> str:
    """The accuracies among the metrics, for people."""
    return ", ".join(f"{name} {value:.1%}" for name, value in metrics.items() if "accuracy" in name)


def points(share: float) -> str:
    return f"{share * 100:+.1f} points"
