"""Freeze-thaw search beside ASHA, PASHA and random search on tabulated learning curves.

    python -m benchmarks.thaw --tables solar,dev [--orders 0:20] [--seconds] [--trials 16] \
        [--out FILE]
    python -m benchmarks.thaw --report FILE

Wanted: a fifth of random search's epochs in the median of the tables, half on the worst; 0.6 of
ASHA's epochs in all at 0.1 % lost; 80 % intervals of the predicted remaining gain that cover 75 to
85 %.

Only training is looked up. The rules are those of a search, with its default settings. Workers
train side by side; each epoch takes one unit of time or, with --seconds, the seconds that were
measured, and then freeze_thaw is told them. An order is a permutation of the configurations, by its
seed.

    reach    until a trial first reports a value within 1 % of the best final one
    whole    until the rule ends the search
    short    by how many per cent the best value found is below that of the whole table

Without --seconds these count epochs of all workers, with it seconds of the clock. A search that
never gets there counts with the epochs, or seconds, of the whole table.

With --trials, a search has the first trials of an order, and they are the whole table to it.

--out appends one JSON line for each order, and skips those that the file has, so a long comparison
can be made in pieces. Tables: solar, emoji, a task of Quick-Tune's, `dev` (its even tasks, on which
the rule was developed), `held` (its odd ones).
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curve_tables import CurveTable, curves_folder, table, tasks
from raypipe.search.schedulers.freeze_thaw import FreezeThaw
from raypipe.search.schedulers.halving import Halving
from raypipe.search.settings import SearchConfig

DEFAULTS = SearchConfig()
WORKERS = 2
RULES = ("random", "asha", "pasha", "freeze_thaw")
COVER = 1.2816  # standard deviations on either side of 80 %
EVERY = 20  # reports between two looks at what is predicted


class Search:
    """One search over a table. `rule` by name."""

    def __init__(self, of: CurveTable, order: list[int], rule: str, is_timed: bool) -> None:
        self._of = of
        self._pending = [str(i) for i in order]
        self._is_timed = is_timed
        self._done: dict[str, int] = {}  # trial -> epochs
        self.halving: Halving | None = None
        self.thaw: FreezeThaw | None = None
        if rule in ("asha", "pasha"):
            grace, capped = min(DEFAULTS.grace, of.epochs), rule == "pasha"
            reduction, pauses = DEFAULTS.reduction, DEFAULTS.pauses
            self.halving = Halving(of.epochs, grace, reduction, "max", pauses, capped, len(order))
        elif rule == "freeze_thaw":
            self.thaw = FreezeThaw(of.epochs, of.group_D)
            for name in self._pending:
                self.thaw.meet(name, of.x_MD[int(name)])

    def seconds(self, trial: str) -> float:
        """Of the trial's next epoch; 1 if none are counted."""
        if not self._is_timed or self._of.seconds is None:
            return 1.0
        return self._of.seconds[int(trial)][self._done.get(trial, 0)]

    def next(self, idle: bool) -> str | None:
        """The trial that a free worker takes. idle: no worker trains."""
        if self.thaw:
            return self.thaw.choose()
        rule = self.halving
        if rule and (ready := rule.promotable()):
            rule.resume(ready[0])
            return ready[0]
        if self._pending:
            return self._pending.pop(0)
        last = rule.last() if rule and idle else None
        if rule and last:
            rule.resume(last, to_the_end=True)
        return last

    def trained(self, trial: str) -> tuple[float, bool]:
        """(the metric after one more epoch of the trial, whether it goes on)."""
        i = int(trial)
        seconds = self.seconds(trial)
        done = self._done[trial] = self._done.get(trial, 0) + 1
        value = self._of.values[i][done - 1]
        verdict = "go on"
        if self.thaw:
            aim = self._of.targets[i][done - 1]
            told = seconds if self._is_timed else None
            verdict = self.thaw.report(trial, done, value, aim, told)
        elif self.halving:
            verdict = self.halving.report(trial, done, value)
        if done < len(self._of.values[i]):
            return value, verdict == "go on"
        # The table has no more of it.
        if self.thaw:
            self.thaw.end(trial)
        elif self.halving:
            self.halving.end(trial)
        return value, False

    def covered(self) -> Iterator[bool]:
        """Of each paused trial: does its last target lie within the 80 % interval?"""
        if self.thaw is None:
            return
        # A copy is asked, for a forecast may fit the model, and the search would go on with that.
        for trial, (mean, sd) in copy.copy(self.thaw).forecast().items():
            curve = self._of.targets[int(trial)]
            if len(curve) == self._of.epochs:
                yield abs(curve[-1] - mean) <= COVER * sd


