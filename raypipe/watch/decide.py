"""Evidence + policy -> Decision. Pure: no cluster, no clock, no registry.

Two questions are decided here: does drift call for a retrain, and is the challenger better than the champion.

The second is a paired comparison: both models see the same test rows, in slices (one slice a source of images). A challenger is
promoted when two things are shown, and each bounds one error:

- Superiority. The challenger is better over all test rows together, or on one slice. The p-values are one-sided and corrected
  for their number (Holm 1979), so a challenger that is equal everywhere is promoted with a probability of at most `alpha`.
- Safety. On every slice, new ones too, the lower confidence bound of the difference lies above `-tolerance`. A challenger that
  is truly worse by the tolerance on one slice is promoted with a probability of at most `safety_alpha`. (Simulated: true
  but for one cell of 280, thirty slices of 50 rows, with 7 % instead of 5 %.)

Labels and tags are right or wrong. Rows on which both models are right, or both wrong, say nothing about which is better: the
exact McNemar test looks at the others (McNemar 1947). The bound is Tango's score bound, which keeps its level where few rows
differ; Wald's does not (1998, Statistics in Medicine 17:891). Numbers are near or far: superiority is a sign-flip permutation
test of the differences in absolute error (Fisher 1935), safety is Student's bound of their mean.

The price of safety is rows: with 7 % of rows on which the models differ, an equal challenger passes a slice of 160 rows with a
probability of 72 %, of 320 rows 94 %. With many slices see `_level`. Measured: benchmarks/results/2026-11-22-gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.optimize import brentq
from scipy.special import bdtrc, log_ndtr, ndtr, ndtri, stdtr, stdtrit

from raypipe.config import Section

LOOSEST = 4  # times safety_alpha: no slice's own test is looser, however many slices there are


class GateConfig(Section):
    """What a challenger must show to replace the champion.

    alpha         highest probability of promoting a challenger that is equal everywhere
    tolerance     loss on a slice that is too much: 0.05 is five points of accuracy. Where models predict numbers it is a mean
                  absolute error: of probabilities as they are, of other numbers in standard deviations of the labels
    safety_alpha  highest probability of promoting a challenger that is worse by the tolerance on a slice
    least_rows    slices with fewer test rows are pooled before safety is judged
    """

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    tolerance: float = Field(default=0.05, gt=0, le=1)
    safety_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    least_rows: int = Field(default=50, ge=2)


@dataclass(frozen=True)
class Comparison:
    """Champion and challenger on the same rows of one slice.

    Without a unit, `champion` and `challenger` are shares of images that each has right. `won` counts the images that
    only the challenger has right, `lost` those that only the champion has. With a unit they are mean absolute errors,
    `won` and `lost` count rows on which the challenger is nearer and farther, and `spread` is the standard deviation of
    the gains.

    `p_value` is one-sided, of 'the challenger is no better'.
    """

    slice: str
    images: int
    champion: float
    challenger: float
    won: int
    lost: int
    p_value: float
    is_new: bool
    unit: float | None = None
    spread: float = 0.0

    @property
    def difference(self) -> float:
        """What the challenger is better by: a share of images, or so many units less error."""
        if self.unit is None:
            return (self.won - self.lost) / self.images
        return (self.champion - self.challenger) / self.unit

    @property
    def change(self) -> str:
        """The difference for people."""
        if self.unit is None:
            return f"{points(self.difference)} on {self.slice}"
        return f"error {self.champion:.3g} to {self.challenger:.3g} on {self.slice}"

    def p_worse(self, tolerance: float) -> float:
        """The p-value of 'worse by `tolerance` or more'; small means safe. NaN where a model predicts no finite number."""
        if self.unit is None:
            return float(ndtr(-_tango(self.won, self.lost, self.images, -tolerance)))
        excess, error = self.difference + tolerance, self.standard_error
        if error == 0:
            return 0.0 if excess > 0 else 1.0
        return float(stdtr(self.images - 1, -excess / error))

    @property
    def p_harmed(self) -> float:
        """The p-value of 'the challenger is no worse'."""
        if self.unit is None:
            return _mcnemar(self.lost, self.won)
        error = self.standard_error
        if error == 0:
            return 0.0 if self.difference < 0 else 1.0
        return float(stdtr(self.images - 1, self.difference / error))

    def at_worst(self, level: float) -> float:
        """The lower confidence bound of the difference: the largest loss that a test at `level` does not reject."""
        if self.unit is not None:
            return (
                self.difference - float(stdtrit(self.images - 1, 1 - level)) * self.standard_error
            )
        z = float(ndtri(1 - level))
        lowest, highest = -1 + 1e-9, self.difference - 1e-9
        if lowest >= highest:
            return -1.0
        return float(
            brentq(
                lambda d: _tango(self.won, self.lost, self.images, d) - z,
                lowest,
                highest,
                xtol=1e-6,
            )
        )

    @property
    def standard_error(self) -> float:
        """Of the difference. Half a row more on each side keeps it above 0 where the two models never differ."""
        if self.unit is not None:
            return self.spread / self.unit / math.sqrt(self.images)
        rows = self.images + 1
        won, lost = (self.won + 0.5) / rows, (self.lost + 0.5) / rows
        return math.sqrt((won + lost - (won - lost) ** 2) / rows)


@dataclass(frozen=True)
class Decision:
    """`act` is what to do: promote or keep, retrain or wait. `reason` is for people."""

    act: bool
    reason: str


Rows = Sequence[bool] | Sequence[float]


def compare(
    name: str, champion: Rows, challenger: Rows, is_new: bool, unit: float | None = None
) -> Comparison:
    """Compare paired rows: what each model has right or, where there is a `unit`, absolute errors."""
    kind = bool if unit is None else float
    first_N, second_N = np.asarray(champion, kind), np.asarray(challenger, kind)
    if first_N.shape != second_N.shape or first_N.size == 0:
        shapes = f"{first_N.shape} and {second_N.shape}"
        raise ValueError(f"paired rows of equal length and at least one, got {shapes}")
    gains_N = second_N.astype(float) - first_N if unit is None else first_N - second_N
    won, lost = int((gains_N > 0).sum()), int((gains_N < 0).sum())
    p_value = _mcnemar(won, lost) if unit is None else _sign_flips(gains_N)
    spread = 0.0
    if unit is not None and gains_N.size > 1:
        spread = float(gains_N.std(ddof=1))
    means = float(first_N.mean()), float(second_N.mean())
    return Comparison(name, first_N.size, *means, won, lost, p_value, is_new, unit, spread)


def gate(slices: Sequence[Comparison], union: Comparison | None, cfg: GateConfig) -> Decision:
    """Promote when the challenger is better somewhere beyond chance and nowhere worse by the tolerance.

    `union` compares all rows of all slices. See the head of this file for the errors that are bounded.
    """
    if union is None or union.images < cfg.least_rows:
        rows = union.images if union else 0
        return Decision(
            False, f"Not compared: {rows} labelled test images, the gate needs {cfg.least_rows}"
        )
    for s in slices:
        if not (math.isfinite(s.champion) and math.isfinite(s.challenger)):
            return Decision(False, f"Refused: {s.change} is not a finite number")

    small = [s for s in slices if s.images < cfg.least_rows]
    for s in small:
        if s.difference < -cfg.tolerance and s.p_harmed <= cfg.safety_alpha / len(small):
            p_text = f"(p = {s.p_harmed:.2g})"
            return Decision(False, f"Refused: {s.change}, worse beyond chance {p_text}")

    better = _better(slices, union, cfg.alpha)
    if not better:
        best = min([union, *slices], key=lambda s: s.p_value)
        text = f"the clearest is {best.change} (p = {best.p_value:.2g})"
        return Decision(False, f"Refused: no gain beyond chance; {text}")

    judged = _pooled(slices, cfg.least_rows)
    level = _level(judged, cfg)
    unsafe = [s for s in judged if not s.p_worse(cfg.tolerance) < level]
    if unsafe:
        worst = max(unsafe, key=lambda s: s.p_worse(cfg.tolerance))
        return Decision(False, _refusal(worst, level, cfg))
    better = [s for s in better if s is not union] or better
    gains = ", ".join(f"{s.change} (p = {s.p_value:.2g})" for s in better)
    rest = [_safe(s, level) for s in judged if s not in better]
    return Decision(True, "; ".join([f"Promoted: {gains}", *rest]))


def _better(slices: Sequence[Comparison], union: Comparison, alpha: float) -> list[Comparison]:
    """The slices, or the union, on which the challenger is better: Holm's step-down procedure."""
    hypotheses = [union, *slices] if len(slices) > 1 else list(slices)
    hypotheses.sort(key=lambda s: s.p_value)
    better = []
    for n, s in enumerate(hypotheses):
        if not s.p_value <= alpha / (len(hypotheses) - n):
            break
        better.append(s)
    return better


