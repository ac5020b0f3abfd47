"""A learned ranker of fine-tuning configurations, judged on tasks that it has not seen.

python -m benchmarks.ranker --json [--curves ../shared/curves] [--only trees]

Each of Quick-Tune's 18 tasks is left out in turn: a ranker that is trained on the other 17 orders
the task's own configurations, and the first of them are tried. Regret, in points of validation
accuracy: the best of the task's configurations minus the best of those tried, each at its best
epoch. A configuration with one epoch counts with that epoch.

trees           300 extra trees on percentile ranks within a task (the baseline)
trees_settings  the same on `quicktune.Runs.numbers_NF`, and on the regret's logarithm
gp_rank, gp_logit, gp_regret
                a Gaussian process (ranker_gp.py) on percentile ranks, on the accuracy's logit, or
                on -log(regret + 2), each scaled within a task
gp_mean         the mean of the three
gp_spread       gp_regret, picked one by one for the largest expected maximum of all picks
gp_mean_spread  the same with the mean of gp_mean
nested          what does best on the other 17 tasks, chosen anew for every task

The process ranks configurations that train only the head last: those of 17 tasks say so (978 of
them, one epoch each). Its kernel is fitted three times, each time without six tasks; then a task is
predicted from the rows of all 17 others. A control gets targets in random order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from benchmarks import quicktune, ranker_gp
from benchmarks.quicktune import Runs

PICKS = (1, 3, 8)
FOLDS = 3  # of the kernel's parameters
POOLS = 40  # random parts of a task's configurations, to compare rankers by more than 18 numbers
PART = 0.6

# task -> its rows from first to last pick, as places in the table.
Orders = dict[int, np.ndarray]


def regret_points(accuracy_n: np.ndarray) -> list[float]:
    """After each of PICKS. accuracy_n: in the order of picks."""
    return [float(accuracy_n.max() - accuracy_n[:picks].max()) for picks in PICKS]


def summary(runs: Runs, orders: Orders) -> dict[str, Any]:
    regret_TP = np.array([regret_points(runs.best_N[rows_n]) for rows_n in orders.values()])
    return {
        "regret": _after(regret_TP.mean(0)),
        "within_1": _after((regret_TP <= 1).sum(0)),
        "even_tasks": _after(regret_TP[::2].mean(0)),
        "odd_tasks": _after(regret_TP[1::2].mean(0)),
        "in_pools": _after(in_pools(runs, orders).mean(0)),
    }


def _after(values_P: np.ndarray) -> dict[int, float]:
    return dict(zip(PICKS, values_P.round(2).tolist(), strict=True))


def in_pools(runs: Runs, orders: Orders) -> np.ndarray:
    """regret_TP, each the mean over POOLS random parts of the task's configurations."""
    rng = np.random.default_rng(5)
    found = []
    for rows_n in orders.values():
        in_table_n = np.argsort(np.argsort(rows_n))  # so that all rankers see the same parts
        parts = [(rng.random(len(rows_n)) < PART)[in_table_n] for _ in range(POOLS)]
        found.append(np.mean([regret_points(runs.best_N[rows_n[part]]) for part in parts], axis=0))
    return np.array(found)


def random_picks(runs: Runs) -> dict[int, float]:
    """Mean regret of picks at random, exactly."""
    found = {}
    for picks in PICKS:
        regrets = []
        for task in range(len(runs.tasks)):
            values = np.sort(runs.best_N[runs.task_N == task])[::-1]
            # P(the best of the picks is the one at this place), one place after the other.
            left, none_before = len(values), 1.0
            expected = 0.0
            for place, value in enumerate(values[: left - picks + 1]):
                hit = none_before * picks / (left - place)
                expected += hit * value
                none_before -= hit
            regrets.append(values[0] - expected)
        found[picks] = round(float(np.mean(regrets)), 2)
    return found


# What is learned. Each is scaled within a task, over the rows that are given.


def ranks(accuracy_n: np.ndarray) -> np.ndarray:
    return _scaled(np.argsort(np.argsort(accuracy_n)).astype(float))


def logit(accuracy_n: np.ndarray) -> np.ndarray:
    share_n = accuracy_n.clip(0.5, 99.8) / 100
    return _scaled(np.log(share_n / (1 - share_n)))


def log_regret(accuracy_n: np.ndarray) -> np.ndarray:
    """The top of a task is spread out; how bad the bad ones are says little."""
    return _scaled(-np.log(accuracy_n.max() - accuracy_n + 2))


def _scaled(values_n: np.ndarray) -> np.ndarray:
    return np.asarray((values_n - values_n.mean()) / values_n.std())


Target = Callable[[np.ndarray], np.ndarray]


def targets(runs: Runs, target: Target, rows_n: np.ndarray) -> np.ndarray:
    found_n = np.zeros(len(rows_n))
    for task in range(len(runs.tasks)):
        own_n = runs.task_N[rows_n] == task
        found_n[own_n] = target(runs.best_N[rows_n][own_n])
    return found_n


# Rankers.


def trees(runs: Runs, features_NF: np.ndarray, target: Target, share: float) -> Orders:
    """share: of the features, looked at in each split."""
    everything = np.arange(len(runs.task_N))
    target_N = targets(runs, target, everything)
    orders = {}
    for task in range(len(runs.tasks)):
        own_N = runs.task_N == task
        forest = ExtraTreesRegressor(300, random_state=0, n_jobs=1, max_features=share)
        forest.fit(features_NF[~own_N], target_N[~own_N])
        orders[task] = everything[own_N][np.argsort(-forest.predict(features_NF[own_N]))]
    return orders


