"""Claims of the search, one JSON line with the keys of all of them.

python -m benchmarks.search --json

asha_vs_random    halving.py: epochs on tabulated learning curves, without Ray (10 s)
reach_vs_random, cap_vs_asha, cap_vs_asha_by, short    thaw.py: the same for every rule, on the
solar table (a minute). `cap_vs_asha` is that of the default scheduler, so 1 while that is asha.
wall_vs_ideal, overhead_ms_per_trial, decoded_vs_table    trials.py: sixteen trials on a cluster of
two CPUs (a minute)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks import curve_tables, halving, thaw, trials


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


def rules() -> dict[str, Any]:
    """Every rule that a search may have; the solar table, two workers, 20 orders, val_accuracy."""
    found = thaw.ratios(thaw.compare(curve_tables.table("solar", None), range(20)))
    caps = {rule: ratio for rule, (ratio, *_) in found["cap_vs_asha"].items()} | {"asha": 1.0}
    return {
        "reach_vs_random": {rule: ratio for rule, (ratio, *_) in found["reach_vs_random"].items()},
        "cap_vs_asha": caps.get(thaw.DEFAULTS.scheduler, 1.0),
        "cap_vs_asha_by": caps,
        "short": found["short"],
    }


PARTS: list[Callable[[], dict[str, Any]]] = [curves, rules, trials.measure]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="accepted for uniformity: the output is one JSON line anyway",
    )
    parser.parse_args()
    print(json.dumps({key: value for part in PARTS for key, value in part().items()}))


if __name__ == "__main__":
    main()
