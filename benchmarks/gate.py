"""What the gate lets through: promotions of simulated challengers, by number of slices, rows a slice and differing pairs.

    python -m benchmarks.gate [--draws 2000] [--json]

Every draw is a set of slices with paired results: rows that only the champion, or only the challenger, has right. It is judged
by `raypipe.watch.decide.gate` at the product's defaults. `discordant` is the share of rows on which the models differ; a
challenger that is d better has d/2 more of one kind and d/2 less of the other (or d of one kind, where that is more).

worse          one slice worse by the tolerance; the others equal, better or mixed: promoted in at most 5 % (safety_alpha)
better         one slice equal, one 10 points better: promoted in at least 70 % at 160 rows, 90 % at 320, at 7 % discordant
equal          equal everywhere: promoted in at most 5 % (alpha)
cleared        equal on all slices but one, which is 10 points better: what many slices cost
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
from scipy.special import bdtrc

from raypipe.watch.decide import Comparison, GateConfig, gate

CFG = GateConfig()
ROWS = (50, 160, 320, 640, 2000)
SLICES = (1, 2, 5, 10, 30)
DISCORDANT = (0.05, 0.07, 0.1, 0.2)
GAIN = 0.10


def promoted(rows_S: list[int], gains_S: list[float], discordant: float, draws: int, seed: int, surplus: bool = False) -> float:
    """The share of draws in which a challenger with these true gains is promoted.

    A gain changes which side wins the differing pairs; with `surplus` it adds pairs to the equal challenger's instead.
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
        _comparison(f"s{n}", rows, int(c[0]), int(c[1])) for n, (rows, c) in enumerate(zip(rows_S, counts_S, strict=True))
    ]
    won, lost = sum(s.won for s in slices), sum(s.lost for s in slices)
    return gate(slices, _comparison("all", sum(rows_S), won, lost), CFG).act


def _comparison(name: str, rows: int, won: int, lost: int) -> Comparison:
    p_value = float(bdtrc(won - 1, won + lost, 0.5)) if won else 1.0
    return Comparison(name, rows, 0.5, 0.5 + (won - lost) / rows, won, lost, p_value, is_new=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="one JSON line and nothing else")
    asked = parser.parse_args()
    draws, tolerance = asked.draws, CFG.tolerance
    found: dict[str, dict[str, float]] = {"worse": {}, "better": {}, "equal": {}, "cleared": {}}

    def say(kind: str, name: str, value: float) -> None:
        found[kind][name] = round(value, 4)
        if not asked.json:
            print(f"{kind:8} {name:60} {value:7.2%}", flush=True)

    for slices in SLICES:
        for rows in ROWS:
            for q in DISCORDANT:
                rows_S = [rows] * slices
                name = f"{slices} slices x {rows} rows, {q:.0%} discordant"
                seed = slices * 10_000_000 + rows * 1000 + round(q * 100)
                say("equal", name, promoted(rows_S, [0.0] * slices, q, draws, seed))
                if slices == 1:
                    say("worse", name, promoted(rows_S, [-tolerance], q, draws, seed))
                    continue
                # what the other slices truly do decides how easily the bad one slips through
                one_better = [-tolerance, GAIN] + [0.0] * (slices - 2)
                all_better = [-tolerance] + [GAIN] * (slices - 1)
                mixed = [-tolerance] + [GAIN if n % 2 else 0.0 for n in range(slices - 1, 0, -1)]
                say("worse", f"{name}, one better", promoted(rows_S, one_better, q, draws, seed))
                say("worse", f"{name}, all better", promoted(rows_S, all_better, q, draws, seed))
                say("worse", f"{name}, half better", promoted(rows_S, mixed, q, draws, seed))
                say("cleared", name, promoted(rows_S, [GAIN] + [0.0] * (slices - 1), q, draws, seed))
    for rows in (160, 320):
        for surplus in (False, True):
            pairs = 0.07 + GAIN if surplus else GAIN
            name = f"2 slices x {rows} rows, 7% discordant, {pairs:.0%} where it is better"
            say("better", name, promoted([rows, rows], [0.0, GAIN], 0.07, draws, rows, surplus))
    margin = 3 * math.sqrt(0.05 * 0.95 / draws)
    over = {n: v for kind in ("worse", "equal") for n, v in found[kind].items() if v > 0.05 + margin}
    summary = {
        "draws": draws,
        "highest_worse": max(found["worse"].values()),
        "highest_equal": max(found["equal"].values()),
        "above_5_percent_by_three_errors": over,
        "better": found["better"],
    }
    print(json.dumps(summary if not asked.json else summary | found))


if __name__ == "__main__":
    main()