def processes(
    runs: Runs, target: Target, seed: int, shuffled: bool = False
) -> dict[int, ranker_gp.Left]:
    """Each task's prediction, for the configurations that train more than the head."""
    rows_n = np.flatnonzero(~runs.head_only_N)
    target_n = targets(runs, target, rows_n)
    if shuffled:
        target_n = np.random.default_rng(0).permutation(target_n)
    found = {}
    for fold in range(FOLDS):
        tasks = list(range(len(runs.tasks)))[fold::FOLDS]
        kernel = ranker_gp.fitted(
            runs, rows_n, target_n, ~np.isin(runs.task_N[rows_n], tasks), seed
        )
        found |= ranker_gp.left_out(kernel, target_n, tasks)
    return dict(sorted(found.items()))


def by_mean(runs: Runs, *predicted: dict[int, ranker_gp.Left]) -> Orders:
    orders = {}
    for task in predicted[0]:
        score_n = sum(_scaled(each[task].mean_n) for each in predicted)
        orders[task] = _with_heads(runs, task, np.argsort(-np.asarray(score_n)))
    return orders


def _averaged(*predicted: dict[int, ranker_gp.Left]) -> dict[int, ranker_gp.Left]:
    """The mean of several targets, with the covariance of the last one."""
    found = {}
    for task, last in predicted[-1].items():
        means = [_scaled(each[task].mean_n) for each in predicted]
        mean_n = np.mean(means, axis=0) * last.mean_n.std() + last.mean_n.mean()
        found[task] = ranker_gp.Left(mean_n, last.covariance_nn)
    return found


def by_spread(runs: Runs, predicted: dict[int, ranker_gp.Left]) -> Orders:
    """Each pick is the one that adds most to the expected maximum of the picks."""
    orders = {}
    for task, left in predicted.items():
        rng = np.random.default_rng(0)
        root_nn = np.linalg.cholesky(left.covariance_nn + 1e-9 * np.eye(len(left.mean_n)))
        drawn_Sn = left.mean_n + rng.standard_normal((2048, len(left.mean_n))) @ root_nn.T
        reached_S = np.full(len(drawn_Sn), left.mean_n.min())
        picks: list[int] = []
        for _ in range(max(PICKS)):
            gain_n = np.maximum(drawn_Sn, reached_S[:, None]).mean(0)
            gain_n[picks] = -np.inf
            picks.append(int(gain_n.argmax()))
            reached_S = np.maximum(reached_S, drawn_Sn[:, picks[-1]])
        rest = [i for i in np.argsort(-left.mean_n).tolist() if i not in picks]
        orders[task] = _with_heads(runs, task, np.array(picks + rest))
    return orders


def _with_heads(runs: Runs, task: int, order_n: np.ndarray) -> np.ndarray:
    own_n = np.flatnonzero((runs.task_N == task) & ~runs.head_only_N)
    heads_n = np.flatnonzero((runs.task_N == task) & runs.head_only_N)
    return np.concatenate([own_n[order_n], heads_n])


def nested(runs: Runs, rankers: dict[str, Orders]) -> tuple[Orders, dict[str, str]]:
    """For every task the ranker with the least regret in the pools of the other 17."""
    regret_RT = {name: in_pools(runs, orders)[:, 1:].sum(1) for name, orders in rankers.items()}
    orders, chosen = {}, {}
    for task, name in enumerate(runs.tasks):
        others = np.arange(len(runs.tasks)) != task
        best = min(regret_RT, key=lambda ranker: regret_RT[ranker][others].mean())
        orders[task], chosen[name] = rankers[best][task], best
    return orders, chosen


def measure(folder: Path, only: str | None, seed: int) -> dict[str, Any]:
    runs = quicktune.read(folder)
    began = time.perf_counter()
    rankers: dict[str, Orders] = {}
    settings_NF = np.concatenate([runs.numbers_NF, runs.table_NH], axis=1)
    if only != "gp":
        rankers["trees"] = trees(runs, runs.table_NH, ranks, 1.0)
        rankers["trees_settings"] = trees(runs, settings_NF, log_regret, 0.3)
    found: dict[str, Any] = {"random": random_picks(runs)}
    if only != "trees":
        rank, odds, regret = (
            processes(runs, target, seed) for target in (ranks, logit, log_regret)
        )
        rankers |= {
            "gp_rank": by_mean(runs, rank),
            "gp_logit": by_mean(runs, odds),
            "gp_regret": by_mean(runs, regret),
            "gp_mean": by_mean(runs, rank, odds, regret),
            "gp_spread": by_spread(runs, regret),
            "gp_mean_spread": by_spread(runs, _averaged(rank, odds, regret)),
        }
    for name, orders in rankers.items():
        found[name] = summary(runs, orders)
    orders, chosen = nested(runs, rankers)
    found["nested"] = summary(runs, orders) | {"chosen": chosen}
    if only != "trees":
        found["control"] = summary(
            runs, by_mean(runs, processes(runs, log_regret, seed, shuffled=True))
        )
    found["by_task"] = {
        runs.tasks[task]: [round(x, 2) for x in regret_points(runs.best_N[rows_n])]
        for task, rows_n in orders.items()
    }
    return found | {"seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON anyway")
    parser.add_argument("--curves", type=Path, default=quicktune.FOLDER)
    parser.add_argument("--only", choices=("trees", "gp"), help="a part of the rankers")
    parser.add_argument("--seed", type=int, default=0, help="of the processes' kernels")
    given = parser.parse_args()
    print(json.dumps(measure(given.curves, given.only, given.seed)))


if __name__ == "__main__":
    main()
