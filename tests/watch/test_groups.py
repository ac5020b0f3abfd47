"""Images that come in groups: whole groups change places, or a test says that they are too few."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from raypipe.errors import DataError
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.groups import Units, apart, at_most, codes, median_size, whole
from raypipe.watch.mmd import mmd
from raypipe.watch.sides import Seen

from .test_mmd import by_definition

ALPHA = 0.05
MMD = DriftConfig(detectors=("mmd",), alpha=ALPHA, permutations=199)


def modules(
    rng: np.random.Generator, count: int, move: float = 0.0
) -> tuple[np.ndarray, list[str]]:
    """Cells of modules, 8 each: a module is as far from others as cells are from each other."""
    of = [rng.normal(size=5) + rng.normal(size=(8, 5)) + move for _ in range(count)]
    return np.concatenate(of), [f"m{module}" for module in range(count) for _ in range(8)]


def checked(
    seed: int,
    grouped: bool,
    move: float = 0.0,
    counts: tuple[int, int] = (25, 12),
    **change: object,
) -> DriftReport:
    rng = np.random.default_rng(seed)
    (reference, ours), (batch, theirs) = modules(rng, counts[0]), modules(rng, counts[1], move)
    scores = rng.dirichlet([2, 2, 2], len(reference) + len(batch))
    split = scores[: len(reference)], scores[len(reference) :]
    seen = (Seen(groups=ours), Seen(groups=theirs)) if grouped else (Seen(), Seen())
    return detect(reference, batch, *split, MMD.model_copy(update=change), seed, *seen)


def test_rows_alarm_without_drift_and_whole_groups_do_not() -> None:
    tries = 150
    by_rows = sum(checked(seed, grouped=False).is_drift for seed in range(tries))
    by_groups = sum(checked(seed, grouped=True).is_drift for seed in range(tries))
    assert by_rows > 0.7 * tries, by_rows
    assert binomtest(by_groups, tries, ALPHA, "greater").pvalue > 0.001, by_groups
    # And it is no test that never alarms.
    assert by_groups > 0


def test_whole_groups_still_find_drift() -> None:
    found = [checked(seed, grouped=True, move=1.5) for seed in range(20)]
    assert sum(one.is_drift for one in found) == 20
    assert found[0].evidence[0].detail == "by 25 and 12 whole groups"


def test_too_few_groups_are_one_message_and_other_tests_go_on() -> None:
    ways = "3 groups of the reference and 3 of the batch can change places in 20 ways"
    with pytest.raises(DataError, match=ways) as found:
        checked(0, grouped=True, counts=(3, 3), alpha=0.01)
    assert "more groups" in str(found.value) and "below 0.05" in str(found.value)
    assert checked(0, grouped=True, counts=(3, 3), alpha=0.05).evidence, "20 ways show 0.05"
    both = checked(0, grouped=True, counts=(3, 3), detectors=("mmd", "ks"))
    assert {e.detector for e in both.evidence} == {"ks"}
    assert any(note.startswith(f"mmd left out: {ways}") for note in both.notes)
    assert any("ks: images count as independent draws" in note for note in both.notes)
    with pytest.raises(DataError, match="and 1 of the batch"):
        _one_group()


def _one_group() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(520, 4))
    scores = np.full((520, 2), 0.5)
    seen = Seen(groups=[""] * 500), Seen(groups=["night"] * 20)
    detect(rows[:500], rows[500:], scores[:500], scores[500:], MMD, 0, *seen)


def test_alibi_s_engine_moves_rows_so_groups_are_computed_here() -> None:
    found = checked(0, grouped=True, engine="alibi")
    assert found.engine == "exact" and "whole groups change places" in found.notes[0]


def test_a_regrouping_is_of_whole_units_and_the_statistic_is_the_definition() -> None:
    rng = np.random.default_rng(1)
    units = Units.of(np.array([4, 4, 4, 9, 9, 2]), np.array([4, 4, 7, 7, 7]))
    assert units.counts == (3, 2) and units.ways == 10
    chosen = units.regroupings(60, 0)
    for unit in range(5):
        mine = chosen[units.unit_L == unit]
        assert (mine == mine[0]).all()
    assert len(np.unique(chosen, axis=1).T) == 10, "all ways are drawn"
    points = rng.normal(size=(11, 3)).astype(np.float32)
    chosen = chosen[:, (chosen.sum(0) > 1) & (chosen.sum(0) < 10)]
    found = mmd(points[:6], points[6:], 1.5, chosen)
    expected = [by_definition(points, one, 1.5) for one in chosen.T]
    assert found.permuted_P == pytest.approx(expected, abs=1e-6)


def test_groups_are_cut_and_drawn_whole() -> None:
    rng = np.random.default_rng(2)
    of = codes(["a"] * 9 + ["b"] * 3 + [""] * 2 + ["c,'\n"] * 3)
    assert len(set(of.tolist())) == 5 and median_size(of) == 3
    kept = of[at_most(of, 3, rng)]
    assert sorted(np.bincount(kept).tolist()) == [1, 1, 3, 3, 3]
    for most in (1, 5, 7, 100):
        rows = kept[whole(kept, most, rng)]
        for group in set(rows.tolist()):
            assert (rows == group).sum() == (kept == group).sum()
        assert len(rows) <= most or len(set(rows.tolist())) == 2


def test_no_two_rows_that_are_kept_have_a_name_in_common() -> None:
    parts, images = ["p", "p", "", "q", ""], ["1", "2", "2", "1", "3"]
    assert apart(range(5), parts) == [0, 2, 3, 4], "a blank name is nobody's"
    assert apart(range(5), parts, images) == [0, 2, 4]
    # What is left out takes no name: the image 2 is free for row 2.
    assert apart([0, 1, 2, 3, 4], parts, images) == apart([0, 2, 1, 4, 3], parts, images)
    assert apart([3, 1, 0, 4, 2], parts, images) == [1, 3, 4]
