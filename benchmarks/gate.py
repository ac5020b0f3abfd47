"""What the gate lets through: how often simulated challengers are promoted.

    python -m benchmarks.gate [--draws 2000] [--json] [--figure FILE.svg]

Every draw is a set of slices with paired results: rows that only the champion, or only the
challenger, has right. It is judged by `raypipe.watch.decide.gate` at the product's defaults.
`discordant` is the share of rows on which the models differ. A challenger that is d better has d/2
more of one kind and d/2 less of the other, or d of one kind where that is more.

worse    one slice is worse by the tolerance, the others are equal, better or mixed: at most 5 %
(safety_alpha) equal    equal everywhere: at most 5 % (alpha) cleared  equal on all slices but one,
which is 10 points better; with two slices at 7 % discordant the goal is 70 % at
160 rows a slice and 90 % at 320. `surplus` adds the 10 points to the 7 % of differing rows: 17 %
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import bdtrc

from raypipe.watch.comparison import Comparison
from raypipe.watch.decide import GateConfig, gate

CFG = GateConfig()
ROWS = (50, 160, 320, 640, 2000)
SLICES = (1, 2, 5, 10, 30)
DISCORDANT = (0.05, 0.07, 0.1, 0.2)
GAIN = 0.10


@dataclass(frozen=True)
class Cell:
    """One kind of challenger at one size. `others`: what the remaining slices do. `promoted` is a
    share of draws.
    """

    case: str
    slices: int
    rows: int
    discordant: float
    others: str
    promoted: float


def promoted(
    rows_S: list[int],
    gains_S: list[float],
    discordant: float,
    draws: int,
    seed: int,
    surplus: bool = False,
) -> float:
    """The share of draws in which a challenger with these true gains is promoted.

    A gain changes which side wins the differing pairs; with `surplus` it adds pairs to the equal
    challenger's instead.
    """
    rng = np.random.default_rng(seed)
    cells = []
    for rows, gain in zip(rows_S, gains_S, strict=True):
        pairs = discordant + abs(gain) if surplus else max(discordant, abs(gain))
        shares = [(pairs + gain) / 2, (pairs - gain) / 2, 1 - pairs]
        cells.append(rng.multinomial(rows, shares, draws))
    return sum(_judge(rows_S, [c[n] for c in cells]) for n in range(draws)) / draws


def _judge(rows_S: list[int], counts_S: list[np.ndarray]) -> bool:
    slices = [
        _comparison(f"s{n}", rows, int(c[0]), int(c[1]))
        for n, (rows, c) in enumerate(zip(rows_S, counts_S, strict=True))
    ]
    won, lost = sum(s.won for s in slices), sum(s.lost for s in slices)
    return gate(slices, _comparison("all", sum(rows_S), won, lost), CFG).act


def _comparison(name: str, rows: int, won: int, lost: int) -> Comparison:
    p_value = float(bdtrc(won - 1, won + lost, 0.5)) if won else 1.0
    return Comparison(name, rows, 0.5, 0.5 + (won - lost) / rows, won, lost, p_value, is_new=False)


def simulate(draws: int, tell: Callable[[Cell], None]) -> list[Cell]:
    """Every cell of the grid, each judged `draws` times."""
    cells: list[Cell] = []

    def add(
        case: str,
        rows: int,
        q: float,
        gains_S: list[float],
        others: str = "",
        surplus: bool = False,
    ) -> None:
        seed = len(gains_S) * 10_000_000 + rows * 1000 + round(q * 100)
        share = promoted([rows] * len(gains_S), gains_S, q, draws, seed, surplus)
        cells.append(Cell(case, len(gains_S), rows, q, others, round(share, 4)))
        tell(cells[-1])

    bad = -CFG.tolerance
    for slices, rows, q in itertools.product(SLICES, ROWS, DISCORDANT):
        add("equal", rows, q, [0.0] * slices)
        if slices == 1:
            add("worse", rows, q, [bad])
            continue
        # what the other slices truly do decides how easily the bad one slips through
        add("worse", rows, q, [bad, GAIN] + [0.0] * (slices - 2), "one better, the rest equal")
        if slices > 2:
            add("worse", rows, q, [bad] + [GAIN] * (slices - 1), "all better")
            add("worse", rows, q, [bad] + [GAIN / 2] * (slices - 1), "all a little better")
            add(
                "worse",
                rows,
                q,
                [bad] + [GAIN if n % 2 else 0.0 for n in range(1, slices)],
                "half better",
            )
        add("cleared", rows, q, [GAIN] + [0.0] * (slices - 1))
    for rows in (160, 320):
        add("cleared", rows, 0.07, [GAIN, 0.0], "surplus", surplus=True)
    return cells


def draw(cells: list[Cell], path: str) -> None:
    """Three panels over rows a slice: harm that passes, chance that passes, gains that pass."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "raypipe"  # the same cells give the same file
    from matplotlib import pyplot

    panels = {
        "worse": "Worse by 5 points on one slice\n(the easiest case to slip through)",
        "equal": "Equal everywhere\n(highest of all discordances)",
        "cleared": "10 points better on one slice, equal elsewhere\n(7 % discordant)",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for axis, (case, title) in zip(axes, panels.items(), strict=True):
        for slices in SLICES:
            mine = [
                c for c in cells if c.case == case and c.slices == slices and c.others != "surplus"
            ]
            if case == "cleared":
                mine = [c for c in mine if c.discordant == 0.07]
            if not mine:
                continue
            highest = [max(c.promoted for c in mine if c.rows == rows) for rows in ROWS]
            axis.plot(
                ROWS,
                [100 * h for h in highest],
                marker="o",
                label=f"{slices} slice{'s' * (slices > 1)}",
            )
        axis.set(
            title=title,
            xscale="log",
            xlabel="test rows a slice",
            ylabel="promoted, %",
            ylim=(0, None),
        )
        axis.set_xticks(ROWS, [f"{rows:,}" for rows in ROWS], minor=False)
        axis.minorticks_off()
        if case != "cleared":
            axis.axhline(5, color="black", linestyle="--", linewidth=1)
            axis.set_ylim(0, 10)
        axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="one JSON line and nothing else")
    parser.add_argument("--figure", help="write the figure to this file")
    asked = parser.parse_args()

    def tell(c: Cell) -> None:
        if not asked.json:
            shape = f"{c.slices:2} x {c.rows:4} rows, {c.discordant:4.0%} discordant"
            print(f"{c.case:8} {shape} {c.others:28} {c.promoted:7.2%}", flush=True)

    cells = simulate(asked.draws, tell)
    if asked.figure:
        draw(cells, asked.figure)
    beyond_noise = 0.05 + 3 * math.sqrt(0.05 * 0.95 / asked.draws)
    bounded = [c for c in cells if c.case in ("worse", "equal")]
    summary = {
        "draws": asked.draws,
        "cells": len(cells),
        "highest": {
            case: max(c.promoted for c in cells if c.case == case) for case in ("worse", "equal")
        },
        "above_5_percent_beyond_noise": [asdict(c) for c in bounded if c.promoted > beyond_noise],
        "two_slices_7_percent": {
            f"{c.rows} rows{', surplus' * bool(c.others)}": c.promoted
            for c in cells
            if c.case == "cleared"
            and c.slices == 2
            and c.discordant == 0.07
            and c.rows in (160, 320)
        },
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
