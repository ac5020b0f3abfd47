"""Claims of the search, one JSON line with the keys of all of them.

python -m benchmarks.search --json

asha_vs_random, cap_vs_asha    halving.py: epochs on tabulated learning curves, without Ray (10 s)
wall_vs_ideal, overhead_ms_per_trial, decoded_vs_table    trials.py: sixteen trials on a cluster of
two CPUs (a minute)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks import halving, trials


def curves() -> dict[str, Any]:
    """Two workers, 20 orders, val_accuracy; ASHA on val_loss, too."""
    accuracy, loss = (
        halving.compare(halving.Table.read(halving.CURVES, f"val_{name}"))
        for name in ("accuracy", "loss")
    )
    return halving.ratios(accuracy) | {
        "asha_vs_random_by_loss": halving.ratios(loss)["asha_vs_random"]
    }


PARTS: list[Callable[[], dict[str, Any]]] = [curves, trials.measure]


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