def _pooled(slices: Sequence[Comparison], least_rows: int) -> list[Comparison]:
    """The slices that safety is judged on: small ones are judged together, so that none of them is a veto for ever.

    Where even all small ones have too few rows, the smallest of the others joins them. A small slice on which the challenger is
    worse beyond chance is refused before.
    """
    by_size = sorted(slices, key=lambda s: (s.images, s.slice))
    small = [s for s in by_size if s.images < least_rows]
    large = by_size[len(small) :]
    if small and large and sum(s.images for s in small) < least_rows:
        small.append(large.pop(0))
    return large + ([_merged(small)] if small else [])


def _merged(slices: Sequence[Comparison]) -> Comparison:
    """One comparison over the rows of several. Superiority is not tested on it: it has no p-value of its own."""
    if len(slices) == 1:
        return slices[0]
    rows = sum(s.images for s in slices)

    def mean(of: str) -> float:
        return sum(s.images * getattr(s, of) for s in slices) / rows

    unit = slices[0].unit
    gain = mean("champion") - mean("challenger")
    squares = 0.0  # deviations from the common mean: those inside the slices and those between them
    for s in slices:
        squares += (s.images - 1) * s.spread**2 + s.images * (s.champion - s.challenger - gain) ** 2
    names = [s.slice for s in slices]
    name = (
        " + ".join(names)
        if len(names) <= 3
        else f"{names[0]} + {names[1]} + {len(names) - 2} more small slices"
    )
    return Comparison(
        slice=name,
        images=rows,
        champion=mean("champion"),
        challenger=mean("challenger"),
        won=sum(s.won for s in slices),
        lost=sum(s.lost for s in slices),
        p_value=1.0,
        is_new=all(s.is_new for s in slices),
        unit=unit,
        spread=0.0 if unit is None else math.sqrt(squares / (rows - 1)),
    )