def run(
    of: CurveTable, order: list[int], rule: str, is_timed: bool = False, workers: int = WORKERS
) -> dict[str, float]:
    """One search: reach, whole, short and what else is shown."""
    search = Search(of, order, rule, is_timed)
    free, training = list(range(workers)), []
    clock, spent, found, cpu_s = 0.0, 0, 0.0, time.process_time()
    reach: float | None = None
    within: list[bool] = []
    while True:
        while free and (trial := search.next(idle=not training)):
            heapq.heappush(training, (clock + search.seconds(trial), free.pop(0), trial))
        if not training:
            break
        # All epochs that end now end before anybody chooses.
        clock = training[0][0]
        ended = []
        while training and training[0][0] == clock:
            ended.append(heapq.heappop(training))
        for _, worker, trial in ended:
            value, goes_on = search.trained(trial)
            spent, found = spent + 1, max(found, value)
            if reach is None and value >= of.bar:
                reach = clock if is_timed else spent
            if goes_on:
                heapq.heappush(training, (clock + search.seconds(trial), worker, trial))
            else:
                free.append(worker)
            if spent % EVERY == 0:
                within.extend(search.covered())
        free.sort()
    if reach is None:
        curves = of.seconds if is_timed and of.seconds else [[1.0] * len(c) for c in of.values]
        reach = sum(map(sum, curves)) / (workers if is_timed else 1)
    return {
        "reach": reach,
        "whole": clock if is_timed else spent,
        "short": 100 * (of.best - found) / of.best,
        "cpu_s": time.process_time() - cpu_s,
        "covered": sum(within),
        "forecasts": len(within),
    }


def orders_of(of: CurveTable, seed: int) -> list[int]:
    return random.Random(seed).sample(range(len(of.values)), len(of.values))


def search_of(of: CurveTable, seed: int, trials: int | None) -> tuple[CurveTable, list[int]]:
    """(the table, an order of it); with `trials`, the first ones of that order as a table."""
    order = orders_of(of, seed)
    if trials is None:
        return of, order
    few = order[:trials]
    values, targets = ([curves[i] for i in few] for curves in (of.values, of.targets))
    seconds = of.seconds and [of.seconds[i] for i in few]
    first = replace(of, values=values, targets=targets, seconds=seconds, x_MD=of.x_MD[few])
    return first, [*range(len(few))]


