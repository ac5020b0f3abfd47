"""A planted bad slice is found and chance is not; intervals hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.models.slices import sliced


def test_a_planted_slice_is_the_worst_and_its_interval_holds_the_truth() -> None:
    rng = np.random.default_rng(4)
    brightness = rng.random(2000)
    dark = brightness < np.quantile(brightness, 0.25)
    right = (rng.random(2000) < np.where(dark, 0.6, 0.9)).astype(float)
    line = rng.choice(["a", "b", "c"], 2000).astype(object)
    found = sliced(right, {"line": line, "brightness": brightness}, higher_is_better=True)
    worst = found.slices[0]
    assert worst.column == "brightness" and worst.name.startswith("0.00") and worst.worse
    assert worst.low <= 0.6 <= worst.high and worst.images == 500
    assert [part.worse for part in found.slices[1:]] == [False] * 6
    assert found.low < right.mean() < found.high


def test_chance_alone_makes_no_slice_worse() -> None:
    """Forty searches over thirty slices of images that are all alike: at most a few alarms."""
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        right = (rng.random(1500) < 0.85).astype(float)
        columns = {"site": rng.integers(0, 30, 1500).astype(str).astype(object)}
        found = sliced(right, columns, higher_is_better=True, seed=seed)
        alarms += any(part.worse for part in found.slices)
    assert alarms <= 4


@pytest.mark.parametrize("truth", [0.7, 0.98, 1.0])
@pytest.mark.parametrize("images", [25, 200])
def test_the_interval_holds_the_truth_in_95_of_100_cases(truth: float, images: int) -> None:
    inside = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        found = sliced((rng.random(images) < truth).astype(float), {}, higher_is_better=True)
        inside += found.low - 1e-12 <= truth <= found.high + 1e-12
    assert inside >= 184, "two standard deviations below 190"


def test_images_of_a_group_are_drawn_together() -> None:
    """Twenty groups of fifty equal images say as much as twenty images."""
    rng = np.random.default_rng(0)
    right_of_group = (rng.random(20) < 0.8).astype(float)
    group = np.repeat(np.arange(20), 50).astype(str).astype(object)
    right = right_of_group.repeat(50)
    alone = sliced(right, {}, higher_is_better=True)
    grouped = sliced(right, {}, higher_is_better=True, group_N=group)
    assert grouped.high - grouped.low > 4 * (alone.high - alone.low)


def test_errors_nulls_equal_values_and_small_parts() -> None:
    errors = np.array([1.0] * 50 + [3.0] * 50)
    columns = {
        "size": np.array([1.0] * 50 + [np.nan] * 50),
        "name": np.array(["a"] * 95 + [None] * 5, dtype=object),
        "same": np.full(100, 7),
    }
    found = sliced(errors, columns, higher_is_better=False)
    assert next((p.column, p.name, p.worse) for p in found.slices) == ("size", "(null)", True)
    assert {(p.column, p.name) for p in found.slices} == {
        ("size", "(null)"),
        ("size", "1"),
        ("name", "a"),
        ("same", "7"),
    }
    assert found.left_out == 1 and found.value == 2.0
    with pytest.raises(ValueError, match="there are none"):
        sliced(errors[:0], {}, higher_is_better=False)
