"""Each exact test is its definition, quiet without drift, and no trouble at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from raypipe.watch.detectors import DETECTORS
from raypipe.watch.detectors.by_column import cvm, ks
from raypipe.watch.detectors.classes import chi2
from raypipe.watch.detectors.detector import KINDS, Pair, Setting
from raypipe.watch.projection import LEAST_CVM

SETTING = Setting(permutations=999, seed=0, width=1.0)
# Kolmogorov's distance that 300 uniform draws exceed once in 1,000.
MOST_OF_300 = 0.112


def classes(reference: list[int], batch: list[int], names: tuple[str, ...] = ()) -> Pair:
    """From counts of each class."""
    sides = [np.repeat(np.arange(len(c)), c)[:, None] for c in (reference, batch)]
    return Pair(sides[0], sides[1], names)


def test_every_detector_looks_at_what_there_is() -> None:
    for name, detector in DETECTORS.items():
        assert detector.name == name and set(detector.looks_at) <= set(KINDS)


def test_many_images_of_each_class_are_pearson_s_test() -> None:
    """Classes that neither side has are no column of the table: scipy would divide by 0."""
    counts = [[120, 0, 60, 20], [90, 0, 90, 20]]
    found = chi2(classes(*counts), SETTING)
    wanted = stats.chi2_contingency(np.array(counts)[:, [0, 2, 3]])
    assert (found.statistic, found.p_value) == (wanted.statistic, wanted.pvalue)


def test_few_images_of_a_class_are_an_exact_test() -> None:
    found = chi2(classes([19, 1], [12, 8], ("good", "crack")), SETTING)
    assert found.p_value == stats.fisher_exact([[19, 1], [12, 8]]).pvalue
    assert found.detail == "'crack': 5 % to 40 %"
    # A class that nobody had, in three classes with few images.
    moved = chi2(classes([30, 2, 0], [12, 2, 18], ("a", "b", "c")), SETTING)
    assert moved.p_value == 1 / 1000 and "'c': 0 % to 56.2 %" in moved.detail


def test_permuted_p_is_that_of_all_regroupings() -> None:
    """12 images: all ways to choose the batch can be counted."""
    pair = classes([4, 2, 0], [1, 2, 3])
    labels = np.concatenate([pair.reference, pair.batch])[:, 0]
    expected = np.bincount(labels) / 2

    def away(batch: np.ndarray) -> float:
        counts = np.bincount(batch, minlength=3)
        rest = np.bincount(labels, minlength=3) - counts
        return float(
            ((counts - expected) ** 2 / expected + (rest - expected) ** 2 / expected).sum()
        )

    from itertools import combinations

    observed = away(pair.batch[:, 0])
    every = [away(labels[list(chosen)]) for chosen in combinations(range(12), 6)]
    share = np.mean(np.array(every) >= observed - 1e-9)
    found = chi2(pair, Setting(20_000, 0, 1.0))
    assert found.statistic == pytest.approx(observed)
    assert found.p_value == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("rare", [0.01, 0.2])
def test_classes_are_quiet_without_drift(rare: float) -> None:
    rng = np.random.default_rng(1)
    odds = [1 - 3 * rare, rare, rare, rare]
    p_values = []
    for _ in range(300):
        sides = (rng.choice(4, size=(rows, 1), p=odds) for rows in (60, 40))
        p_values.append(chi2(Pair(*sides), Setting(199, 0, 1.0)).p_value)
    # Counts are few and ties many, so p may be too large, but not too small.
    share = np.array([np.mean(np.array(p_values) <= level) for level in (0.01, 0.05, 0.2, 0.5)])
    assert (share <= np.array([0.01, 0.05, 0.2, 0.5]) + MOST_OF_300 / 2).all(), share


def test_one_class_is_no_evidence() -> None:
    assert chi2(classes([30], [40]), SETTING).p_value == 1
    assert chi2(classes([0, 30], [0, 40]), SETTING).p_value == 1


@pytest.mark.parametrize("test", [ks, cvm])
def test_columns_are_quiet_without_drift_and_alarm_with_it(test: object) -> None:
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(300):
        pair = Pair(rng.normal(size=(40, 1)), rng.normal(size=(50, 1)))
        p_values.append(test(pair, SETTING).p_value)  # type: ignore[operator]
    assert np.abs(np.sort(p_values) - np.arange(1, 301) / 300).max() < MOST_OF_300
    near = Pair(rng.normal(size=(300, 5)), rng.normal(size=(300, 5)), tuple("vwxyz"))
    near.batch[:, 2] += 1
    found = test(near, SETTING)  # type: ignore[operator]
    assert found.p_value < 1e-5 and found.detail.startswith("x: median ")


def test_cvm_claims_no_more_than_its_distribution_knows() -> None:
    far = Pair(np.zeros((5000, 1)), np.ones((5000, 1)))
    assert cvm(far, SETTING).p_value == LEAST_CVM
    assert ks(far, SETTING).p_value < 1e-300
