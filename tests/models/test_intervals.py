"""Intervals hold the truth as often as they say: of shares and errors, of images and groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raypipe.models.intervals import interval

REPEATS = 200
LEAST = 182  # of 200 at 95 %, three standard deviations below 190


def covered(make: object, truth: float, is_share: bool, alpha: float = 0.05) -> int:
    """Of REPEATS samples, how many intervals hold the truth."""
    inside = 0
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        outcome_N, groups_N = make(rng)  # type: ignore[operator]
        low, high = interval(outcome_N, groups_N, alpha, is_share, rng)
        inside += low - 1e-12 <= truth <= high + 1e-12
    return inside


@pytest.mark.parametrize("truth", [0.7, 0.98, 1.0])
@pytest.mark.parametrize("images", [25, 200])
def test_of_shares(truth: float, images: int) -> None:
    def make(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return (rng.random(images) < truth).astype(float), np.arange(images)

    assert covered(make, truth, is_share=True) >= LEAST


def test_of_errors_a_few_of_which_are_large() -> None:
    """Lognormal errors are as skewed as errors get: plain quantiles hold 170 of 200."""

    def make(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return rng.lognormal(0, 1, 25), np.arange(25)

    assert covered(make, math.exp(0.5), is_share=False) >= LEAST


@pytest.mark.parametrize("groups", [3, 10, 60])
def test_of_groups_that_are_not_alike(groups: int) -> None:
    """Each group has a share of its own, as photographs of one part do."""

    def make(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        sizes_G = rng.integers(1, 21, groups)
        share_G = rng.beta(3.2, 0.8, groups)
        groups_N = np.repeat(np.arange(groups), sizes_G)
        return (rng.random(len(groups_N)) < share_G[groups_N]).astype(float), groups_N

    assert covered(make, 0.8, is_share=True) >= LEAST


def test_few_groups_of_errors_do_not_look_worse() -> None:
    """The lower end says whether a slice is worse. Five groups of many images are five cases."""
    rng = np.random.default_rng(0)
    truth = math.exp(0.245 + 0.045)
    above = 0
    for _ in range(REPEATS):
        groups_N = np.repeat(np.arange(5), rng.integers(1, 21, 5))
        outcome_N = rng.lognormal(0, 0.7, 5)[groups_N] * rng.lognormal(0, 0.3, len(groups_N))
        above += interval(outcome_N, groups_N, 0.05, False, rng)[0] > truth
    assert above <= 10, "2.5 % and three standard deviations"


def test_images_of_a_group_are_drawn_together() -> None:
    """Twenty groups of fifty equal images say as much as twenty images."""
    rng = np.random.default_rng(0)
    right_G = (rng.random(20) < 0.8).astype(float)
    groups_N = np.repeat(np.arange(20), 50)
    width = []
    for together_N in (np.arange(1000), groups_N):
        low, high = interval(right_G.repeat(50), together_N, 0.05, True, rng)
        width.append(high - low)
    low, high = interval(right_G, np.arange(20), 0.05, True, rng)
    assert width[1] > 4 * width[0]
    assert width[1] == pytest.approx(high - low, rel=0.15)


def test_one_group_nothing_to_divide_by_and_very_many_groups() -> None:
    rng = np.random.default_rng(0)
    ones = np.ones(30)
    assert interval(ones * 2.5, np.zeros(30), 0.05, False, rng) == (0.0, math.inf)
    assert interval(ones * 2.5, np.arange(30), 0.05, False, rng) == (2.5, 2.5)
    low, high = interval(ones, np.zeros(30), 0.05, True, rng)
    assert low < 0.3 and high == 1
    # Nothing is drawn of 200,000 images.
    many = rng.lognormal(0, 1, 200_000)
    low, high = interval(many, np.arange(200_000), 0.05, False, rng)
    assert low < many.mean() < high and high - low < 0.03
