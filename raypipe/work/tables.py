"""The tables of results, for terminals and notebooks: a title, the columns' names, and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.report.formats import beside
from raypipe.search.trials.standing import Standing
from raypipe.watch.check import CheckResult
from raypipe.watch.retrained import RetrainResult

MOST_FIELDS = 6  # of a leaderboard; more fields are one column of text
LEVEL = 0.05  # of the loss "at worst"; one-sided, so the bound holds with 95 %


@dataclass(frozen=True)
class Table:
    """Cells are values; who shows them formats them."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


def leaderboard(
    metric: str,
    standings: Sequence[Standing],
    top: int = 8,
    usd_per_device_s: float | None = None,
) -> Table:
    """The best `top` trials, with the values that each one tried, and what each took.

    usd_per_device_s: what a second of a device costs; None: not known.
    """
    shown = standings[:top]
    # Not every trial draws every field.
    fields = list(dict.fromkeys(field for s in shown for field in s.changes))
    short = {field: field.rpartition(".")[2] for field in fields}
    in_one_column = len(fields) > MOST_FIELDS
    # Trials that ended after different numbers of epochs are compared after equally many.
    even = next((s.compared[0] for s in standings if s.compared), None)

    costs = _cost_columns(standings, usd_per_device_s)
    rows: list[list[Any]] = []
    for i, s in enumerate(shown, 1):
        row: list[Any] = [i, s.name, _number(s.best)]
        if even is not None:
            row.append(_number(s.compared[1]) if s.compared else None)
        row += [s.epochs, s.state, *_cost_of(s, costs, usd_per_device_s)]
        if in_one_column:
            row.append({short[field]: value for field, value in s.changes.items()})
        else:
            row += [s.changes.get(field, "") for field in fields]
        rows.append(row)
    more = f", best {top} of {len(standings)}" if len(standings) > top else ""
    after = [] if even is None else [f"after {even}"]
    names = ["values"] if in_one_column else list(short.values())
    columns = ["#", "trial", metric, *after, "epochs", "", *costs, *names]
    return Table(f"Leaderboard{more}", columns, rows)


def _cost_columns(standings: Sequence[Standing], usd_per_device_s: float | None) -> list[str]:
    """Seconds, device seconds where they are others, and money where its price is known."""
    if not any(s.seconds for s in standings):
        return []
    columns = ["s"]
    if any(abs(s.device_s - s.seconds) > 0.05 for s in standings):
        columns.append("device s")
    return columns if usd_per_device_s is None else [*columns, "$"]


def _cost_of(s: Standing, columns: Sequence[str], usd_per_device_s: float | None) -> list[Any]:
    usd = s.device_s * (usd_per_device_s or 0.0)
    known = {"s": round(s.seconds, 1), "device s": round(s.device_s, 1), "$": f"{usd:.4f}"}
    return [known[name] for name in columns]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def evidence(checked: CheckResult) -> Table:
    """One line for each detector and what it looked at."""
    report = checked.report
    rows = []
    for e in report.evidence:
        verdict = "drift" if e.is_drift else "no drift"
        on = f"{e.on} ({e.detail})" if e.detail else e.on
        rows.append([e.detector.upper(), on, e.statistic, p_text(e.p_value, e.threshold), verdict])
    said = "DRIFT" if report.is_drift else "no drift"
    sizes = f"{report.batch_images} images against {report.reference_images}"
    p = f"p {p_text(report.p_value, report.alpha)}, alpha {report.alpha:g}"
    title = f"{checked.name}: {said} ({p}), {sizes}"
    return Table(title, ["test", "on", "statistic", "p", ""], rows)


def comparison(done: RetrainResult) -> Table | None:
    """Both models on each slice; of several slices, all rows together are the last line."""
    if not done.slices:
        return None
    errors = done.slices[0].unit is not None
    figure = "{:.4g}" if errors else "{:.1%}"
    shown = [(f"{s.slice} (new)" if s.is_new else s.slice, s) for s in done.slices]
    if done.union is not None and len(shown) > 1:
        shown.append((done.union.slice, done.union))
    # Slices that the gate names overlap the others, so they come after the sum.
    shown += [(f"gate: {one.name}", one.judged) for one in done.named if one.judged is not None]
    rows = []
    for name, s in shown:
        means = [figure.format(s.champion), figure.format(s.challenger)]
        # A share becomes percentage points. An error is divided by its unit (the labels' standard
        # deviation; 1 for a probability) and becomes per cent of it.
        difference, at_worst = 100 * s.difference, 100 * s.at_worst(LEVEL)
        gain = [f"{difference:+.1f}", f"{at_worst:+.1f}"]
        rows.append([name, s.images, *means, *gain, p_text(s.p_value)])
    measured = ": mean absolute error" if errors else ""
    gained = "% of unit" if errors else "points"
    columns = ["slice", "images", "champion", "challenger", gained, "at worst (95 %)", "p"]
    title = f"{done.champion} against {done.challenger}, same test images{measured}"
    return Table(title, columns, rows)


def limits(done: RetrainResult) -> Table | None:
    """Latency and size of both models, where the gate limits them."""
    measured = done.measured
    if measured is None:
        return None
    rows: list[list[Any]] = []
    if measured.champion_ms is not None and measured.challenger_ms is not None:
        images = "image" if measured.batch == 1 else f"{measured.batch} images"
        sides = [f"{ms.median:.4g}" for ms in (measured.champion_ms, measured.challenger_ms)]
        ratio = f"{measured.ratio.median:.3g}" if measured.ratio else ""
        rows.append([f"ms for {images}, median of {measured.rounds}", *sides, ratio])
    sizes = measured.champion_bytes, measured.challenger_bytes
    ratio = f"{sizes[1] / max(1, sizes[0]):.3g}"
    rows.append(["MB of the package", *(f"{size / 10**6:.4g}" for size in sizes), ratio])
    title = "Latency and size" + (f", on {measured.machine}" if measured.machine else "")
    return Table(title, ["", "champion", "challenger", "ratio"], rows)


def p_text(p: float, limit: float | None = None) -> str:
    """A p-value for people: three digits, more beside a limit, and never a bare 0. NaN is "–".

    limit: what it is compared with, besides the usual ones.
    """
    if math.isnan(p):
        return "–"
    return beside(p, lambda more: f"{p:.{3 + more}g}", limit) if p >= 1e-6 else "< 1e-6"
