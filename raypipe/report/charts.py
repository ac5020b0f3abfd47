"""The charts of a page: SVG paths on a square of 1000 x 1000, which the page stretches to its box.

All text of a chart is HTML, so labels keep their size on a phone. Colours come from the page's
style and follow light and dark mode; Matplotlib would freeze colours and fonts. Equal input gives
equal bytes. A chart that has nothing to show is None.

Two systems of coordinates:

  square        0 to 1000, x to the right, y DOWN, as in SVG: paths
  per cent      0 to 100 from the left or from the bottom: ticks and uprights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.report.parts import Check, Search, Trial

BINS = 25
MAX_DOTS = 1500  # per group in a scatter: more dots hide each other, and each costs 12 bytes
LOOKS = {1: "best", 2: "second", 3: "third"}  # the style of a trial's line, by rank
OTHER_LOOK = "rest"
LOG_FACTOR = 30  # an axis whose values span a larger factor is logarithmic

Line = tuple[str, str, str]  # (style, label, path)
Tick = tuple[float, str]  # (position in per cent, label)
Mark = tuple[float, float, str]  # (per cent from the left, per cent from the bottom, label)


@dataclass(frozen=True)
class Chart:
    """What the template draws. `note` says in words what the eye sees."""

    lines: Sequence[Line]
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    note: str = ""
    uprights: Sequence[float] = ()  # vertical axes, in per cent of the width
    marks: Sequence[Mark] = ()  # what names a point


@dataclass(frozen=True)
class Axis:
    """The scale of one column in `parallel`."""

    heights: Mapping[str, float]  # from 0 (bottom) to 1 (top), by `_key` of the value
    span: str  # the values from bottom to top, in words


def histogram(check: Check) -> Chart | None:
    """The distribution of scores in reference and batch. None if a group has no finite score.

    Heights are shares of the group's images, so groups of different size can be compared.
    """
    reference = _clipped_scores(check.reference_scores)
    batch = _clipped_scores(check.batch_scores)
    if not reference.size or not batch.size:
        return None
    # All scores lie in 0..1 now, so no group is empty and `top` is above 0.
    reference_shares = np.histogram(reference, BINS, (0, 1))[0] / reference.size
    batch_shares = np.histogram(batch, BINS, (0, 1))[0] / batch.size
    top = float(np.max([reference_shares, batch_shares]))

    # The reference is a filled area, the batch an outline above it.
    area = f"M0,1000{_bars(reference_shares, top)}Z"
    outline = f"M0,1000{_bars(batch_shares, top)}"
    medians = np.median(reference), np.median(batch)
    return Chart(
        lines=(("area", "Reference", area), ("step", "New images", outline)),
        x_ticks=_ticks(0, 1),
        y_ticks=_ticks(0, top, in_per_cent=True),
        note=f"Median of the reference {medians[0]:.2f}, of the new images {medians[1]:.2f}.",
    )


def _clipped_scores(scores: np.ndarray | Sequence[float]) -> np.ndarray:
    """The finite scores, clipped to 0..1."""
    values = np.asarray(scores, float)
    return values[np.isfinite(values)].clip(0, 1)


def _bars(shares: np.ndarray, top: float) -> str:
    """A staircase of BINS steps that ends on the ground. `top` is the share at full height."""
    width = 1000 // BINS
    steps = [f"V{1000 - 1000 * share / top:.0f}h{width}" for share in shares]
    return "".join(steps) + "V1000"


def scatter(check: Check) -> Chart | None:
    """Reference and batch as two clouds of dots. None without a projection, or if a group is empty.

    The axes of a projection have no unit, so there are no ticks.
    """
    if check.projection is None or not all(len(group) for group in check.projection):
        return None
    groups = []
    for group in check.projection:
        stride = math.ceil(len(group) / MAX_DOTS)
        groups.append(np.asarray(group, float)[::stride])

    # Both groups get one scale, with a margin of 25 on each side.
    together = np.concatenate(groups)
    low, high = np.min(together, 0), np.max(together, 0)
    width = np.maximum(high - low, 1e-12)
    reference, batch = (_dots(25 + 950 * (group - low) / width) for group in groups)
    return Chart(
        lines=(("round", "Reference", reference), ("square", "New images", batch)),
        note="Near means similar.",
    )


def _dots(spots_N2: np.ndarray) -> str:
    # A dot is a stroke of length 1: with length 0, square dots disappear in print.
    return "".join(f"M{x:.0f},{1000 - y:.0f}h1" for x, y in spots_N2)


def curves(search: Search) -> Chart | None:
    """The metric of each trial after each epoch. None if no trial has a finite value.

    The three best trials have styles of their own and are drawn last, in front of the others.
    """
    rows = [row for row in _worst_first(search) if np.isfinite(row.curve).any()]
    if not rows:
        return None
    values: list[float] = []
    for row in rows:
        values += [value for value in row.curve if math.isfinite(value)]
    low, high = min(values), max(values)
    margin = 0.04 * (high - low or max(1.0, abs(high)))
    low, high = low - margin, high + margin
    last_epoch = max(2, *(len(row.curve) for row in rows))

    lines = []
    for row in rows:
        spots = []
        for i, value in enumerate(row.curve):
            if math.isfinite(value):
                spots.append((1000 * i / (last_epoch - 1), 1000 * (high - value) / (high - low)))
        # "h0" makes a curve of one point visible.
        lines.append((_look(row), row.trial, _path(spots) + "h0"))

    stride = math.ceil(last_epoch / 10)  # at most ten labels
    epochs = []
    for epoch in range(1, last_epoch + 1, stride):
        epochs.append((100 * (epoch - 1) / (last_epoch - 1), f"{epoch}"))
    is_share = "acc" in search.metric.lower()
    y_ticks = _ticks(low, high, in_per_cent=is_share)
    return Chart(lines=lines, x_ticks=epochs, y_ticks=y_ticks)


def parallel(search: Search) -> Chart | None:
    """Parallel coordinates (Inselberg 1985): what was tried, and how well it did.

    Each hyperparameter that took several values has an upright axis. The last axis is the metric,
    with the best on top. Each trial with a finite metric is a line from axis to axis. The three
    best are drawn last. None if nothing varied.
    """
    trials: list[tuple[Trial, float]] = []
    for row in _worst_first(search):
        if row.metric is not None and math.isfinite(row.metric):
            trials.append((row, row.metric))
    axes = _axes([row.hyperparameters for row, _ in trials])
    metric_axis = _axis([metric for _, metric in trials])
    if not axes or metric_axis is None:
        return None
    worst, best = trials[0][1], trials[-1][1]
    if best < worst:
        metric_axis = _upside_down(metric_axis)

    across = np.linspace(0, 100, len(axes) + 1).tolist()
    lines = []
    for row, metric in trials:
        heights = [*_heights(row, axes), metric_axis.heights[_key(metric)]]
        spots = []
        for x, height in zip(across, heights, strict=True):
            # A hyperparameter that this trial did not have: the line passes its axis.
            if height is not None:
                spots.append((10 * x, 1000 - 1000 * height))
        lines.append((_look(row), row.trial, _path(spots)))

    names = [name.rpartition(".")[2] for name in axes] + [search.metric]
    spans = [axis.span for axis in axes.values()] + [metric_axis.span]
    in_words = [f"{name} {span}" for name, span in zip(names, spans, strict=True)]
    return Chart(
        lines=lines,
        x_ticks=list(zip(across, names, strict=True)),
        uprights=across,
        note=f"From bottom to top: {'; '.join(in_words)}.",
    )


def reliability(bins: Sequence[tuple[float, float]]) -> Chart | None:
    """What scores say (across) and how often they are right (up), a dot a bin, both from 0 to 1.

    On the dotted line, scores mean what they say; below it they are too high. None without bins.
    """
    if not bins:
        return None
    spots = [(1000 * confidence, 1000 - 1000 * right) for confidence, right in bins]
    return Chart(
        lines=(
            ("third", "Scores mean what they say", "M0,1000L1000,0"),
            ("best", "This model", _path(spots) + "h0"),
        ),
        x_ticks=_ticks(0, 1),
        y_ticks=_ticks(0, 1, in_per_cent=True),
        note="Below the dotted line scores are too high, above it too low.",
    )


def residuals(true_N: np.ndarray, predicted_N: np.ndarray) -> Chart | None:
    """Labels (across) and predictions (up) of numbers, a dot an image. None without images."""
    if not len(true_N):
        return None
    together = np.concatenate([true_N, predicted_N])
    low, high = float(together.min()), float(together.max())
    if low == high:
        # Beside a large number a half is nothing.
        margin = max(0.5, 1e-3 * abs(low))
        low, high = low - margin, high + margin
    stride = math.ceil(len(true_N) / MAX_DOTS)
    spots_N2 = np.stack([true_N, predicted_N], 1)[::stride]
    dots = _dots(1000 * (spots_N2 - low) / (high - low))
    return Chart(
        lines=(
            ("round", "Images", dots),
            ("third", "Predicted as labelled", "M0,1000L1000,0"),
        ),
        x_ticks=_ticks(low, high),
        y_ticks=_ticks(low, high),
        note="On the dotted line a prediction is its label.",
    )


def so_far(
    reached: Sequence[tuple[float, float]], until: float, in_per_cent: bool = False
) -> Chart | None:
    """The best value so far over time: a step where it became better, numbered from 1.

    reached: (time, value), in the order of time. until: where the time axis ends. None without a
    finite value.
    """
    known = [(at, value) for at, value in reached if math.isfinite(value)]
    if not known:
        return None
    low, high, scaled = _scaled([value for _, value in known])
    end = max(until, known[-1][0]) or 1.0
    spots = [(1000 * at / end, scaled(value)) for at, value in known]
    steps = f"M{spots[0][0]:.0f},{spots[0][1]:.0f}"
    steps += "".join(f"H{x:.0f}V{y:.0f}" for x, y in spots[1:])
    return Chart(
        lines=(
            ("step", "Best so far", f"{steps}H1000"),
            ("round", "It became better", "".join(f"M{x:.0f},{y:.0f}h1" for x, y in spots)),
        ),
        x_ticks=_ticks(0, end),
        y_ticks=_ticks(low, high, in_per_cent),
        marks=_marks(spots),
    )


def front(
    points: Sequence[tuple[float, float]], best: Sequence[int], in_per_cent: bool = False
) -> Chart | None:
    """What each model costs (across) and how good it is (up); the line joins the `best`.

    points: (cost, value). best: places among the points, by rising cost, numbered from 1 in the
    chart. None without a finite point.
    """
    known = [place for place in best if math.isfinite(points[place][1])]
    if not known:
        return None
    # Others that are far from the line would press it flat: they stay out.
    values = [points[place][1] for place in known]
    reach = max(values) - min(values) or 0.1 * abs(max(values))
    ends = min(values) - reach, max(values) + reach
    finite = [point for point in points if ends[0] <= point[1] <= ends[1]]
    left_out = sum(math.isfinite(value) for _, value in points) - len(finite)
    low, high, scaled = _scaled([value for _, value in finite])
    end = 1.08 * max(cost for cost, _ in finite) or 1.0
    spots = [(1000 * points[place][0] / end, scaled(points[place][1])) for place in known]
    others = [(1000 * cost / end, scaled(value)) for cost, value in finite]
    # A model between two of them costs more than the first and is no better than it.
    steps = f"M{spots[0][0]:.0f},{spots[0][1]:.0f}"
    steps += "".join(f"H{x:.0f}V{y:.0f}" for x, y in spots[1:])
    return Chart(
        lines=(
            ("round", "Trials", "".join(f"M{x:.0f},{y:.0f}h1" for x, y in others)),
            ("step", "Best for its time", f"{steps}H1000"),
        ),
        x_ticks=_ticks(0, end),
        y_ticks=_ticks(low, high, in_per_cent),
        note=f"Far from the line, and not drawn: {left_out}." if left_out else "",
        marks=_marks(spots),
    )


def _scaled(values: Sequence[float]) -> tuple[float, float, Callable[[float], float]]:
    """(low, high, value -> y in the square) of an axis with a margin for marks above."""
    low, high = min(values), max(values)
    length = high - low or abs(high) or 1.0
    low, high = low - 0.06 * length, high + 0.12 * length
    return low, high, lambda value: 1000 * (high - value) / (high - low)


def _marks(spots: Sequence[tuple[float, float]]) -> tuple[Mark, ...]:
    """Numbers above points; where two would meet, the later one stands alone."""
    marks: list[Mark] = []
    for number, (x, y) in enumerate(spots, 1):
        mark = (round(x / 10, 2), round(100 - y / 10, 2), str(number))
        if marks and abs(marks[-1][0] - mark[0]) < 4 and abs(marks[-1][1] - mark[1]) < 9:
            marks.pop()
        marks.append(mark)
    return tuple(marks)


def _axes(settings: Sequence[Mapping[str, Any]]) -> dict[str, Axis]:
    """One axis for each name that took several values, in the order in which names appear."""
    values: dict[str, list[Any]] = {}
    for setting in settings:
        for name, value in setting.items():
            values.setdefault(name, []).append(value)
    axes = {}
    for name, column in values.items():
        axis = _axis(column)
        if axis is not None:
            axes[name] = axis
    return axes


def _axis(values: Sequence[Any]) -> Axis | None:
    """The axis of these values: by size for numbers, else by name. None if all are equal."""
    different = list({_key(value): value for value in values}.values())
    if len(different) < 2:
        return None
    if not all(_is_number(value) for value in different):
        names = sorted(_key(value) for value in different)
        heights = {name: i / (len(names) - 1) for i, name in enumerate(names)}
        return Axis(heights, ", ".join(names))
    low, high = min(different), max(different)
    if low == high:
        return None  # 1 and 1.0 are one value, written in two ways
    scale = math.log if low > 0 and high / low > LOG_FACTOR else float
    length = scale(high) - scale(low)
    heights = {_key(value): (scale(value) - scale(low)) / length for value in different}
    return Axis(heights, f"{low:.3g} to {high:.3g}")


def _upside_down(axis: Axis) -> Axis:
    """The axis of a metric whose lowest value is the best."""
    low, high = axis.span.split(" to ")
    heights = {value: 1 - height for value, height in axis.heights.items()}
    return Axis(heights, f"{high} to {low}")


def _heights(row: Trial, axes: Mapping[str, Axis]) -> list[float | None]:
    """Where the line of a trial meets each axis. None where the trial has no value."""
    heights: list[float | None] = []
    for name, axis in axes.items():
        if name in row.hyperparameters:
            heights.append(axis.heights[_key(row.hyperparameters[name])])
        else:
            heights.append(None)
    return heights


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _key(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _worst_first(search: Search) -> list[Trial]:
    """The trials in drawing order: the best is drawn last, in front of the others."""
    return sorted(search.rows, key=lambda row: -row.rank)


def _look(row: Trial) -> str:
    return LOOKS.get(row.rank, OTHER_LOOK)


def _path(spots: Sequence[tuple[float, float]]) -> str:
    """An SVG line through these points of the square."""
    return "M" + "L".join(f"{x:.0f},{y:.0f}" for x, y in spots)


def _ticks(low: float, high: float, in_per_cent: bool = False) -> list[Tick]:
    """About five round numbers inside [low, high], which must differ. in_per_cent: 0.5 is 50 %."""
    length = high - low
    # The smallest round step that needs at most six intervals. Six that miss the end by a
    # thousandth are enough, too.
    power_of_ten = 10 ** math.floor(math.log10(length / 6))
    round_steps = [power_of_ten * factor for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in round_steps if step * 6 >= length * 0.999)

    # The multiples of the step. 1e-9: one that lies on an end counts, though rounding moved it.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # So many digits that neighbours differ: from 1,234,567 to 1,234,570 six are not enough.
    largest = max(abs(low), abs(high))
    digits = max(6, math.ceil(math.log10(largest / step)) + 2)
    ticks = []
    for k in range(first, last + 1):
        value = k * step
        # The margin of an axis may lie beyond: no share is 110 %.
        if in_per_cent and not 0 <= round(value, 9) <= 1:
            continue
        label = f"{100 * value:g} %" if in_per_cent else f"{value:.{digits}g}"
        ticks.append((100 * (value - low) / length, label))
    return ticks
