"""No step has a rate of 0, rates follow their shapes, and the finders find known optima."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from raypipe.errors import RaypipeError
from raypipe.train.schedule import (
    SCHEDULES,
    factor,
    fastest_batch_size,
    find_batch_size,
    lr_range,
    scaled,
)

STEPS = st.integers(1, 3000)
WARMUP = st.none() | st.floats(0, 0.99)
NAMES = sorted(SCHEDULES)


def factors(name: str, steps: int, warmup: float | None = None) -> list[float]:
    return [factor(name, i, steps, warmup) for i in range(steps)]


@settings(deadline=None)
@given(steps=STEPS, warmup=WARMUP, at=st.floats(0, 1))
@pytest.mark.parametrize("name", NAMES)
def test_every_step_trains_and_none_above_the_peak(
    name: str, steps: int, warmup: float | None, at: float
) -> None:
    for done in (0, steps - 1, min(steps - 1, int(at * steps))):
        assert 0 < factor(name, done, steps, warmup) <= 1


@settings(deadline=None)
@given(steps=st.integers(2, 300), warmup=WARMUP)
@pytest.mark.parametrize("name", NAMES)
def test_the_rate_rises_in_the_warm_up_and_never_after_it(
    name: str, steps: int, warmup: float | None
) -> None:
    found = factors(name, steps, warmup)
    rise = {"one_cycle": 0.3}.get(name, 0.05) if warmup is None else warmup
    first = sum((i + 0.5) / steps < rise for i in range(steps))
    assert found[:first] == sorted(found[:first]) and found[first:] == sorted(
        found[first:], reverse=True
    )


@settings(deadline=None)
@given(steps=st.integers(2, 500), done=st.integers(0, 500))
@pytest.mark.parametrize("name", NAMES)
def test_more_steps_draw_the_same_curve_more_finely(name: str, steps: int, done: int) -> None:
    """The middle of one step in n is the middle of the second of three in 3n."""
    done = min(done, steps - 1)
    assert factor(name, done, steps) == pytest.approx(
        factor(name, 3 * done + 1, 3 * steps), rel=1e-6, abs=1e-9
    )


def test_curves_at_their_landmarks() -> None:
    at = {name: factors(name, 1000) for name in NAMES}
    assert at["constant"][25:28] == pytest.approx([0.51, 0.53, 0.55]) and set(
        at["constant"][50:]
    ) == {1.0}
    assert at["cosine"][50] == pytest.approx(1, abs=1e-4) and at["cosine"][524] == pytest.approx(
        0.5, abs=1e-3
    )
    assert at["cosine"][-1] < 1e-5
    assert (
        at["one_cycle"][0] == pytest.approx(1 / 25, abs=2e-3)
        and at["one_cycle"].index(max(at["one_cycle"])) == 300
    )
    assert [at["step"][i] for i in (60, 360, 370, 680, 690, 999)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


def test_one_step_alone_trains_at_half_a_cosine() -> None:
    assert factor("cosine", 0, 1, warmup=0) == pytest.approx(0.5) and factor("constant", 0, 1) == 1


@settings(deadline=None)
@given(lr=st.floats(1e-6, 1), batch=st.integers(1, 4096), n=st.integers(1, 64))
def test_rates_grow_with_the_batch(lr: float, batch: int, n: int) -> None:
    assert scaled(lr, n * batch, None) == lr
    assert scaled(lr, batch, batch) == scaled(lr, batch, batch, "linear") == pytest.approx(lr)
    assert scaled(lr, n * batch, batch) == pytest.approx(lr * math.sqrt(n))
    assert scaled(lr, n * batch, batch, "linear") == pytest.approx(lr * n)
    assert scaled(scaled(lr, n * batch, batch), batch, n * batch) == pytest.approx(lr)


@settings(deadline=None)
@given(
    room=st.integers(0, 5000),
    start=st.integers(1, 300),
    limit=st.integers(1, 4096),
    within=st.floats(0, 0.5),
)
def test_the_batch_found_fits_and_one_a_little_larger_does_not(
    room: int, start: int, limit: int, within: float
) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= room

    if room == 0:
        with pytest.raises(RaypipeError, match="Not even one image fits"):
            find_batch_size(fits, start, limit, within)
        return
    found = find_batch_size(fits, start, limit, within)
    true = min(room, limit)
    assert 1 <= found <= true and true - found <= max(0, within * found)
    assert len(asked) == len(set(asked)) <= 2 * math.log2(limit) + 2 and max(asked) <= limit


@settings(deadline=None)
@given(knee=st.integers(3, 10), overhead=st.floats(0.5, 50))
def test_the_fastest_batch_is_the_smallest_that_is_nearly_fastest(
    knee: int, overhead: float
) -> None:
    """Time of a batch: overhead + size up to the knee, where the cache ends; beyond it each image
    costs a third more. A second climb, two sizes beyond the knee, is not looked for."""
    tried: dict[int, float] = {}

    def rate(size: int) -> float:
        tried[size] = size / (overhead + size * (1.0 if size <= 2**knee else 4 / 3))
        return tried[size]

    found = fastest_batch_size(rate, 8, 1024)
    assert {8 * 2**i for i in range(len(tried))} == tried.keys()
    assert tried[found] >= max(tried.values()) / 1.05 and all(
        tried[size] < tried[found] for size in tried if size < found
    )


def test_one_noisy_measurement_does_not_end_the_climb() -> None:
    rates = {8: 100.0, 16: 90.0, 32: 200.0, 64: 205.0, 128: 190.0}
    asked: list[int] = []
    assert fastest_batch_size(lambda size: asked.append(size) or rates[size], 8, 1024) == 32
    assert asked == [8, 16, 32, 64, 128]
    assert fastest_batch_size(lambda size: 1.0, 8, limit=5) == 5


@pytest.mark.parametrize("edge", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_range_test_suggests_a_rate_below_the_edge(edge: float) -> None:
    """A loss that falls with the rate spent on it and explodes above `edge`."""
    loss, tried = 2.3, []

    def train(lr: float) -> float:
        nonlocal loss
        tried.append(lr)
        loss *= 1 - min(0.2, lr / edge) if lr < edge else 1.5
        return loss

    found = lr_range(train, 1e-6, 1.0, steps=120)
    assert edge / 30 <= found.lr <= edge
    assert (
        found.lrs == tuple(tried) == tuple(sorted(tried)) and len(found.losses) == len(tried) < 120
    )  # it ended early


@pytest.mark.parametrize("loss", [2.3, float("nan"), float("inf")])
def test_without_a_fall_there_is_no_suggestion(loss: float) -> None:
    with pytest.raises(RaypipeError, match=r"No learning rate made the loss fall.*1e-06 to 1"):
        lr_range(lambda lr: loss)


class Learner:
    """Three classes that a line separates, with some noise; a small network; batches of 32."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(0)
        self.inputs_ND = torch.randn(512, 20, generator=self.draws)
        self.labels_N = (
            self.inputs_ND[:, :3] + 0.3 * torch.randn(512, 3, generator=self.draws)
        ).argmax(1)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self, lr: float) -> float:
        rows_B = torch.randint(0, 512, (32,), generator=self.draws)
        self.optimizer.param_groups[0]["lr"] = lr
        loss = cross_entropy(self.model(self.inputs_ND[rows_B]), self.labels_N[rows_B])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def after(self, lr: float, steps: int = 80) -> float:
        return statistics.fmean([self.train(lr) for _ in range(steps)][-20:])


def test_a_real_model_learns_better_at_the_suggested_rate_than_far_from_it() -> None:
    found = lr_range(Learner().train, 1e-6, 10.0).lr
    assert Learner().after(found) < 0.5 * min(
        Learner().after(found / 100), Learner().after(found * 100)
    )