def _level(slices: Sequence[Comparison], cfg: GateConfig) -> float:
    """The level of each slice's safety test; `safety_alpha`, or more where slices are many.

    What is bounded is one event: a slice is worse by the tolerance, it passes, *and all other slices pass*. With many
    slices an equal challenger already fails one of them by chance, so each test may be less strict. How much less
    follows from how likely the others pass. For that their differences are shrunk towards the pooled one. The estimate
    errs on the strict side: a loss counts as 0 and a gain twice (with few losses a slice passes more easily than its
    standard error says), the pooled difference's standard error is added, and a level that is hardly looser is not
    used, because counts are discrete.
    """
    differences_S = np.array([s.difference for s in slices])
    variances_S = np.array([max(s.standard_error, 1e-9) ** 2 for s in slices])
    pooled_error = math.sqrt(1 / (1 / variances_S).sum())
    likely_S = 2 * np.maximum(_shrunk(differences_S, variances_S), 0.0) + pooled_error
    margins_S = (likely_S + cfg.tolerance) / np.sqrt(variances_S)

    def promoted_though_worse(level: float) -> float:
        """The highest probability over the slices, in logarithms: products of thirty get small."""
        passes_S = log_ndtr(margins_S + ndtri(level))
        return math.log(level) + float(passes_S.sum() - passes_S.min())

    target = math.log(cfg.safety_alpha)
    strictest, loosest = cfg.safety_alpha, min(0.5, LOOSEST * cfg.safety_alpha)
    if promoted_though_worse(loosest) <= target:
        return loosest
    low, high = strictest, loosest
    for _ in range(25):  # to a millionth of a per cent
        middle = (low + high) / 2
        low, high = (middle, high) if promoted_though_worse(middle) <= target else (low, middle)
    return low if low > 1.25 * strictest else strictest


