"""Shifted copies: other pixels, the same picture, the same twice; stronger means further away."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.errors import DataError
from raypipe.images.shifts import KINDS, shifted


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Smooth blobs, not square, one of them constant."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(5, 251, (4, 6, 8, 3))
    pixels = np.kron(coarse, np.ones((1, 8, 8, 1))).astype(np.uint8)
    pixels[3] = 200
    return pixels


@pytest.mark.parametrize("kind", KINDS)
def test_a_shift_keeps_the_shape_and_grows_with_its_strength(
    kind: str, pictures: np.ndarray
) -> None:
    before = pictures.copy()
    mild, strong = (shifted(pictures, kind, strength, seed=1) for strength in (0.2, 1.0))
    assert mild.shape == strong.shape == pictures.shape and mild.dtype == np.uint8
    assert (pictures == before).all()
    assert (shifted(pictures, kind, 1.0, seed=1) == strong).all()
    changes = [np.abs(p.astype(int) - pictures).mean() for p in (mild, strong)]
    assert 0 < changes[0] < changes[1]


def test_what_is_no_shift(pictures: np.ndarray) -> None:
    with pytest.raises(DataError, match="Did you mean 'zoom'"):
        shifted(pictures, "zom", 0.5, 0)
    for strength in (0.0, 1.1, float("nan")):
        with pytest.raises(DataError, match="out of range"):
            shifted(pictures, "zoom", strength, 0)
    assert shifted(pictures[:0], "zoom", 0.5, 0).shape == (0, 48, 64, 3)
    assert shifted(pictures[:1, :1, :1], "rotate", 1.0, 0).shape == (1, 1, 1, 3)
