"""The report's charts: bare SVG paths on a 1000 x 1000 square stretched to its box, and their text is HTML.

Labels keep their size on a phone, colours follow light and dark, equal input gives equal bytes. Matplotlib would freeze colours
and fonts. A chart that has nothing to show is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from raypipe.report import Check, Search

BINS = 25
MAX_DOTS = 1500  # per group in a scatter; more only hide each other, at 12 bytes each
LOOKS = {1: "best", 2: "second", 3: "third"}  # of trials by rank; the others are "rest"
# lines: (look, label, path), y down; ticks: (per cent of the axis, label); uprights: per cent of it; note: what the eye sees
Chart = dict[str, Any]
Axis = tuple[dict[str, float], str]  # height from 0 to 1 by value; what it spans


def histogram(check: Check) -> Chart | None:
    """Shares of images per score, so that groups of different size compare; None if a group has no scores."""
    scores = [np.asarray(s, float) for s in (check.reference_scores, check.batch_scores)]
    scores = [s[np.isfinite(s)].clip(0, 1) for s in scores]
    if not all(s.size for s in scores):
        return None
    shares = [np.histogram(s, BINS, (0, 1))[0] / s.size for s in scores]
    top = float(np.max(shares))
    old, new = (
        "".join(f"V{1000 - 1000 * y / top:.0f}h{1000 // BINS}" for y in share) + "V1000"
        for share in shares
    )
    lines = (("area", "Reference", f"M0,1000{old}Z"), ("step", "New images", f"M0,1000{new}"))
    note = f"Median of the reference {np.median(scores[0]):.2f}, of the new images {np.median(scores[1]):.2f}."
    return {"lines": lines, "x_ticks": _ticks(0, 1), "y_ticks": _ticks(0, top, "%"), "note": note}


def scatter(check: Check) -> Chart | None:
    """Each group a cloud of dots of its own shape; the axes of a projection have no unit, so there are no ticks."""
    if check.projection is None or not all(len(group) for group in check.projection):
        return None
    groups = [np.asarray(group, float)[:: -(-len(group) // MAX_DOTS)] for group in check.projection]
    low, high = np.min(np.concatenate(groups), 0), np.max(np.concatenate(groups), 0)
    groups = [25 + 950 * (group - low) / np.maximum(high - low, 1e-12) for group in groups]
    old, new = (
        "".join(f"M{x:.0f},{1000 - y:.0f}h1" for x, y in group) for group in groups
    )  # h0 loses squares in print
    lines = (("round", "Reference", old), ("square", "New images", new))
    return {"lines": lines, "x_ticks": (), "y_ticks": (), "note": "Near means similar."}


def curves(search: Search) -> Chart | None:
    """The metric after each epoch: a stroke of its own for each of the three best trials, drawn last, the rest behind them."""
    rows = [
        row
        for row in sorted(search.rows, key=lambda row: -row.rank)
        if np.isfinite(row.curve).any()
    ]
    if not rows:
        return None
    values = [v for row in rows for v in row.curve if math.isfinite(v)]
    low, high = min(values), max(values)
    low, high = low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1)
    last = max(2, *(len(row.curve) for row in rows))
    lines = []
    for row in rows:
        look = LOOKS.get(row.rank, "rest")
        spots = [
            (1000 * i / (last - 1), 1000 * (high - v) / (high - low))
            for i, v in enumerate(row.curve)
            if math.isfinite(v)
        ]
        lines.append((look, row.trial, "M" + "L".join(f"{x:.0f},{y:.0f}" for x, y in spots) + "h0"))
    epochs = [(100 * (t - 1) / (last - 1), f"{t}") for t in range(1, last + 1, -(-last // 10))]
    heights = _ticks(low, high, "%" if "acc" in search.metric.lower() else "")
    return {"lines": lines, "x_ticks": epochs, "y_ticks": heights, "note": ""}


def _ticks(low: float, high: float, unit: str = "") -> list[tuple[float, str]]:
    """About five round numbers inside [low, high]."""
    size = 10 ** math.floor(math.log10((high - low) / 6))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k * 6 >= (high - low) * 0.999)
    marks = [
        k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    return [(100 * (m - low) / (high - low), f"{100 * m:g} %" if unit else f"{m:g}") for m in marks]


def parallel(search: Search) -> Chart | None:
    """One upright axis for each hyperparameter that took several values, and the metric's last, where up is better; a line for
    each trial (Inselberg 1985). The three best are drawn last. Ranges over a factor of 30 are logarithmic."""
    ranked = sorted(search.rows, key=lambda row: -row.rank)
    rows = [
        (row, row.metric) for row in ranked if row.metric is not None and math.isfinite(row.metric)
    ]
    drawn = _columns([row.hyperparameters for row, _ in rows])
    metric = _axis([value for _, value in rows])
    if not drawn or metric is None:
        return None
    heights, span = metric
    if rows[-1][1] < rows[0][1]:  # the lowest is the best
        heights, span = (
            {value: 1 - at for value, at in heights.items()},
            " to ".join(reversed(span.split(" to "))),
        )
    across = np.linspace(0, 100, len(drawn) + 1).tolist()
    lines = []
    for row, value in rows:
        mine = row.hyperparameters
        at = [axis[_key(mine[name])] if name in mine else None for name, (axis, _) in drawn.items()]
        spots = [
            (x, y)
            for x, y in zip(across, [*at, heights[_key(value)]], strict=True)
            if y is not None
        ]
        path = "M" + "L".join(f"{10 * x:.0f},{1000 - 1000 * y:.0f}" for x, y in spots)
        lines.append((LOOKS.get(row.rank, "rest"), row.trial, path))
    names = [*(name.rpartition(".")[2] for name in drawn), search.metric]
    spans = [
        f"{name} {values}"
        for name, values in zip(names, [*(v for _, v in drawn.values()), span], strict=True)
    ]
    ticks = list(zip(across, names, strict=True))
    return {
        "lines": lines,
        "x_ticks": ticks,
        "y_ticks": (),
        "uprights": across,
        "note": f"From bottom to top: {'; '.join(spans)}.",
    }


def _columns(settings: Sequence[Mapping[str, Any]]) -> dict[str, Axis]:
    """The axis of each name that took several values, in the order in which they come up."""
    found = {
        name: _axis([s[name] for s in settings if name in s]) for one in settings for name in one
    }
    return {name: axis for name, axis in found.items() if axis is not None}


def _axis(values: Sequence[Any]) -> Axis | None:
    """None where there is nothing to compare."""
    different = list({_key(v): v for v in values}.values())
    if len(different) < 2:
        return None
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in different):
        names = sorted(map(_key, different))
        return {name: i / (len(names) - 1) for i, name in enumerate(names)}, ", ".join(names)
    low, high = min(different), max(different)
    scale = math.log if low > 0 and high / low > 30 else float
    at = {_key(v): (scale(v) - scale(low)) / (scale(high) - scale(low)) for v in different}
    return at, f"{low:.3g} to {high:.3g}"


def _key(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
