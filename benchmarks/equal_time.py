"""Claim: in equal wall time our default finds better models than the usual searches.

    python -m benchmarks.equal_time --json --budget-s 180 [--tasks …] [--seeds 1 2] [--methods …]
    python -m benchmarks.equal_time --report          # says what the ledger holds, measures nothing

Every cell is one task (task_tables.py), method, seed and budget, in a process of its own and on a
cluster of all CPUs that was there before. Its clock starts when the table is pinned and stops when
the model exists that is tested; nothing that comes after the budget counts. The test split is read
afterwards, once, by the model that validation chose (looks.py notes it).

| method | what it is | within its clock |
|---|---|---|
| ours | the preset for so many seconds (our_tune.py): fast for 180, good for 600 | reading, features, first answer, trials, ensemble, refit; and about 8 s that stay unused |
| first | the first answer alone: at most 60 s | features, heads, their ensemble if the preset has one |
| asha | random values, our ASHA (plain_tune.py) | reading, features, trials |
| optuna | Optuna's TPE with the median pruner, through plain Ray Tune | the same |
| random | random values, every trial to its end | the same |
| whole | ours, which leaves time for test, package and registration; only if it is named | as ours |

Nobody's clock holds imports, the cluster's start, test, package and registration. `raypipe tune`
has them within search.budget_s, so a user's search is shorter than `ours` by that: `whole` is as
long as theirs. That the budget of the whole command is kept is another claim (budget.py).

asha, optuna and random have the same trainable, decoded images, features and space; only who
chooses values and who ends trials differs. Each of their trials has nine epochs, or less.

The ledger goes on where it stopped. Told are, over full races (ranks.py): the mean rank by test
score, how much better ours is, and the median time to 99 % of the best validation score that any
method reached on this task and seed.
"""  # noqa: E501 (a table)

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import looks, task_tables
from benchmarks.ledger import LEDGERS, Cell, Ledger, Line, add_arguments, run_cell
from benchmarks.ranks import summary

SPARE_S = 300  # beside the budget: imports, the cluster, the ingest, the test
MODULE = "benchmarks.equal_time"
OURS = ("ours", "first", "whole")
METHODS = ("ours", "first", "asha", "optuna", "random")


def job_of(asked: Line, sections: dict[str, Any]) -> Any:
    """The job of a cell: its table, its seed, what the method sets, and defaults."""
    from raypipe.config import validate
    from raypipe.job import Job

    folder = Path(asked["folder"])
    table = task_tables.table(asked["task"], asked["seed"], folder.parent / "tables")
    common = {
        "table": table.model_dump(),
        "run": {"dir": str(folder / "run"), "seed": asked["seed"]},
        "cluster": {"address": "local", "object_store_mb": 1500},
    }
    return validate(Job, common | sections)


def measured(asked: Line) -> Line:
    """One cell, in this process."""
    from raypipe.cluster.connect import connect, prepare_environment

    prepare_environment()  # before anything imports Ray
    from benchmarks import our_tune, plain_tune
    from raypipe.search.trials.tune_patches import PRELOAD

    method = our_tune if asked["method"] in OURS else plain_tune
    job = job_of(asked, method.settings(asked))
    table = task_tables.digest(job.table)
    connect(job.cluster, preload=PRELOAD)
    found, test = method.search(asked, job)
    if not asked["config"]["test"]:
        return found | {"table": table, "test": None}
    # The only place where a test split is read.
    why = f"{asked['method']}, {asked['budget_s']:g} s"
    looks.note(asked["task"], f"seed {asked['seed']}, {table}", f"python -m {MODULE}", why)
    return found | {"table": table, "test": test()}


def cells_of(
    tasks: Sequence[str], seeds: Sequence[int], methods: Sequence[str], budget_s: float
) -> list[Cell]:
    """Race by race. Each race begins with another method: a host may change within an hour."""
    races = [(seed, task) for seed in seeds for task in tasks]
    found = []
    for number, (seed, task) in enumerate(races):
        at = number % len(methods)
        for method in (*methods[at:], *methods[:at]):
            found.append(Cell(task, method, seed, budget_s))
    return found


def report(ledger: Ledger, methods: Sequence[str]) -> Line:
    """What the ledger says."""
    done = ledger.done().values()
    return {"cells": len(done), "failed": ledger.failed(), "by_budget": summary(done, methods)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(task_tables.TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, "whole"), default=METHODS)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--no-test", action="store_true", help="a trial: look at no test split")
    add_arguments(parser, "equal_time", 180)
    chosen = parser.parse_args()
    if chosen.cell:
        run_cell(chosen.cell, measured)
        return
    if chosen.no_test and chosen.ledger.parent.absolute() == LEDGERS:
        parser.error("--no-test: its lines are no results. Name another --ledger")
    ledger = Ledger(chosen.ledger, chosen.work)
    if not chosen.report:
        tasks = chosen.tasks or list(task_tables.DEVELOPMENT)
        cells = cells_of(tasks, chosen.seeds, chosen.methods, chosen.budget_s)
        config = {"test": not chosen.no_test}
        with ledger.owned():
            missing = [cell for cell in cells if cell.key not in ledger.done()]
            for cell in missing[: chosen.cells]:
                line = ledger.measure(cell, MODULE, config, chosen.budget_s + SPARE_S)
                print(json.dumps(line), flush=True)
    print(json.dumps(report(ledger, chosen.methods), indent=None if chosen.json else 1))


if __name__ == "__main__":
    main()