def ratios(found: dict[str, list[dict[str, float]]], draws: int = 1000) -> dict[str, Any]:
    """Of the same orders under each rule: [ratio, ends of its 95 % bootstrap interval]."""
    rows = {
        rule: {key: np.array([one[key] for one in some]) for key in some[0]}
        for rule, some in found.items()
    }
    count = len(next(iter(found.values())))
    some_DN = np.random.default_rng(0).integers(0, count, (draws, count))

    def ratio(rule: str, over: str, key: str) -> list[float]:
        one, other = rows[rule][key], rows[over][key]
        drawn = one[some_DN].mean(1) / other[some_DN].mean(1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        return [round(float(v), 3) for v in (one.mean() / other.mean(), low, high)]

    thaw = rows["freeze_thaw"]
    rules = RULES[1:]
    return {
        "orders": count,
        "reach_vs_random": {rule: ratio(rule, "random", "reach") for rule in rules},
        "cap_vs_asha": {rule: ratio(rule, "asha", "whole") for rule in rules[1:]},
        "short": {rule: round(float(rows[rule]["short"].mean()), 3) for rule in rules},
        "covered": round(float(thaw["covered"].sum() / max(1, thaw["forecasts"].sum())), 3),
        "cpu_s": round(float(thaw["cpu_s"].mean()), 2),
    }


def compare(
    of: CurveTable, seeds: range, is_timed: bool = False, trials: int | None = None
) -> dict[str, list[dict[str, float]]]:
    """Each rule's searches over the orders."""
    searches = [search_of(of, seed, trials) for seed in seeds]
    return {rule: [run(*search, rule, is_timed) for search in searches] for rule in RULES}


def append(of: CurveTable, seeds: range, is_timed: bool, trials: int | None, out: Path) -> None:
    """Run the orders that the file does not have yet."""
    known = {
        (line["table"], line["timed"], line["seed"], line.get("trials"))
        for line in map(json.loads, out.read_text().splitlines() if out.exists() else [])
    }
    for seed in seeds:
        if (of.name, is_timed, seed, trials) in known:
            continue
        search = search_of(of, seed, trials)
        line = {"table": of.name, "timed": is_timed, "seed": seed}
        line |= {"trials": trials} if trials else {}
        line |= {rule: run(*search, rule, is_timed) for rule in RULES}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def report(file: Path) -> None:
    """One line for each table, and the median and the worst of Quick-Tune's tasks."""
    lines = defaultdict(list)
    for line in map(json.loads, file.read_text().splitlines()):
        lines[line["table"], line["timed"], line.get("trials", 0)].append(line)
    reached, ended, short = defaultdict(list), defaultdict(list), defaultdict(list)
    for (name, is_timed, trials), some in sorted(lines.items()):
        found = {rule: [one[rule] for one in some] for rule in RULES}
        shown = ratios(found)
        unit = "seconds" if is_timed else "epochs"
        unit += f" of {trials} trials" if trials else ""
        print(json.dumps({"table": name, "unit": unit} | shown))
        if name in ("solar", "emoji"):
            continue
        for rule in RULES[1:]:
            whole, all_ = (sum(one["whole"] for one in found[by]) for by in (rule, "random"))
            reached[unit, rule].append(shown["reach_vs_random"][rule][0])
            ended[unit, rule].append(whole / all_)
            short[unit, rule].append(shown["short"][rule])
    for (unit, rule), values in sorted(reached.items()):
        ends, lost = np.median(ended[unit, rule]), short[unit, rule]
        print(
            f"{len(values)} tasks, {unit}, {rule}: median {np.median(values):.3f}, "
            f"worst {max(values):.3f}; ends at {ends:.3f}; "
            f"loses {np.median(lost):.2f} %, worst {max(lost):.2f} %"
        )


def chosen_tables(names: str, folder: Path | None) -> list[CurveTable]:
    """Tables by name, with `dev` and `held` for groups of Quick-Tune's tasks."""
    found = []
    for name in names.split(","):
        if name in ("dev", "held") and folder is None:
            print(f"{name} is skipped: Quick-Tune's curves are not here")
        elif name in ("dev", "held"):
            assert folder is not None
            start = 0 if name == "dev" else 1
            found.extend(table(task, folder) for task in tasks(folder)[start::2])
        else:
            found.append(table(name, folder))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", default="solar")
    parser.add_argument("--curves", type=Path, help="the folder of Quick-Tune's tables")
    parser.add_argument("--orders", default="0:20", help="seeds of the orders, FIRST:END")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--trials", type=int, help="of each order; by default all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    chosen = parser.parse_args()
    if chosen.report:
        report(chosen.report)
        return
    seeds = range(*map(int, chosen.orders.split(":")))
    for of in chosen_tables(chosen.tables, curves_folder(chosen.curves)):
        if chosen.seconds and of.seconds is None:
            print(f"{of.name} is skipped: it has no seconds")
        elif chosen.out:
            append(of, seeds, chosen.seconds, chosen.trials, chosen.out)
        else:
            found = compare(of, seeds, chosen.seconds, chosen.trials)
            print(json.dumps({"table": of.name} | ratios(found)))


if __name__ == "__main__":
    main()
