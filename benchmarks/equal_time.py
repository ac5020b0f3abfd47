"""For the claim that in equal wall time our default finds better models than the usual searches.

So far it measures the usual ones. Our default (`search.budget_s`) and the first answer alone are
not methods of it yet, so it shows no claim.

    python -m benchmarks.equal_time --json --budget-s 180 [--tasks …] [--seeds 1 2] [--methods …]

Every cell is one task (task_tables.py), method, seed and budget, in a process of its own and on a
cluster of all CPUs that was there before. Its clock starts when the table is pinned and stops at
the budget: decoding, features, trials and, where a method has them, ensemble and refit are inside.
The test split is read afterwards, once, by the model that validation chose (looks.py notes it).

| method | what it is |
|---|---|
| asha | random values, our ASHA |
| optuna | Optuna's TPE with the median pruner, through plain Ray Tune |
| random | random values, every trial to its end |

All have the same trainable, decoded images, features and space; only who
chooses values and who ends trials differs. Each trial has EPOCHS epochs, or less.

The ledger goes on where it stopped. Told are: the mean rank by test score, and the median time to
99 % of the best validation score that any method reached on this task and seed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import looks, task_tables
from benchmarks.ledger import Cell, Ledger, Line, add_arguments, asked_of, write_result

EPOCHS = 9
SPARE_S = 180  # beside the budget: imports, the cluster, the ingest, the test
NEAR = 0.99
MODULE = "benchmarks.equal_time"
METHODS = ("asha", "optuna", "random")


def job_of(asked: Line) -> Any:
    """The job of a cell: its table, its seed, and defaults."""
    from raypipe.config import validate
    from raypipe.job import Job

    folder = Path(asked["folder"])
    home = folder.parents[1] / "tables"
    table = task_tables.table(asked["task"], asked["seed"], home)
    return validate(
        Job,
        {
            "table": table.model_dump(),
            "run": {"dir": str(folder / "run"), "seed": asked["seed"]},
            "cluster": {"address": "local", "object_store_mb": 1500},
            "train": {"epochs": EPOCHS},
        }
        | asked["config"],
    )


def measured(asked: Line) -> Line:
    """One cell, in this process."""
    from raypipe.cluster.connect import connect, prepare_environment

    prepare_environment()  # before anything imports Ray
    from benchmarks import plain_tune
    from raypipe.search.trials.tune_patches import PRELOAD

    job = job_of(asked)
    table = task_tables.digest(job.table)
    connect(job.cluster, preload=PRELOAD)
    found, test = plain_tune.search(asked, job)
    # The only place where a test split is read.
    why = f"{asked['method']}, {asked['budget_s']:g} s"
    looks.note(asked["task"], f"seed {asked['seed']}, {table}", f"python -m {MODULE}", why)
    return found | {"table": table, "test": test()}


# The summary: pure.


def summary(lines: Iterable[Line]) -> Line:
    """By budget and method: mean rank by test score, mean test score, seconds to 99 %."""
    by_race: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        by_race[line["budget_s"], line["task"], line["seed"]].append(line)
    ranks: dict[tuple[float, str], list[float]] = defaultdict(list)
    scores: dict[tuple[float, str], list[float]] = defaultdict(list)
    times: dict[tuple[float, str], list[float]] = defaultdict(list)
    for (budget_s, _, _), race in by_race.items():
        best = max(line["val"] for line in race)
        for line in race:
            key = (budget_s, line["method"])
            ranks[key].append(rank(line["test"], [other["test"] for other in race]))
            scores[key].append(line["test"])
            times[key].append(time_to(line["curve"], NEAR * best, budget_s))
    return {
        f"{method} {budget_s:g}s": {
            "races": len(ranks[budget_s, method]),
            "mean_rank": round(fmean(ranks[budget_s, method]), 2),
            "mean_test": round(fmean(scores[budget_s, method]), 4),
            "median_s_to_99": round(median(times[budget_s, method]), 1),
        }
        for budget_s, method in sorted(ranks)
    }


def rank(score: float, scores: list[float]) -> float:
    """1 is the best; equal scores share their mean rank."""
    better = sum(other > score for other in scores)
    equal = sum(other == score for other in scores)
    return better + (equal + 1) / 2


def time_to(curve: list[Any], value: float, budget_s: float) -> float:
    """Seconds until the best so far reached a value; the budget where it never did."""
    return next((seconds for seconds, best in curve if best >= value), budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(task_tables.TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    add_arguments(parser, "runs/equal_time/ledger.jsonl", 180)
    chosen = parser.parse_args()
    if chosen.cell:
        asked = asked_of(chosen.cell)
        write_result(Path(asked["folder"]), measured(asked))
        return
    ledger = Ledger(chosen.ledger)
    cells = [
        Cell(task, method, seed, chosen.budget_s)
        for seed in chosen.seeds
        for task in chosen.tasks or task_tables.DEVELOPMENT
        for method in chosen.methods or METHODS
    ]
    with ledger.owned():
        missing = [cell for cell in cells if cell.key not in ledger.done()]
        for cell in missing[: chosen.cells]:
            line = ledger.measure(cell, MODULE, {}, chosen.budget_s + SPARE_S)
            print(json.dumps(line), flush=True)
    done = ledger.done().values()
    failed = [line for line in ledger.lines() if line.get("error")]
    print(json.dumps({"cells": len(done), "failed": len(failed), "by_method": summary(done)}))


if __name__ == "__main__":
    main()
