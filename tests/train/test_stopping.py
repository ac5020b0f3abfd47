"""When to stop is a pure function of the metric's history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.train.stopping import StoppingConfig, improved, should_stop

NAN = float("nan")


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
def test_patience_and_min_delta(history: list[float], patience: int, min_delta: float, stops: bool) -> None:
    assert should_stop(history, StoppingConfig(patience=patience, min_delta=min_delta)) is stops


@given(history=st.lists(st.floats(-10, 10), max_size=30), patience=st.integers(1, 6), delta=st.floats(0, 1))
def test_a_loss_stops_where_its_negative_would(history: list[float], patience: int, delta: float) -> None:
    up = StoppingConfig(metric="val_accuracy", mode="max", patience=patience, min_delta=delta)
    down = StoppingConfig(metric="val_loss", mode="min", patience=patience, min_delta=delta)
    assert should_stop(history, up) == should_stop([-value for value in history], down)


@given(history=st.lists(st.floats(0, 1), max_size=40))
def test_without_patience_nothing_stops(history: list[float]) -> None:
    assert not should_stop(history, StoppingConfig(patience=None))


def test_nan_never_improves() -> None:
    for mode in ("max", "min"):
        cfg = StoppingConfig(mode=mode)
        assert not improved(NAN, None, cfg) and not improved(NAN, 0.3, cfg)
        assert improved(0.3, None, cfg)


def test_a_patience_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patience is wrong.*greater than or equal to 1"):
        validate(StoppingConfig, {"patience": 0})
