"""What a search bought, as parts of its page: the best so far over time, and what speed costs.

Both charts number their points, and the table beside each says what they are. So they can be read
on a phone, in print, and without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypipe import report
from raypipe.search.limits import Variant
from raypipe.search.result import SearchResult
from raypipe.search.trials.standing import Reached
from raypipe.train.stopping import Mode, improved

MOST_ROWS = 12
MINUTE = 60.0


@dataclass(frozen=True)
class Point:
    """A model with its time for an image and its validation metric."""

    name: str
    value: float
    variant: Variant


def pareto(points: Sequence[Point], mode: Mode) -> list[int]:
    """The places of the points that no other one beats in both, by rising time.

    Of equally good ones the fastest counts, and of equally fast ones the best.
    """
    sign = -1 if mode == "max" else 1
    order = sorted(
        (place for place, point in enumerate(points) if math.isfinite(point.value)),
        key=lambda place: (points[place].variant.latency_ms, sign * points[place].value),
    )
    best: list[int] = []
    for place in order:
        if improved(points[place].value, points[best[-1]].value if best else None, mode):
            best.append(place)
    return best


def points(result: SearchResult, variants: Mapping[str, Variant]) -> list[Point]:
    """A point for each trial that has a model, in the order of the leaderboard.

    variants: by `ModelConfig.shape`; a trial of another shape has no point.
    """
    found = []
    for trial in result.trials:
        model = result.models.get(trial.name)
        variant = variants.get(model.shape) if model is not None else None
        if trial.checkpoint is not None and variant is not None:
            found.append(Point(trial.name, trial.metric, variant))
    return found


def blocks(
    result: SearchResult, variants: Mapping[str, Variant], ensemble: Variant | None = None
) -> tuple[report.Block, ...]:
    """The sections of the page; none for a search that recorded neither.

    variants: see `points`. ensemble: of the registered model, where it is one.
    """
    found = []
    if result.reached:
        found.append(_minutes(result))
    timed = points(result, variants)
    if ensemble is not None:
        timed.append(Point("the ensemble", result.best.metrics[result.metric], ensemble))
    best = [point.variant for point in timed if point.name == result.trials[0].name]
    if best and result.members and not (result.shares or result.refitted):
        # A mean of weights takes as long as the best trial. It comes first: of equals it counts.
        timed.insert(0, Point("the mean of weights", result.best.metrics[result.metric], best[0]))
    if timed:
        found.append(_front(timed, result))
    return tuple(found)


def _minutes(result: SearchResult) -> report.Block:
    """The best so far: what each minute bought."""
    reached = list(result.reached)
    unit, name = (MINUTE, "minutes") if reached[-1].seconds > 2 * MINUTE else (1.0, "seconds")
    share = "acc" in result.metric
    drawn = report.so_far(
        [(one.seconds / unit, one.value) for one in reached], result.trials_s / unit, share
    )
    title = f"{result.metric} over time"
    plot = (report.Plot(title, drawn, name, result.metric),) if drawn else ()
    rows = []
    for number, one in enumerate(reached, 1):
        better = one.value - reached[number - 2].value
        better = better if result.mode == "max" else -better
        gain = "" if number == 1 else _gain(better, share)
        rows.append((str(number), _time(one.seconds), _value(one.value, share), gain, _by(one)))
    gained = "Points" if share else "Gain"
    columns = (("", "num"), ("At", "num"), (result.metric, "num"), (gained, "num"), ("By", ""))
    table = report.Table("Each time it became better", columns, tuple(rows), open_rows=MOST_ROWS)
    return report.Block(
        "What each minute bought", _said(result, reached), plots=plot, tables=(table,)
    )


def _said(result: SearchResult, reached: Sequence[Reached]) -> str:
    """In a sentence: when the search was nearly where it ended."""
    last = reached[-1]
    text = f"The best {result.metric} was reached after {_time(last.seconds)}"
    whole = result.trials_s
    if whole > last.seconds:
        # Heads of a first answer have no epochs, and come first.
        what = "the trials" if reached[0].epochs else "the first answer and the trials"
        text += f"; {what} took {_time(whole)}"
    return text + "."


def _front(found: Sequence[Point], result: SearchResult) -> report.Block:
    """Accuracy against latency."""
    best = pareto(found, result.mode)
    share = "acc" in result.metric
    drawn = report.front([(p.variant.latency_ms, p.value) for p in found], best, share)
    plots = (
        (report.Plot(f"{result.metric} and time", drawn, "ms an image", result.metric),)
        if drawn
        else ()
    )
    rows = []
    for number, place in enumerate(best, 1):
        one = found[place]
        time, size = f"{one.variant.latency_ms:.3g} ms", f"{one.variant.size_mb:.3g} MB"
        rows.append((str(number), one.name, _value(one.value, share), time, size, one.variant.text))
    columns = (
        ("", "num"),
        ("Trial", ""),
        (result.metric, "num"),
        ("One image", "num"),
        ("Weights", "num"),
        ("Model", ""),
    )
    table = report.Table("No trial is both faster and better", columns, tuple(rows))
    text = (
        "The time is for one image, from encoded bytes to its label: a median of repeated calls on "
        "the CPU of the machine that ran the search. A faster model costs what the line falls."
    )
    return report.Block("Speed and quality", text, plots=plots, tables=(table,))


def _by(one: Reached) -> str:
    if not one.epochs:
        return one.by
    return f"{one.by}, epoch {one.epochs}"


def _value(value: float, share: bool) -> str:
    return f"{100 * value:.2f} %" if share else f"{value:.4g}"


def _gain(gain: float, share: bool) -> str:
    return f"{100 * gain:+.2f}" if share else f"{gain:+.4g}"


def _time(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"
