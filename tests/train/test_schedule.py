"""Learning-rate factors stay within 0 and 1, warm up first and fall to nothing at the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.train.schedule import SCHEDULES, cosine

PROGRESS = st.floats(0, 1)


@given(progress=PROGRESS)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_factors_lie_between_nothing_and_all(name: str, progress: float) -> None:
    assert 0 <= SCHEDULES[name](progress) <= 1


@given(a=PROGRESS, b=PROGRESS)
def test_cosine_rises_in_the_warm_up_and_falls_after_it(a: float, b: float) -> None:
    early, late = sorted((a, b))
    if late < 0.05:
        assert cosine(early) <= cosine(late)
    elif early >= 0.05:
        assert cosine(early) >= cosine(late)


def test_cosine_at_its_landmarks() -> None:
    assert [cosine(p) for p in (0, 0.025, 0.05)] == pytest.approx([0, 0.5, 1])
    assert [cosine(p) for p in (0.525, 1, 1.2)] == pytest.approx([0.5, 0, 0], abs=1e-12)
