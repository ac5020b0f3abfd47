"""What ASHA and its cap save on tabulated learning curves. Wanted: a fifth of random search's
epochs, and 0.6 of ASHA's.

python -m benchmarks.halving [--curves benchmarks/data/solar_curves.csv] [--metric val_accuracy]
[--workers 2] [--seeds 20]
[--grace 3]

The rules are those that a search runs (raypipe/search/halving.py) with the settings that a search
has by default (raypipe/search/settings.py: grace, reduction, pauses); only training is looked up,
in the curves of real ones. Workers take turns, an epoch each; a free one takes a trial that may go
on, else a new one. A seed is an order of the configurations. Epochs of all workers are counted:

reach     until a trial first reports a value within 1 % of the best final one (best * 0.99; of a
loss, best / 0.99). Random
search trains every configuration in full, and any of its epochs may be that report, too. A search
that ends without
one counts as the whole table. whole     until nothing is left to do: every configuration was tried,
and at least one trained in full.

asha_vs_random = mean over seeds of ASHA's reach ÷ mean of random search's; cap_vs_asha = mean of
PASHA's whole ÷ mean of ASHA's whole: what a cap saves is the training of what already leads. Its
cost is `short`: by how many per cent the best value found is below that of the whole table.

benchmarks/thaw.py has freeze_thaw beside these rules, other tables, and seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from raypipe.search.schedulers.halving import Halving
from raypipe.search.settings import SearchConfig
from raypipe.train.stopping import LOWER_IS_BETTER, Mode

CURVES = Path(__file__).parent / "data" / "solar_curves.csv"
Rule = Callable[[int, int, Mode], Halving | None]  # (epochs, configurations, mode)
DEFAULTS = SearchConfig()


def rules(grace: int = DEFAULTS.grace) -> dict[str, Rule]:
    """By name. `grace`: another one than a search has by default."""

    def halving(pauses: bool, capped: bool) -> Rule:
        return lambda epochs, total, mode: Halving(
            epochs, min(grace, epochs), DEFAULTS.reduction, mode, pauses, capped, total
        )

    return {
        "random": lambda epochs, total, mode: None,
        "asha": halving(DEFAULTS.pauses, capped=False),
        "pasha": halving(DEFAULTS.pauses, capped=True),
        "asha, never pausing": halving(pauses=False, capped=False),
        "pasha, pausing at the cap alone": halving(pauses=False, capped=True),
    }


@dataclass(frozen=True)
class Table:
    """values[configuration][epoch - 1] of one metric."""

    values: list[list[float]]
    mode: Mode

    @classmethod
    def read(cls, file: Path, metric: str) -> Table:
        lines = (
            line
            for line in file.read_text(encoding="utf-8").splitlines()
            if not line.startswith("#")
        )
        values = [
            [float(v) for name, v in row.items() if name.startswith(f"{metric}@")]
            for row in csv.DictReader(lines)
        ]
        return cls(values, "min" if metric in LOWER_IS_BETTER else "max")

    @property
    def epochs(self) -> int:
        return len(self.values[0])

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.mode == "max" else min(values)

    @property
    def bar(self) -> float:
        """1 % short of the best final value."""
        best = self.best([curve[-1] for curve in self.values])
        return best * 0.99 if self.mode == "max" else best / 0.99


@dataclass(frozen=True)
class Outcome:
    """Epochs until a value within 1 % was reported, and in all; the best value found; the cap at
    the end.
    """

    reach: int
    whole: int
    found: float
    cap: int


def run(table: Table, order: Sequence[int], rule: Halving | None, workers: int) -> Outcome:
    """One search over the table, in which an epoch takes every worker as long."""
    pending, running = [str(i) for i in order], {}
    bar, sign, everything = (
        table.bar,
        (1 if table.mode == "max" else -1),
        len(table.values) * table.epochs,
    )
    spent, reach, seen, done = 0, 0, [], dict.fromkeys(map(str, order), 0)
    while True:
        for worker in range(workers):
            if worker not in running and (trial := _next(rule, pending, not running)):
                running[worker] = trial
        if not running:
            return Outcome(
                reach or everything, spent, table.best(seen), rule.cap if rule else table.epochs
            )
        for worker, trial in sorted(running.items()):
            value = table.values[int(trial)][done[trial]]
            spent, done[trial] = spent + 1, done[trial] + 1
            seen.append(value)
            reach = reach or (spent if value * sign >= bar * sign else 0)
            said = rule.report(trial, done[trial], value) if rule else "go on"
            if said != "go on" or done[trial] == table.epochs:
                del running[worker]


def _next(rule: Halving | None, pending: list[str], idle: bool) -> str | None:
    """As HalvingScheduler.choose_trial_to_run."""
    if rule and (ready := rule.promotable()):
        rule.resume(ready[0])
        return ready[0]
    if pending:
        return pending.pop(0)
    last = rule.last() if rule and idle else None
    if rule and last:
        rule.resume(last, to_the_end=True)
    return last


def compare(
    table: Table, workers: int = 2, seeds: int = 20, grace: int = DEFAULTS.grace
) -> dict[str, dict[str, float]]:
    """Each rule's epochs over the seeds."""
    found = {}
    best = table.best([value for curve in table.values for value in curve])
    for name, make in rules(grace).items():
        ran = []
        for seed in range(seeds):
            order = random.Random(seed).sample(range(len(table.values)), len(table.values))
            ran.append(run(table, order, make(table.epochs, len(order), table.mode), workers))
        found[name] = {
            "reach": fmean(r.reach for r in ran),
            "reach_median": median(r.reach for r in ran),
            "whole": fmean(r.whole for r in ran),
            "short": fmean(abs(best - r.found) / abs(best) * 100 for r in ran),
            "cap": fmean(r.cap for r in ran),
        }
    return found


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The two keys of benchmarks/search.py."""
    asha, cap = (
        found["asha"]["reach"] / found["random"]["reach"],
        found["pasha"]["whole"] / found["asha"]["whole"],
    )
    return {"asha_vs_random": round(asha, 3), "cap_vs_asha": round(cap, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--metric", default="val_accuracy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--grace", type=int, default=DEFAULTS.grace)
    chosen = parser.parse_args()
    table = Table.read(chosen.curves, chosen.metric)
    found = compare(table, chosen.workers, chosen.seeds, chosen.grace)
    for name, row in found.items():
        print(f"{name:32}" + "".join(f" {key} {value:8.2f}" for key, value in row.items()))
    how = {"workers": chosen.workers, "seeds": chosen.seeds, "grace": chosen.grace}
    print(json.dumps(ratios(found) | {"configs": len(table.values)} | how))


if __name__ == "__main__":
    main()
