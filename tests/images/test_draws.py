"""Numbers are even, independent of each other, and belong to (seed, epoch, choice, sample)
alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from raypipe.images.draws import Draws

MANY = np.arange(100_000)


def test_a_number_belongs_to_its_sample_whatever_stands_beside_it() -> None:
    whole = Draws(7, 3, MANY).uniform("flip")
    order = np.random.default_rng(0).permutation(MANY)
    np.testing.assert_array_equal(Draws(7, 3, order).uniform("flip"), whole[order])
    np.testing.assert_array_equal(
        Draws(7, 3, torch.tensor([5, 99_999])).uniform("flip"), whole[[5, 99_999]]
    )


def test_numbers_do_not_change_between_releases() -> None:
    """A resumed run may have been started by an older raypipe."""
    assert Draws(7, 3, np.array([0, 1, 2**40])).uniform("flip").round(6).tolist() == [
        0.874716,
        0.794344,
        0.511188,
    ]


@pytest.mark.parametrize(
    "samples",
    [MANY, MANY * 1_000, MANY + 2**62, MANY - 50_000],
    ids=["first", "far", "late", "negative"],
)
def test_numbers_are_even_over_their_range(samples: np.ndarray) -> None:
    drawn = Draws(0, 0, samples).uniform("x", -2, 3)
    assert drawn.min() >= -2 and drawn.max() < 3
    assert stats.kstest((drawn + 2) / 5, "uniform").pvalue > 1e-4
    assert (
        stats.chisquare(np.bincount(Draws(0, 0, samples).integers("n", 14), minlength=14)).pvalue
        > 1e-4
    )
    assert abs(Draws(0, 0, samples).sign("s").mean()) < 0.015  # 5 standard errors
    assert abs(Draws(0, 0, samples).chance("c", 0.2).mean() - 0.2) < 0.007


def test_seeds_epochs_choices_and_neighbours_are_independent() -> None:
    one = Draws(1, 0, MANY)
    first = one.uniform("flip x")
    others = [
        one.uniform("flip y"),
        Draws(2, 0, MANY).uniform("flip x"),
        Draws(1, 1, MANY).uniform("flip x"),
        Draws(1, 0, MANY + 1).uniform("flip x"),
        Draws(1, 0, MANY + 100_000).uniform("flip x"),
    ]
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.016  # 5 standard errors
        cells = np.histogram2d(first, other, bins=10, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-4
    assert (
        Draws(1, 23, MANY[:3]).uniform("a").tolist() != Draws(12, 3, MANY[:3]).uniform("a").tolist()
    )
