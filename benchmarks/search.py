"""Claims of the search, one JSON line with the keys of all of them.

python -m benchmarks.search --json [--orders 20] [--tasks 1]

asha_vs_random    halving.py: epochs on tabulated learning curves, without Ray (10 s)
reach_vs_random, cap_vs_asha, cap_vs_asha_by, short    thaw.py: the same for every rule, on the
solar table (a minute). `cap_vs_asha` is that of the default scheduler, so 1 while that is asha.
emoji    the same of the emoji table, in epochs and in seconds (two minutes)
tasks    with --tasks N: the median and the worst of Quick-Tune's tasks, N orders of each, in epochs
and in seconds (four minutes an order). Records have more orders: benchmarks.thaw --out FILE
wall_vs_ideal, overhead_ms_per_trial, decoded_vs_table    trials.py: sixteen trials on a cluster of
two CPUs (a minute)
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from benchmarks import curve_tables, halving, thaw, trials

UNITS = ("epochs", "seconds")


def curves() -> dict[str, Any]:
    """Two workers, 20 orders, val_accuracy; ASHA on val_loss, too."""
    accuracy, loss = (
        halving.compare(halving.Table.read(halving.CURVES, f"val_{name}"))
        for name in ("accuracy", "loss")
    )
    return {
        "asha_vs_random": halving.ratios(accuracy)["asha_vs_random"],
        "asha_vs_random_by_loss": halving.ratios(loss)["asha_vs_random"],
    }


def rules(orders: int) -> dict[str, Any]:
    """Every rule that a search may have; the solar table, two workers, val_accuracy."""
    found = _ratios(curve_tables.table("solar", None), orders, is_timed=False)
    caps = found["cap_vs_asha"] | {"asha": 1.0}
    return {
        "reach_vs_random": found["reach_vs_random"],
        "cap_vs_asha": caps.get(thaw.DEFAULTS.scheduler, 1.0),
        "cap_vs_asha_by": caps,
        "short": found["short"],
    }


def emoji(orders: int) -> dict[str, Any]:
    """The table that was made after freeze_thaw was frozen."""
    of = curve_tables.table("emoji", None)
    return {"emoji": {unit: _ratios(of, orders, unit == "seconds") for unit in UNITS}}


def tasks(orders: int) -> dict[str, Any]:
    """Of Quick-Tune's tasks: the median and the worst of each rule's reach ÷ random's."""
    folder = curve_tables.curves_folder()
    if folder is None or orders < 1:
        return {}
    tables = [curve_tables.table(name, folder) for name in curve_tables.tasks(folder)]
    found: dict[str, Any] = {}
    for unit in UNITS:
        reached = [_ratios(of, orders, unit == "seconds")["reach_vs_random"] for of in tables]
        found[unit] = {
            rule: {
                "median": round(median(one[rule] for one in reached), 3),
                "worst": max(one[rule] for one in reached),
            }
            for rule in thaw.RULES[1:]
        }
    return {"tasks": found | {"count": len(tables), "orders": orders}}


def _ratios(of: curve_tables.CurveTable, orders: int, is_timed: bool) -> dict[str, Any]:
    """`thaw.ratios` without intervals."""
    found = thaw.ratios(thaw.compare(of, range(orders), is_timed))
    for key in ("reach_vs_random", "cap_vs_asha"):
        found[key] = {rule: ratio for rule, (ratio, *_) in found[key].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=20, help="of the solar and the emoji table")
    parser.add_argument("--tasks", type=int, default=0, help="orders of each of Quick-Tune's tasks")
    parser.add_argument(
        "--json",
        action="store_true",
        help="accepted for uniformity: the output is one JSON line anyway",
    )
    chosen = parser.parse_args()
    found = curves() | rules(chosen.orders) | emoji(chosen.orders) | tasks(chosen.tasks)
    print(json.dumps(found | trials.measure()))


if __name__ == "__main__":
    main()
