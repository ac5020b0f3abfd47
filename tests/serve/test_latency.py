"""Latency is measured in pairs: what slows one round slows both models of it."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import pytest
import torch

from raypipe.models.spread import Spread
from raypipe.serve import latency
from raypipe.serve.latency import measure


class Clock:
    """Seconds that models add to, on a machine that is now and then ten times as slow."""

    def __init__(self) -> None:
        self.now, self._calls = 0.0, count()

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        # Whole rounds are slow: two calls each.
        self.now += seconds * (10 if (next(self._calls) // 2) % 3 == 0 else 1)


class Model:
    """Stands for a package that takes so many seconds a batch."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.seen: list[int] = []

    def predict(self, images: list[bytes], threads: int) -> None:
        assert threads == 1
        self.seen.append(len(images))
        self._clock.spend(self._seconds)


def timed(*seconds: float, batch: int = 4) -> tuple[latency.Times, list[Model]]:
    clock = Clock()
    models = [Model(clock, each) for each in seconds]
    return measure(cast(list[Any], models), [b"a", b"b", b"c"], batch, clock), models


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_machine", lambda package: "here")


def test_a_ratio_is_exact_on_a_machine_that_is_now_and_then_slow() -> None:
    times, models = timed(0.010, 0.012)
    ratio = Spread.of([b / a for a, b in times.times_RM])
    assert (ratio.low, ratio.high) == pytest.approx((1.2, 1.2))
    alone = Spread.of([a for a, _ in times.times_RM])
    assert alone.median == pytest.approx(10), "ms, and slow rounds do not move the median"
    assert set(models[0].seen) == {4} and len(models[0].seen) == latency.WARM + latency.MOST


def test_slow_models_are_measured_in_fewer_rounds() -> None:
    assert len(timed(30.0, 30.0)[0].times_RM) == latency.FEWEST
    with pytest.raises(ValueError, match="there are none"):
        measure([], [], 1)


def test_one_thread_computes_as_in_a_server() -> None:
    seen = []

    class Counting:
        model: Any = None

        def predict(self, images: Any, threads: int) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure([Counting()], [b""], 1, fewest=1, most_s=0)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
