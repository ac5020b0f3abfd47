"""A planted bad slice is found and chance is not; intervals hold the truth as often as they say."""

from __future__ import annotations

import tracemalloc

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
    }, "a part of all images is none"
    assert found.left_out == 1 and found.value == 2.0
    with pytest.raises(ValueError, match="there are none"):
        sliced(errors[:0], {}, higher_is_better=False)


def names_of(values: np.ndarray) -> dict[str, int]:
    right = np.arange(len(values)) % 2 == 0
    found = sliced(right.astype(float), {"x": values}, higher_is_better=True, least=2)
    return {part.name: part.images for part in found.slices}


def test_numbers_that_name_things_are_parts_by_themselves_and_others_are_cut() -> None:
    """A line, a camera, a flag: quartiles of 0 and 1 would be one part."""
    assert names_of(np.array([0, 1, 1, 1] * 10)) == {"0": 10, "1": 30}
    assert names_of(np.repeat([1, 2, 3], [10, 10, 5])) == {"1": 10, "2": 10, "3": 5}
    years = np.repeat(np.arange(2000, 2020), 4)
    assert list(names_of(years)) == ["2000 to 2005", "2005 to 2010", "2010 to 2014", "2014 to 2019"]
    days = np.arange("2026-01-01", "2026-03-02", dtype="datetime64[D]").astype("datetime64[us]")
    days[:20] = np.datetime64("NaT")
    assert names_of(days)["(null)"] == 20 and "2026-01-21 to 2026-01-30" in names_of(days)


def test_of_many_texts_the_most_frequent_are_parts_and_the_others_are_counted() -> None:
    texts = np.array([f"t{i % 50}" for i in range(2000)] + ["t0"], dtype=object)
    found = sliced(np.ones(2001), {"x": texts}, higher_is_better=True)
    assert len(found.slices) == 30 and found.left_out == 20
    assert max(found.slices, key=lambda part: part.images).name == "t0"


def test_one_long_text_does_not_make_all_as_large() -> None:
    """As an array each text takes as much as the longest: 5,000 of 20,000 letters were 400 MB."""
    texts = np.array(["x" * 20_000, *("ab"[n % 2] for n in range(4999))], dtype=object)
    right_N = np.ones(len(texts))
    tracemalloc.start()
    found = sliced(right_N, {"notes": texts}, higher_is_better=True, group_N=texts)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100e6
    assert {(part.name, part.images) for part in found.slices} == {("a", 2500), ("b", 2499)}
    assert {part.groups for part in found.slices} == {1} and found.left_out == 1


def test_numbers_that_name_things_keep_their_digits() -> None:
    """Line 1012 was called 1010."""
    assert names_of(np.repeat([1012, 2025], 10)) == {"1012": 10, "2025": 10}
    assert names_of(np.repeat([20261101, 20261115], 10)) == {"20261101": 10, "20261115": 10}
    assert names_of(np.repeat(np.array([0.1, 10.25], np.float32), 10)) == {"0.1": 10, "10.25": 10}
    edges = {edge for name in names_of(np.arange(12_345, 12_445)) for edge in name.split(" to ")}
    assert {"12345", "12444"} <= edges
