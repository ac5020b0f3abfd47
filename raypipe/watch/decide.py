"""Is the challenger better than the champion? Pure functions: no cluster, no clock, no registry.

It is a paired comparison. Both models see the same test rows, in slices: one slice is one
source of images. Rows count as independent: judging.py draws one of each group, and of copies. A
challenger is promoted when two things are shown, and each bounds one error:

- Superiority. The challenger is better over all test rows together, or on one slice. The p-values
  are one-sided and corrected for their number (Holm 1979). So a challenger that is equal everywhere
  is promoted with a probability of at most `alpha`. The tests are in superiority.py.
- Safety. On every slice, new ones too, the lower confidence bound of the difference lies above
  `-tolerance`. So a challenger that is truly worse by the tolerance on one slice is promoted with a
  probability of at most `safety_alpha`. (In simulation this holds in all but one of 280 cells: with
  thirty slices of 50 rows it is 7 % instead of 5 %.) The bounds are in safety.py.

What else it must keep (named slices, latency, size) is in limits.py. It can refuse a challenger,
and never promotes one.

Safety costs rows. If the models differ on 7 % of rows, an equal challenger passes a slice of 160
rows with a probability of 72 %, of 320 rows with 94 %. For many slices see `safety.slice_level`.
Measured in benchmarks/results/2026-11-22-gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from raypipe.report.formats import beside
from raypipe.watch import limits, safety, superiority
from raypipe.watch.comparison import Comparison, pooled
from raypipe.watch.limits import LimitsConfig, Measured, Named


class GateConfig(LimitsConfig):
    """What a challenger must show to replace the champion."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """The highest probability of promoting a challenger that is equal everywhere. Of each group of
    test images (`registry.group`, `watch.group`) only one counts, and of several copies of an image
    only one: the others are no further evidence."""

    tolerance: float = Field(default=0.05, gt=0, le=1)
    """The loss on a slice that is too much: 0.05 is five points of accuracy. For probabilities it
    is a mean absolute error. For other numbers it is a mean absolute error in standard deviations
    of the labels."""

    safety_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """The highest probability of promoting a challenger that loses the tolerance on a slice."""

    least_rows: int = Field(default=50, ge=2)
    """Slices with fewer test rows are pooled before safety is judged. With fewer rows in all, no
    challenger is promoted."""


@dataclass(frozen=True)
class Decision:
    """A decision and its reason in words. `act` is True for promote and for retrain."""

    act: bool
    reason: str


def key_part(cfg: GateConfig) -> dict[str, Any]:
    """The settings as part of a key. Limits that are not set are left out: earlier keys stay."""
    unset = [name for name in LimitsConfig.model_fields if getattr(cfg, name) == _unset(name)]
    # What is left out is not looked at, as a batch of no latency.
    if not cfg.times:
        unset.append("latency_batch")
    return cfg.model_dump(mode="json", exclude=set(unset))


def _unset(name: str) -> Any:
    return LimitsConfig.model_fields[name].default


def gate(
    slices: Sequence[Comparison],
    union: Comparison | None,
    cfg: GateConfig,
    named: Sequence[Named] = (),
    measured: Measured | None = None,
    not_finite: str = "",
) -> Decision:
    """Promote when the challenger is better somewhere beyond chance and nowhere worse, and keeps
    all limits.

    `union` compares all rows of all slices; None where there are no rows. named, measured: what the
    limits are about. not_finite: which model gives numbers that are not finite, in words. The head
    of this file says which errors are bounded.
    """
    decision = _compared(slices, union, cfg, not_finite)
    found = limits.verdicts(named, measured, cfg, cfg.tolerance, cfg.safety_alpha)
    broken = [one.text for one in found if one.refuses]
    if not broken:
        return Decision(decision.act, "; ".join([decision.reason, *(one.text for one in found)]))
    if decision.act:
        better = decision.reason.removeprefix("Promoted: ")
        return Decision(False, f"Refused: {'; '.join(broken)}. It is better: {better}")
    return Decision(False, "; ".join([decision.reason, *broken]))


def _compared(
    slices: Sequence[Comparison], union: Comparison | None, cfg: GateConfig, not_finite: str
) -> Decision:
    """The decision by all rows and by the sources."""
    obstacle = _not_comparable(slices, union, cfg, not_finite) or _harmed(slices, cfg)
    if obstacle or union is None:
        return Decision(False, obstacle)

    better = _better(slices, union, cfg.alpha)
    if not better:
        clearest = min([union, *slices], key=lambda s: s.p_value)
        text = f"the clearest is {clearest.change} (p = {_p(clearest.p_value, cfg.alpha)})"
        return Decision(False, f"Refused: no gain beyond chance; {text}")

    judged = pooled(slices, cfg.least_rows)
    level = _level(judged, cfg)
    # Written so that a p-value of NaN is unsafe.
    unsafe = [s for s in judged if not s.p_worse(cfg.tolerance) < level]
    if unsafe:
        worst = max(unsafe, key=lambda s: s.p_worse(cfg.tolerance))
        return Decision(False, _refusal(worst, level, cfg))

    # The reason names slices that got better. It names the union only if no slice alone did.
    better = [s for s in better if s is not union] or better
    gains = ", ".join(f"{s.change} (p = {_p(s.p_value, cfg.alpha)})" for s in better)
    others = [_safe(s, level) for s in judged if s not in better]
    return Decision(True, "; ".join([f"Promoted: {gains}", *others]))


def headline(metrics: Mapping[str, float]) -> str:
    """The accuracies in words, or the mean absolute error where a model predicts numbers."""
    accuracies = [f"{name} {value:.1%}" for name, value in metrics.items() if "accuracy" in name]
    return ", ".join(accuracies) or f"val_mae {metrics['val_mae']:.4g}"


def _not_comparable(
    slices: Sequence[Comparison], union: Comparison | None, cfg: GateConfig, not_finite: str
) -> str:
    """Why the models cannot be compared; empty if they can."""
    rows = union.images if union else 0
    if rows < cfg.least_rows:
        return f"Not compared: {limits.counted(rows)}, the gate needs {cfg.least_rows}"
    if not_finite:
        return f"Refused: {not_finite}"
    for s in slices:
        if not (math.isfinite(s.champion) and math.isfinite(s.challenger)):
            return f"Refused: {s.change} is not a finite number"
    return ""


def _harmed(slices: Sequence[Comparison], cfg: GateConfig) -> str:
    """Why a small slice refuses the challenger; empty if none does.

    Small slices are pooled before safety is judged, which could hide a clear loss on one of them.
    """
    small = [s for s in slices if s.images < cfg.least_rows]
    for s in small:
        is_beyond_chance = s.p_harmed <= cfg.safety_alpha / len(small)
        if s.difference < -cfg.tolerance and is_beyond_chance:
            p_text = _p(s.p_harmed, cfg.safety_alpha / len(small))
            return f"Refused: {s.change}, worse beyond chance (p = {p_text})"
    return ""


def _p(p: float, limit: float) -> str:
    """A p-value to two digits, or more where it would look like its limit."""
    return beside(p, lambda more: f"{p:.{2 + more}g}", limit)


def _better(slices: Sequence[Comparison], union: Comparison, alpha: float) -> list[Comparison]:
    """The slices, or the union, on which the challenger is better beyond chance."""
    # One slice is the union itself and must not be tested twice.
    hypotheses = [union, *slices] if len(slices) > 1 else list(slices)
    rejected = superiority.holm([s.p_value for s in hypotheses], alpha)
    return [hypotheses[i] for i in rejected]


def _level(slices: Sequence[Comparison], cfg: GateConfig) -> float:
    """The level of each slice's safety test."""
    differences_S = np.array([s.difference for s in slices])
    errors_S = np.array([s.standard_error for s in slices])
    return safety.slice_level(differences_S, errors_S, cfg.tolerance, cfg.safety_alpha)


def _safe(s: Comparison, level: float) -> str:
    """A slice that passed, in words."""
    if s.difference >= 0:
        return f"{s.change}, no worse"
    return f"{s.change}, at worst {s.amount(s.at_worst(level))}, within the tolerance"


def _refusal(s: Comparison, level: float, cfg: GateConfig) -> str:
    """Why a slice is not safe, and how many test images would decide."""
    bound, tolerated = s.amount(s.at_worst(level)), s.amount(-cfg.tolerance)
    text = f"Refused: {s.change}, at worst {bound}, and {tolerated} is tolerated"
    needed = safety.rows_needed(s.standard_error, s.images, level, cfg.tolerance)
    if s.difference > -cfg.tolerance and needed > s.images:
        text += (
            f"; {s.images} test images are few, "
            f"{needed:,} would clear an equal challenger nine times of ten"
        )
    return text
