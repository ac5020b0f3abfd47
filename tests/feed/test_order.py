"""Every sample exactly once, the same global batches at every world size, resumable at any step, and well shuffled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.feed.order import Order, Step, balanced_weights, evaluation, rank_slice, resample

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=40).map(np.array)
SEEDS = st.integers(0, 2**31)
ORDERS = st.builds(Order, SIZES, st.integers(1, 24), SEEDS, st.integers(1, 12), st.integers(1, 4), st.booleans())
WORLDS = [1, 2, 3, 4, 6]


def batches(order: Order, epoch: int, world: int = 1, step: int = 0) -> list[list[int]]:
    """Global batches, dealt back together from every rank's steps."""
    ranks = [[s.samples_B.tolist() for s in order.rank(epoch, step, rank, world)] for rank in range(world)]
    return [[i for turn in zip(*parts, strict=True) for i in turn] for parts in zip(*ranks, strict=True)]


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_the_stream_of_an_epoch_is_every_sample_exactly_once(order: Order, epoch: int) -> None:
    laid = order.epoch(epoch)
    samples, until = laid.at(np.arange(order.samples))
    assert sorted(samples.tolist()) == list(range(order.samples))
    assert (until > np.arange(order.samples)).all() and until.max() <= order.samples + order.shards
    backwards, _ = order.epoch(epoch).at(np.arange(order.samples)[::-1])
    assert backwards[::-1].tolist() == samples.tolist()  # any position on its own


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_what_does_not_fill_a_batch_is_dropped_or_filled_up_as_asked(order: Order, epoch: int) -> None:
    found = batches(order, epoch)
    seen = list(itertools.chain.from_iterable(found))
    assert len(found) == order.steps >= 1
    if not order.drop_last:
        assert {len(b) for b in found} == {order.batch_size} and set(seen) == set(range(order.samples))
    elif order.samples >= order.batch_size:
        assert {len(b) for b in found} == {order.batch_size}
        assert len(set(seen)) == len(seen) > order.samples - order.batch_size
    else:
        assert sorted(seen) == list(range(order.samples))


@given(sizes=SIZES, per_rank=st.integers(1, 4), seed=SEEDS, epoch=st.integers(0, 9), data=st.data())
def test_the_rest_of_an_epoch_is_the_same_at_every_world_size_from_any_step(
    sizes: np.ndarray, per_rank: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = Order(sizes, 12 * per_rank, seed)
    alone = batches(order, epoch)
    step = data.draw(st.integers(0, order.steps))
    for world in WORLDS if order.samples >= order.batch_size else [1]:
        assert batches(order, epoch, world, step) == alone[step:]


@given(sizes=SIZES, seed=SEEDS, world=st.sampled_from(WORLDS))
def test_a_rank_reads_only_its_own_shards(sizes: np.ndarray, seed: int, world: int) -> None:
    order = Order(sizes, 12, seed, drop_last=False)
    laid = order.epoch(0)
    for rank, step in [(r, s) for r in range(world) for s in order.rank(0, 0, r, world)]:
        positions = np.arange(step.done - order.batch_size, step.done)
        if step.done == order.batch_size * ((step.done - 1) // order.batch_size + 1) <= order.samples:
            assert step.samples_B.tolist() == laid.at(positions[positions % world == rank])[0].tolist()


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_row_groups_in_need_are_bounded_by_the_windows(order: Order, epoch: int) -> None:
    bounds = np.cumsum(order.sizes_F)
    held: dict[int, int] = {}
    most = 0
    for step in order.rank(epoch, 0, 0, 1):
        groups = np.searchsorted(bounds, step.samples_B, side="right")
        for group, until in zip(groups.tolist(), step.until_B.tolist(), strict=True):
            held[group] = max(held.get(group, 0), until)
        most = max(most, len(held))
        held = {g: until for g, until in held.items() if until > step.done}
    spread = order.batch_size // order.shards + 2  # a batch may come to the next windows before it has left these
    assert most <= order.shards * order.window * (1 + spread)


@given(sizes=SIZES, seed=SEEDS, epoch=st.integers(0, 100))
def test_epochs_and_seeds_differ_and_repeat_themselves(sizes: np.ndarray, seed: int, epoch: int) -> None:
    sizes = np.append(sizes, [30, 30])
    order = Order(sizes, 8, seed)
    assert batches(order, epoch) == batches(Order(sizes, 8, seed), epoch)
    assert batches(order, epoch) != batches(order, epoch + 1)
    assert batches(order, epoch) != batches(Order(sizes, 8, seed + 1), epoch)


def test_a_batch_is_spread_over_nearly_as_many_row_groups_as_a_full_shuffle_would_do() -> None:
    """Of 1,000 row groups of 128, a batch of 64 drawn at will touches 62; windows of 2 in 12 shards allow 24 at most."""
    sizes = np.full(1000, 128)
    bounds = np.cumsum(sizes)

    def distinct(order: Order) -> float:
        steps = itertools.islice(order.rank(0, 0, 0, 1), 200)
        return float(np.mean([len(np.unique(np.searchsorted(bounds, s.samples_B, side="right"))) for s in steps]))

    assert 21 < distinct(Order(sizes, 64, 0)) <= 24
    assert distinct(Order(sizes, 64, 0, shards=48, window=4)) > 0.85 * distinct(Order(sizes, 64, 0, shards=1, window=1000))


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=200).map(np.array), seed=SEEDS)
def test_weighted_sampling_draws_as_often_as_the_weights_say(weights: np.ndarray, seed: int) -> None:
    copies = resample(weights, np.random.default_rng(seed))
    assert copies.sum() == len(weights)
    assert (np.abs(copies - weights / weights.sum() * len(weights)) < 1 + 1e-6).all()


def test_balanced_sampling_shows_every_class_equally_often() -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 9])
    order = Order(np.full(9, 111), 37, 0, weights_N=balanced_weights(labels))
    counts = np.bincount(labels[list(itertools.chain.from_iterable(batches(order, 0)))])
    assert counts.tolist() == pytest.approx([333, 333, 333], abs=2)
    assert batches(order, 0, 3, 5) == [sorted_as(b, 3) for b in batches(order, 0, 1, 5)]


def sorted_as(batch: list[int], world: int) -> list[int]:
    """37 does not divide by 3: ranks are filled up from the batch's start."""
    return [*batch, *batch[: -len(batch) % world]]


@given(batch=st.integers(1, 64), world=st.integers(1, 9))
def test_ranks_share_a_batch_evenly_and_lose_no_row(batch: int, world: int) -> None:
    shares = [rank_slice(np.arange(100, 100 + batch), rank, world) for rank in range(world)]
    assert {len(s) for s in shares} == {-(-batch // world)}
    assert set(np.concatenate(shares).tolist()) == set(range(100, 100 + batch))


@given(sizes=SIZES, batch_size=st.integers(1, 40), world=st.integers(1, 9))
def test_an_evaluation_sees_every_sample_once_in_equally_many_batches(sizes: np.ndarray, batch_size: int, world: int) -> None:
    ranks: list[list[Step]] = [list(evaluation(sizes, batch_size, rank, world)) for rank in range(world)]
    assert len({len(steps) for steps in ranks}) == 1  # sharded weights gather in step
    assert sorted(i for steps in ranks for s in steps for i in s.samples_B.tolist()) == list(range(int(sizes.sum())))
    assert max(len(s.samples_B) for steps in ranks for s in steps) <= batch_size
