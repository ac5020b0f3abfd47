"""When to stop is a pure function of what happened so far; the user reads its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config import dump, validate
from raypipe.errors import ConfigError
from raypipe.train import stopping
from raypipe.train.stopping import (
    BudgetConfig,
    Progress,
    SearchStoppingConfig,
    StoppingConfig,
    all_of,
    any_of,
    improved,
    of_search,
    why_stop,
)

NAN, INF = float("nan"), float("inf")
VALUES = st.lists(st.floats(-10, 10), max_size=30)
RULES: dict[str, Callable[[], stopping.Rule]] = {
    "patience": lambda: stopping.patience(3, 0.1),
    "plateau": lambda: stopping.plateau(3, "median", 0.1),
    "target": lambda: stopping.target(5.0),
    "nan_guard": lambda: stopping.nan_guard,
    "divergence": lambda: stopping.divergence(2.0),
    "budget": lambda: stopping.budget(15.0, "s", lambda s, worker_s: s),
}


def progress(values: list[float], mode: Any = "max", **more: Any) -> Progress:
    return Progress("val_accuracy", mode, values, **more)


def epochs(values: list[float], metric: str = "val_accuracy") -> list[dict[str, float]]:
    return [{metric: value, "train_loss": 1.0} for value in values]


def should_stop(values: list[float], cfg: StoppingConfig) -> bool:
    return why_stop(cfg, epochs(values, cfg.metric)) is not None


@pytest.mark.parametrize(
    ("history", "patience", "min_delta", "stops"),
    [
        ([], 1, 0.0, False),
        ([0.5], 1, 0.0, False),
        ([0.5, 0.5], 1, 0.0, True),  # equal is no improvement
        ([0.5, 0.6, 0.6], 2, 0.0, False),
        ([0.5, 0.6, 0.6, 0.59], 2, 0.0, True),
        ([0.5, 0.4, 0.4, 0.6], 3, 0.0, False),  # patience starts again with an improvement
        ([0.5, 0.505, 0.509], 2, 0.01, True),  # crumbs below min_delta do not count
        ([0.5, 0.505, 0.511], 2, 0.01, False),  # but add up against the best that counted
        ([NAN, NAN], 2, 0.0, True),
        ([NAN, 0.1], 2, 0.0, False),
    ],
)
def test_patience_and_min_delta(
    history: list[float], patience: int, min_delta: float, stops: bool
) -> None:
    assert should_stop(history, StoppingConfig(patience=patience, min_delta=min_delta)) is stops


@settings(deadline=None)
@given(history=VALUES, patience=st.integers(1, 6), delta=st.floats(0, 1))
def test_a_loss_stops_where_its_negative_would(
    history: list[float], patience: int, delta: float
) -> None:
    up = StoppingConfig(metric="val_accuracy", patience=patience, min_delta=delta)
    down = StoppingConfig(metric="val_loss", patience=patience, min_delta=delta)
    assert should_stop(history, up) == should_stop([-value for value in history], down)


@settings(deadline=None)
@given(
    history=VALUES,
    window=st.integers(1, 6),
    by=st.sampled_from(["mean", "median"]),
    goal=st.floats(-10, 10),
)
def test_so_do_plateau_and_target(history: list[float], window: int, by: str, goal: float) -> None:
    negative = progress([-value for value in history], "min")
    assert bool(stopping.plateau(window, by)(progress(history))) == bool(
        stopping.plateau(window, by)(negative)
    )
    assert bool(stopping.target(goal)(progress(history))) == bool(stopping.target(-goal)(negative))


@settings(deadline=None)
@given(history=st.lists(st.floats(0, 1), max_size=40))
def test_without_patience_nothing_stops(history: list[float]) -> None:
    assert not should_stop(history, StoppingConfig(patience=None))


def test_nan_never_improves() -> None:
    for mode in ("max", "min"):
        assert not improved(NAN, None, mode) and not improved(NAN, 0.3, mode)
        assert improved(0.3, None, mode)


@pytest.mark.parametrize(
    ("rule", "seen", "says"),
    [
        (
            stopping.patience(2),
            progress([0.5, 0.91, 0.9, 0.7]),
            "no improvement of val_accuracy for 2 epochs (best 0.91 in epoch 2)",
        ),
        (
            stopping.patience(1),
            progress([NAN]),
            "no improvement of val_accuracy for 1 epoch (it was never a number)",
        ),
        (
            stopping.patience(2),
            progress([0.9, 0.8, NAN], unit="trial"),
            "no improvement of val_accuracy for 2 trials (best 0.9 in trial 1 of those that ended)",
        ),
        (
            stopping.plateau(2, "median"),
            progress([0.5, 0.7, 0.7, 0.5]),
            "val_accuracy is on a plateau: median 0.6 over 2 epochs, 0.6 over those before",
        ),
        (
            stopping.plateau(2),
            progress([0.5, 0.7, NAN, NAN]),
            "val_accuracy was no number for 2 epochs",
        ),
        (stopping.target(0.9), progress([0.95, 0.2]), "val_accuracy 0.95 reached the target 0.9"),
        (stopping.nan_guard, progress([], losses=[0.5, NAN]), "train_loss was nan in epoch 2"),
        (stopping.nan_guard, progress([], losses=[INF]), "train_loss was inf in epoch 1"),
        (
            stopping.divergence(3),
            progress([], losses=[1, 0.5, 1.6]),
            "train_loss 1.6 is above 3 times its lowest (0.5)",
        ),
        (
            stopping.budgets(BudgetConfig(seconds=5400)),
            progress([0.1], seconds=5400),
            "the budget of 5,400 s is spent (5,400)",
        ),
        (
            stopping.budgets(BudgetConfig(gpu_hours=2)),
            progress([0.1], worker_s=3600 * 1.5, ahead_worker_s=3600),
            "one more epoch would pass the budget of 2 GPU-hours (1.5 spent)",
        ),
        (
            stopping.budgets(BudgetConfig(money=25, price_per_hour=10)),
            progress([0.1], worker_s=3600 * 2.6),
            "the budget of 25 in money is spent (26)",
        ),
        (stopping.epochs(40), progress([], epochs=41), "the budget of 40 epochs is spent"),
    ],
)
def test_what_the_user_reads(rule: stopping.Rule, seen: Progress, says: str) -> None:
    assert rule(seen) == says


@settings(deadline=None)
@given(
    start=st.floats(-5, 5),
    slope=st.floats(0.01, 1),
    window=st.integers(1, 8),
    steps=st.integers(0, 40),
)
def test_steady_progress_is_no_plateau_and_none_is_one(
    start: float, slope: float, window: int, steps: int
) -> None:
    rule = stopping.plateau(window, "mean", min_delta=slope * window * 0.9)
    assert rule(progress([start + slope * i for i in range(steps)])) is None
    assert bool(rule(progress([start] * steps))) == (steps >= 2 * window)


def test_a_jumping_metric_that_rises_is_no_plateau_where_patience_would_give_up() -> None:
    jumping = progress([0.1, 0.9, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8])
    assert stopping.patience(5)(jumping) and not stopping.plateau(4)(jumping)


@settings(deadline=None)
@given(losses=st.lists(st.floats(0.01, 10), min_size=1, max_size=20), factor=st.floats(1.1, 10))
def test_divergence_is_relative_and_never_in_a_falling_loss(
    losses: list[float], factor: float
) -> None:
    rule = stopping.divergence(factor)
    assert rule(progress([], losses=sorted(losses, reverse=True))) is None
    assert bool(rule(progress([], losses=losses))) == bool(
        rule(progress([], losses=[4 * loss for loss in losses]))
    )


@settings(deadline=None)
@given(limit=st.floats(1, 50), even=st.floats(1, 20), workers=st.integers(1, 8))
def test_a_budget_is_kept_when_epochs_take_equally_long_and_only_the_first_may_pass_it(
    limit: float, even: float, workers: int
) -> None:
    """Money, hours and seconds are one rule, so the law is stated for worker-hours."""
    cfg, done = StoppingConfig(patience=None, gpu_hours=limit / 3600), 1
    while why_stop(cfg, epochs([0.5] * done), done * even, workers * done * even) is None:
        done += 1
    assert done == 1 or done * even * workers <= limit * (1 + 1e-9)
    assert (done + 1) * even * workers > limit * (
        1 - 1e-9
    )  # and no epoch that would have fitted was left out


@settings(deadline=None)
@given(spent=st.floats(0, 1e6), more=st.floats(0, 1e6))
def test_what_is_spent_stays_spent(spent: float, more: float) -> None:
    rule = stopping.budgets(BudgetConfig(money=30, price_per_hour=0.5))
    assert not rule(progress([], worker_s=spent)) or rule(progress([], worker_s=spent + more))


@settings(deadline=None)
@given(
    values=VALUES,
    losses=st.lists(st.floats(0, 10) | st.just(NAN), max_size=9),
    names=st.lists(st.sampled_from(sorted(RULES))),
)
def test_any_stops_with_the_first_and_all_with_the_last(
    values: list[float], losses: list[float], names: list[str]
) -> None:
    seen = progress(values, losses=losses, seconds=float(len(values)))
    rules = [RULES[name]() for name in names]
    reasons = [rule(seen) for rule in rules]
    fired = [reason for reason in reasons if reason]
    assert any_of(*rules)(seen) == (fired[0] if fired else None)
    assert all_of(*rules)(seen) == (
        "; ".join(fired) if rules and len(fired) == len(rules) else None
    )
    assert any_of(any_of(*rules), all_of())(seen) == any_of(*rules)(seen)


def test_all_in_the_config_joins_quality_and_neither_guards_nor_budgets() -> None:
    cfg = StoppingConfig(patience=2, target=0.9, when="all", seconds=100)
    assert why_stop(cfg, epochs([0.95, 0.96])) is None  # still improving
    assert why_stop(cfg, epochs([0.5, 0.5, 0.5])) is None  # too bad to stop
    assert why_stop(cfg, epochs([0.95, 0.9, 0.9])) == (
        "val_accuracy 0.95 reached the target 0.9; "
        "no improvement of val_accuracy for 2 epochs (best 0.95 in epoch 1)"
    )
    assert "budget" in str(why_stop(cfg, epochs([0.5]), seconds=101))
    assert "nan" in str(why_stop(cfg, [{"val_accuracy": 0.5, "train_loss": NAN}]))


def test_guards_can_be_chosen() -> None:
    history = [
        {"val_accuracy": 0.5 + i / 10, "train_loss": loss} for i, loss in enumerate([1.0, 0.2, 0.9])
    ]
    assert (
        why_stop(StoppingConfig(), history) is None
    )  # a loss that rises is no reason unless asked for
    assert "above 3 times" in str(why_stop(StoppingConfig(divergence=3), history))
    history[-1]["train_loss"] = NAN
    assert why_stop(StoppingConfig(nan_guard=False), history) is None and why_stop(
        StoppingConfig(), history
    )


def test_a_search_stops_when_its_best_stands_still_but_not_while_a_running_trial_leads() -> None:
    rule = of_search(SearchStoppingConfig(patience=3))
    ended = [0.7, 0.9, 0.8, 0.8, NAN]
    assert rule(progress(ended[:4], unit="trial")) is None
    assert rule(progress(ended, unit="trial", running=[0.91])) is None
    assert rule(progress(ended, unit="trial", running=[0.89])) == (
        "no improvement of val_accuracy for 3 trials (best 0.9 in trial 2 of those that ended)"
    )
    assert "reached the target" in str(
        of_search(SearchStoppingConfig(target=0.9))(progress([], running=[0.92]))
    )
    assert (
        of_search(SearchStoppingConfig())(
            progress(ended * 9, seconds=1e9, worker_s=1e9, epochs=10**6)
        )
        is None
    )


@pytest.mark.parametrize(
    ("kind", "tree", "says"),
    [
        (StoppingConfig, {"patience": 0}, r"patience is wrong.*greater than or equal to 1"),
        (StoppingConfig, {"money": 5}, r"set price_per_hour too"),
        (SearchStoppingConfig, {"money": 5}, r"set price_per_hour too"),
        (StoppingConfig, {"divergence": 1}, r"divergence is wrong.*greater than 1"),
        (StoppingConfig, {"plateau_by": "mode"}, r"plateau_by is wrong"),
        (StoppingConfig, {"pateince": 3}, r"Unknown config key pateince.*Did you mean 'patience'"),
    ],
)
def test_a_section_that_cannot_be_is_refused(kind: Any, tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(kind, tree)


def test_the_section_is_one_flat_part_of_the_yaml() -> None:
    assert not any(line.startswith(" ") for line in dump(StoppingConfig()).splitlines())
    assert math.isclose(validate(StoppingConfig, {"seconds": 1, "target": 0.5}).target or 0, 0.5)