def _shrunk(differences_S: np.ndarray, variances_S: np.ndarray) -> np.ndarray:
    """Each slice's difference, shrunk towards the pooled one by as much as their scatter is sampling error.

    Random effects, the scatter between slices by DerSimonian and Laird 1986.
    """
    weights_S = 1 / variances_S
    pooled = (weights_S * differences_S).sum() / weights_S.sum()
    scatter = (weights_S * (differences_S - pooled) ** 2).sum()
    scale = weights_S.sum() - (weights_S**2).sum() / weights_S.sum()
    between = max(0.0, (scatter - (len(weights_S) - 1)) / scale) if scale > 0 else 0.0
    own_S = between / (between + variances_S)
    return own_S * differences_S + (1 - own_S) * pooled


def _safe(s: Comparison, level: float) -> str:
    if s.difference >= 0:
        return f"{s.change}, no worse"
    return f"{s.change}, at worst {_amount(s, s.at_worst(level))}, within the tolerance"


def _refusal(s: Comparison, level: float, cfg: GateConfig) -> str:
    """Why a slice is not safe, and how many test images would tell."""
    bound, tolerated = _amount(s, s.at_worst(level)), _amount(s, -cfg.tolerance)
    text = f"Refused: {s.change}, at worst {bound}, and {tolerated} is tolerated"
    enough = _rows_needed(s, level, cfg.tolerance)
    if s.difference > -cfg.tolerance and enough > s.images:
        text += f"; {s.images} test images are few, {enough:,} would clear an equal challenger nine times of ten"
    return text


def _rows_needed(s: Comparison, level: float, tolerance: float) -> int:
    """Test rows with which an equal challenger passes with a probability of 90 %, by a normal approximation."""
    per_row = s.standard_error * math.sqrt(s.images)
    rows = (per_row * float(ndtri(1 - level) + ndtri(0.9)) / tolerance) ** 2
    return int(math.ceil(rows / 10) * 10)


def _amount(s: Comparison, difference: float) -> str:
    return points(difference) if s.unit is None else f"{-difference * s.unit:+.3g} error"


def _mcnemar(won: int, lost: int) -> float:
    """At least `won` heads in won + lost tosses of a fair coin."""
    return float(bdtrc(won - 1, won + lost, 0.5)) if won else 1.0


def _tango(won: int, lost: int, rows: int, difference: float) -> float:
    """The score statistic of 'the true difference is `difference`', about normal. Tango 1998, equations 3 and 4."""
    a = 2 * rows
    b = -won - lost + (a - won + lost) * difference
    c = -lost * difference * (1 - difference)
    # the most likely share of losses, if the hypothesis holds
    losing = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = rows * (2 * losing + difference * (1 - difference))
    excess = won - lost - rows * difference
    if variance <= 1e-12:
        return math.copysign(math.inf, excess) if excess else 0.0
    return excess / math.sqrt(variance)


def _sign_flips(gains_N: np.ndarray, flips: int = 9_999) -> float:
    """How often random signs give a sum as large as the true signs do. The true ones count as one draw."""
    rng = np.random.default_rng(0)  # the same question gets the same answer
    at_a_time = max(1, 1_000_000 // gains_N.size)  # 8 MB of them
    least = gains_N.sum() - 1e-9 * abs(gains_N.sum())
    as_large = 1
    for start in range(0, flips, at_a_time):
        shape = (min(at_a_time, flips - start), gains_N.size)
        signs = 2.0 * rng.integers(0, 2, shape, dtype=np.int8) - 1
        as_large += int((signs @ gains_N >= least).sum())
    return as_large / (1 + flips)


def retrain(
    is_drift: bool,
    labelled_by_source: Mapping[str, int],
    known_sources: Sequence[str],
    force: bool = False,
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
    return Decision(
        True,
        "Drift, and labels: " + ", ".join(f"{n} images of {s}" for s, n in sorted(new.items())),
    )


def headline(metrics: Mapping[str, float]) -> str:
    """The accuracies among the metrics, or where numbers are predicted the mean absolute error, for people."""
    accuracies = [f"{name} {value:.1%}" for name, value in metrics.items() if "accuracy" in name]
    return ", ".join(accuracies) or f"val_mae {metrics['val_mae']:.4g}"


def points(share: float) -> str:
    return f"{share * 100:+.1f} points"
