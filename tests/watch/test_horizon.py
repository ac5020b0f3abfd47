"""A year's false alarms stay within the budget; small p-values are what many permutations say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import f as f_distribution

from benchmarks.nights import Regrouped, last_nights, night_p, sequential_p
from raypipe.errors import DataError
from raypipe.watch import mmd
from raypipe.watch.horizon import Horizon
from raypipe.watch.policy import WatchHorizon

YEAR = Horizon(365, 0.03)


def test_any_year_of_checks_spends_the_budget_at_most() -> None:
    """Whatever was spent before: a rolling year, not one from January."""
    rng = np.random.default_rng(0)
    for spent in ([0.01] * 2, [0.03], list(rng.random(300) * 1e-3), [0.0] * 500):
        history = list(spent)
        for _ in range(800):
            history.append(YEAR.level(history))
        sums = np.convolve(history[len(spent) :], np.ones(365), "valid")
        assert sums.max() <= 0.03 * (1 + 1e-9)
        if sum(spent) <= 0.03:
            assert np.convolve(history, np.ones(365), "valid").max() <= 0.03 * (1 + 1e-9)
        # Once the larger levels are a year old, the share is the usual one again.
        assert history[-1] == pytest.approx(0.03 / 365)


def test_a_usual_year_has_equal_shares() -> None:
    history: list[float] = []
    for _ in range(1000):
        history.append(YEAR.level(history))
    assert set(history) == {0.03 / 365}
    assert Horizon(1, 0.03).level([0.03] * 5) == 0.03
    assert YEAR.level([1.0]) == 0


@pytest.mark.parametrize("level", [-0.1, 1.1, float("nan")])
def test_a_damaged_history_is_refused(level: float) -> None:
    with pytest.raises(DataError, match="outside 0 to 1"):
        YEAR.level([0.01, level])


@pytest.mark.parametrize(("checks", "budget"), [(0, 0.03), (10, 0.0), (10, 1.0), (5, float("nan"))])
def test_a_horizon_has_checks_and_a_budget(checks: int, budget: float) -> None:
    with pytest.raises(DataError, match="no such size"):
        Horizon(checks, budget)


def test_the_settings_are_those_of_the_promise() -> None:
    assert WatchHorizon() == WatchHorizon(checks=365, false_alarm=0.03)
    with pytest.raises(ValueError, match="checks"):
        WatchHorizon(checks=0)


def test_sequential_p_is_valid_and_stops_early() -> None:
    """Under the null P(p <= a) <= a for every a, those that only the last draw can show too."""
    rng = np.random.default_rng(0)
    level = 0.02
    found = [sequential_p(rng.random(), rng.random, level) for _ in range(4000)]
    p_values = np.array([one.p_value for one in found])
    for a in (0.005, 0.01, 0.02, 0.05, 0.2, 0.5):
        assert (p_values <= a).mean() < a + 3 * np.sqrt(a * (1 - a) / 4000)
    assert (p_values <= level).mean() > 0.01
    assert np.median([one.permutations for one in found]) < 15
    assert max(one.permutations for one in found) == 199


def test_it_stops_at_the_draw_itself_and_not_at_the_end_of_a_block() -> None:
    extreme = iter([np.array([0, 1, 0, 1, 0, 0, 1, 1, 1.0])])
    found = sequential_p(1.0, lambda count: next(extreme), 0.01)
    assert (found.p_value, found.permutations, found.extreme) == (4 / 8, 8, 4)


def test_nothing_as_extreme_takes_all_permutations() -> None:
    drawn: list[int] = []

    def draw(count: int) -> np.ndarray:
        drawn.append(count)
        return np.zeros(count)

    found = sequential_p(1.0, draw, 1e-4)
    assert found.permutations == sum(drawn) == 39_999
    assert found.p_value == 1 / 40_000 and max(drawn) <= 4096


@pytest.mark.parametrize(
    ("observed", "level", "drawn", "match"),
    [
        (1.0, 0.0, 0.0, "level is above 0"),
        (1.0, float("nan"), 0.0, "level is above 0"),
        (float("nan"), 0.01, 0.0, "not finite"),
        (1.0, 0.01, float("nan"), "not finite"),
    ],
)
def test_numbers_that_mean_nothing(observed: float, level: float, drawn: float, match: str) -> None:
    with pytest.raises(DataError, match=match):
        sequential_p(observed, lambda count: np.full(count, drawn), level)


def test_a_draw_that_gives_nothing_does_not_hang() -> None:
    with pytest.raises(DataError, match="missing"):
        sequential_p(1.0, lambda count: np.empty(0), 0.01)


def test_regrouped_is_mmd_and_permutes_alike() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(40, 6)).astype(np.float32) + 1000
    batch = rng.normal(size=(25, 6)).astype(np.float32) + 1000.3
    regrouped = Regrouped.of(reference, batch, 2.0, seed=1)
    chosen = mmd.regroupings(40, 25, 2000, seed=2)
    exact = mmd.mmd(reference, batch, 2.0, chosen)
    assert regrouped.statistic == pytest.approx(exact.statistic, abs=1e-6)
    drawn = regrouped.draw(2000)
    for share in (0.05, 0.5, 0.95):
        expected = np.quantile(exact.permuted_P, share)
        # Three standard errors of the share itself.
        near = 3 * np.sqrt(2 * share * (1 - share) / 2000)
        assert (drawn <= expected).mean() == pytest.approx(share, abs=near)


def test_a_small_p_is_that_of_a_long_run() -> None:
    """A window that has drifted a little: p is about 4e-4, known from 200,000 permutations."""
    rng = np.random.default_rng(3)
    reference = rng.normal(size=(30, 4)).astype(np.float32)
    batch = rng.normal(size=(20, 4)).astype(np.float32) + 0.5
    long = Regrouped.of(reference, batch, 2.0, seed=0)
    extreme = sum((long.draw(10_000) >= long.statistic).sum() for _ in range(20))
    truth = extreme / 200_000
    assert 1e-4 < truth < 1e-2
    short = [Regrouped.of(reference, batch, 2.0, seed).p_value(1e-4) for seed in range(1, 60)]
    # Four exceedances are expected after 4 / p draws.
    draws = np.mean([one.permutations for one in short])
    assert draws == pytest.approx(4 / truth, rel=3 * 0.5 / np.sqrt(59) + 0.05)
    assert not any(one.p_value <= 1e-4 for one in short)


def test_equal_images_are_no_drift_and_other_ones_are() -> None:
    same = np.ones((30, 3), np.float32)
    assert Regrouped.of(same, same[:10], 1.0, 0).p_value(1e-4).p_value == 1
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(60, 3)).astype(np.float32)
    batch = rng.normal(size=(40, 3)).astype(np.float32) + 3
    assert Regrouped.of(reference, batch, 1.0, 0).p_value(8e-5).p_value <= 8e-5


def test_too_few_or_broken_rows() -> None:
    rows = np.ones((5, 2), np.float32)
    with pytest.raises(DataError, match="Too few rows"):
        Regrouped.of(rows, rows[:1], 1.0, 0)
    broken = np.full((5, 2), np.nan, np.float32)
    with pytest.raises(DataError, match="not finite"):
        Regrouped.of(rows, broken, 1.0, 0)


def test_a_span_holds_each_image_once() -> None:
    windows = [["a", "b"], ["b", "c"], ["c", "d", "d"], []]
    assert last_nights(windows, 3, 10, 0) == ["b", "c", "d"]
    assert last_nights(windows, 1, 10, 0) == []
    many = [[(night, i) for i in range(50)] for night in range(28)]
    picked = last_nights(many, 28, 200, 0)
    assert len(set(picked)) == 200 and picked == last_nights(many, 28, 200, 0)
    assert picked != last_nights(many, 28, 200, 1)
    with pytest.raises(DataError, match="at least one night"):
        last_nights(windows, 0, 10, 0)


def autoregressive(nights: int, correlation: float, rng: np.random.Generator) -> np.ndarray:
    fresh = rng.normal(size=(nights, 8)) * np.sqrt(1 - correlation**2)
    means = [rng.normal(size=8)]
    for step in fresh[1:]:
        means.append(correlation * means[-1] + step)
    return np.array(means) * np.linspace(2, 0.2, 8)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_a_year_of_autocorrelated_nights_keeps_the_promise(correlation: float) -> None:
    """Sixty nights of reference and the year after it, 300 times: three standard errors above
    3 % are 6 %."""
    rng = np.random.default_rng(5)
    ever = 0
    for _ in range(300):
        nights = autoregressive(60 + 365, correlation, rng)
        ever += night_p(nights[:60], nights[60:]).min() <= 0.03 / 365
    assert ever / 300 <= 0.06


def test_without_autocorrelation_p_is_uniform_and_drift_is_found() -> None:
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(300):
        nights = autoregressive(61, 0.0, rng)
        p_values.append(night_p(nights[:60], nights[60:])[0])
    # Kolmogorov's distance that 300 uniform draws exceed once in 1,000, and the price of a
    # correlation that has to be estimated.
    assert np.abs(np.sort(p_values) - np.arange(1, 301) / 300).max() < 0.113 + 0.05
    moved = autoregressive(60, 0.0, rng), np.full((1, 8), 8.0)
    assert night_p(*moved)[0] < 1e-4


def test_independent_nights_are_judged_by_hotelling() -> None:
    rng = np.random.default_rng(0)
    # Neighbours on different sides: no positive autocorrelation.
    nights = rng.normal(size=(24, 3)) + 2 * (-1.0) ** np.arange(24)[:, None]
    tested = rng.normal(size=(5, 3)) * 6
    away = tested - nights.mean(0)
    squared = ((away @ np.linalg.inv(np.cov(nights.T))) * away).sum(1) * 24 / 25
    expected = f_distribution.sf(squared * (24 - 3) / (3 * 23), 3, 21)
    assert night_p(nights, tested) == pytest.approx(expected)


def test_nights_that_cannot_be_compared() -> None:
    rng = np.random.default_rng(0)
    nights = rng.normal(size=(40, 3))
    with pytest.raises(DataError, match="At least 20 nights"):
        night_p(nights[:10], nights[:1])
    with pytest.raises(DataError, match="directions"):
        night_p(nights, nights[:1, :2])
    with pytest.raises(DataError, match="not finite"):
        night_p(nights, np.full((1, 3), np.inf))
    with pytest.raises(DataError, match="same mean"):
        night_p(np.ones((30, 3)), nights[:1])
    # A direction in which the reference never moved says nothing; the others do.
    nights[:, 1] = 7
    assert night_p(nights, np.array([[0.0, 9.0, 0.0]]))[0] > 0.1
