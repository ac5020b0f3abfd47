"""The ranker's arithmetic, on a small table of its own: what is judged does not see the task."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import portfolio, quicktune, ranker, ranker_gp
from benchmarks.quicktune import Runs
from raypipe.errors import ConfigError


def table(seed: int = 0) -> Runs:
    """Three tasks of twelve configurations. The first number is good on all; a third of the rows
    are heads.
    """
    rng = np.random.default_rng(seed)
    numbers_NF = rng.normal(size=(36, 4))
    task_N = np.repeat(np.arange(3), 12)
    best_N = 60 + 10 * numbers_NF[:, 0] + 3 * task_N + rng.normal(size=36)
    return Runs(
        ["a", "b", "c"],
        task_N,
        best_N,
        numbers_NF,
        rng.integers(0, 3, (36, 4)),
        numbers_NF,
        np.arange(36) % 3 == 2,
    )


def test_a_task_left_out_by_one_inverse_is_predicted_as_by_conditioning_on_the_others() -> None:
    runs = table()
    rows_n = np.flatnonzero(~runs.head_only_N)
    target_n = ranker.targets(runs, ranker.logit, rows_n)
    kernel = ranker_gp.Kernel(runs, rows_n)
    fast = ranker_gp.left_out(kernel, target_n, [0, 1, 2])
    for task, left in fast.items():
        own = torch.where(kernel.task_N == task)[0]
        others = torch.where(kernel.task_N != task)[0]
        mean = target_n[others].mean()
        with torch.no_grad():
            known = torch.linalg.inv(kernel.noisy(others))
            cross = kernel(own, others)
            expected = cross @ known @ torch.tensor(target_n[others] - mean) + mean
            covariance = kernel.noisy(own) - cross @ known @ cross.T
        np.testing.assert_allclose(left.mean_n, expected.numpy(), atol=1e-9)
        np.testing.assert_allclose(left.covariance_nn, covariance.numpy(), atol=1e-9)


def test_neither_kernel_nor_prediction_depend_on_the_values_of_the_task_left_out() -> None:
    """The accuracies of one task are replaced by noise: its order stays as it was."""
    runs = table()
    rows_n = np.flatnonzero(~runs.head_only_N)

    def order(of: Runs) -> list[int]:
        target_n = ranker.targets(of, ranker.log_regret, rows_n)
        kernel = ranker_gp.fitted(of, rows_n, target_n, of.task_N[rows_n] != 1)
        left = ranker_gp.left_out(kernel, target_n, [1])
        found: list[int] = ranker.by_mean(of, {1: left[1]})[1].tolist()
        return found

    noisy = table()
    noisy.best_N[noisy.task_N == 1] = np.random.default_rng(3).uniform(1, 99, 12)
    assert order(runs) == order(noisy)
    # It has learned something, and puts heads last.
    first = order(runs)
    assert set(first[-4:]) == set(np.flatnonzero((runs.task_N == 1) & runs.head_only_N))
    good = runs.best_N[first[:2]].mean()
    assert good > runs.best_N[first[4:8]].mean()


def test_regret_is_the_best_of_all_minus_the_best_of_the_picks() -> None:
    assert ranker.regret_points(np.array([50.0, 70, 60, 90, 10, 20, 30, 95, 99])) == [49, 29, 4]
    runs = table()
    exact = ranker.random_picks(runs)
    for picks in ranker.PICKS:
        regrets = []
        for task in range(3):
            values = runs.best_N[runs.task_N == task]
            reached = [max(some) for some in combinations(values, picks)]
            regrets.append(values.max() - np.mean(reached))
        assert exact[picks] == pytest.approx(np.mean(regrets), abs=0.006)


def test_the_ranker_for_a_task_is_chosen_by_the_other_tasks() -> None:
    runs = table()
    rows = [np.flatnonzero(runs.task_N == task) for task in range(3)]
    best_first = {t: rows_n[np.argsort(-runs.best_N[rows_n])] for t, rows_n in enumerate(rows)}
    worst_first = {t: rows_n[::-1] for t, rows_n in best_first.items()}
    # One is right on task 0 alone, the other on tasks 1 and 2: task 0 gets the wrong one.
    here = {0: best_first[0], 1: worst_first[1], 2: worst_first[2]}
    there = {0: worst_first[0], 1: best_first[1], 2: best_first[2]}
    orders, chosen = ranker.nested(runs, {"here": here, "there": there})
    assert chosen["a"] == "there" and orders[0].tolist() == worst_first[0].tolist()


def test_curves_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Quick-Tune's learning curves are not there"):
        quicktune.read(tmp_path)


def test_a_portfolio_covers_tasks_and_is_not_chosen_by_the_task_it_is_tried_on() -> None:
    names = ["hand", "draw-1", "draw-2", "left", "right"]
    best_ST = np.array(
        [[0.7, 0.7, 0.7], [0.1, 0.1, 0.1], [0.2, 0.2, 0.2], [0.9, 0.1, 0.9], [0.1, 0.95, 0.1]]
    )
    # Third and fourth: what is left adds nothing, and the earlier one is taken.
    assert portfolio.greedy(best_ST, 4) == [0, 3, 4, 1]
    found = portfolio.compared(best_ST, names, ["x", "y", "z"])["by_task"]
    # "right" is good on y alone. Without y nothing speaks for it.
    assert "right" not in found["y"]["picks"] and found["y"]["portfolio"][1] == 70
    assert found["x"]["portfolio"][1] == 90
