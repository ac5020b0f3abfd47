"""Every sample exactly once, the same global batches at every world size, resumable at any step,
and well shuffled.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.feed.dataset import FeedConfig
from raypipe.feed.feed import Feed, Source
from raypipe.feed.order import Order, Step, evaluation
from raypipe.feed.rows import Rows
from raypipe.feed.sampling import balanced_weights, resample
from raypipe.feed.share import deal

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=40).map(np.array)
SEEDS = st.integers(0, 2**31)
ORDERS = st.builds(
    Order, SIZES, st.integers(1, 24), SEEDS, st.integers(1, 12), st.integers(1, 4), st.booleans()
)
WORLDS = st.integers(1, 12)
DIVISORS = {12: [1, 2, 3, 4, 6, 12], 6: [1, 2, 3, 6], 4: [1, 2, 4]}  # of so many shards: the worlds


def batches(order: Order, epoch: int, world: int = 1, step: int = 0) -> list[list[int]]:
    """Global batches, put together from every rank's steps by the samples' places in the stream."""
    ranks = [list(order.rank(epoch, step, rank, world)) for rank in range(world)]
    found = []
    for parts in zip(*ranks, strict=True):
        counted = [(p.positions_B[: p.share.images], p.samples_B[: p.share.images]) for p in parts]
        placed = {
            at: i
            for places, samples in counted
            for at, i in zip(places.tolist(), samples.tolist(), strict=True)
        }
        assert sum(len(places) for places, _ in counted) == len(placed)  # no place twice
        found.append([placed[at] for at in sorted(placed)])
    return found


def test_the_example_at_the_head_of_the_module_is_true() -> None:
    order = Order(np.array([3, 3, 3, 3]), batch_size=4, seed=2, shards=2, window=2)
    stream, _ = order.epoch(0).samples_at(np.arange(12))
    assert stream.tolist() == [10, 1, 8, 0, 11, 2, 7, 4, 6, 5, 9, 3]
    assert [next(order.rank(0, 0, r, 2)).samples_B.tolist() for r in (0, 1)] == [[10, 8], [1, 0]]


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_no_batch_wants_a_row_group_that_was_let_go(order: Order, epoch: int) -> None:
    """The last batch may be filled up from the epoch's start."""
    done = epoch * order.samples
    for step in order.rank(epoch, 0, 0, 1):
        assert (step.until_B > done).all()
        done = step.done


@given(seed=SEEDS, shards=st.integers(1, 3))
def test_row_groups_that_nothing_is_drawn_of_are_decoded_too(seed: int, shards: int) -> None:
    sizes_F, weights_N = np.array([2, 2, 2]), np.array([0, 0, 1, 1, 1, 1.0])
    order = Order(sizes_F, 1, seed, shards, weights_N=weights_N)
    assert sorted(order.epoch(0).groups()) == [0, 1, 2]


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_the_stream_of_an_epoch_is_every_sample_exactly_once(order: Order, epoch: int) -> None:
    stream = order.epoch(epoch)
    samples, until = stream.samples_at(np.arange(order.samples))
    assert sorted(samples.tolist()) == list(range(order.samples))
    assert (until > np.arange(order.samples)).all() and until.max() <= order.samples + order.shards
    backwards, _ = order.epoch(epoch).samples_at(np.arange(order.samples)[::-1])
    assert backwards[::-1].tolist() == samples.tolist()  # any position on its own


@given(order=ORDERS, epoch=st.integers(0, 100))
def test_what_does_not_fill_a_batch_is_dropped_or_filled_up_as_asked(
    order: Order, epoch: int
) -> None:
    found = batches(order, epoch)
    seen = list(itertools.chain.from_iterable(found))
    assert len(found) == order.steps >= 1
    if not order.drop_last:
        assert {len(b) for b in found} == {order.batch_size} and set(seen) == set(
            range(order.samples)
        )
    elif order.samples >= order.batch_size:
        assert {len(b) for b in found} == {order.batch_size}
        assert len(set(seen)) == len(seen) > order.samples - order.batch_size
    else:
        assert sorted(seen) == list(range(order.samples))


@settings(deadline=None)  # a small batch makes hundreds of steps
@given(order=ORDERS, world=WORLDS, epoch=st.integers(0, 9), data=st.data())
def test_the_rest_of_an_epoch_is_the_same_at_every_world_and_batch_size_from_any_step(
    order: Order, world: int, epoch: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, order.steps))
    assert batches(order, epoch, world, step) == batches(order, epoch)[step:]


@settings(deadline=None)
@given(
    order=st.builds(
        Order, SIZES, st.integers(1, 70), SEEDS, st.sampled_from([4, 6, 12]), st.integers(1, 4)
    ),
    data=st.data(),
)
def test_ranks_read_the_row_groups_that_one_alone_reads_at_any_batch_size(
    order: Order, data: st.DataObject
) -> None:
    """A group that a cut between shards goes through is read by the ranks on both sides, no other
    by more than one.
    """
    world = data.draw(st.sampled_from(DIVISORS[order.shards]))
    bounds = np.cumsum(order.sizes_F)

    def read(world: int) -> list[tuple[int, int]]:
        steps = [(rank, s) for rank in range(world) for s in order.rank(0, 0, rank, world)]
        held = [(rank, s.samples_B[: s.share.images]) for rank, s in steps]
        return sorted(
            {
                (r, int(g))
                for r, samples in held
                for g in np.searchsorted(bounds, samples, side="right")
            }
        )

    assert {g for _, g in read(world)} == {g for _, g in read(1)}
    assert len(read(world)) - len(read(1)) < order.shards


def test_three_and_six_workers_read_240_row_groups_of_100_images_in_batches_of_64() -> None:
    order = Order(np.full(240, 100), 64, 7)
    alone, bounds = batches(order, 0), np.cumsum(order.sizes_F)
    for world in (1, 2, 3, 4, 6, 12):
        ranks = [list(order.rank(0, 0, rank, world)) for rank in range(world)]
        read = [
            len({*np.searchsorted(bounds, np.concatenate([s.samples_B for s in r]), side="right")})
            for r in ranks
        ]
        assert batches(order, 0, world) == alone and sum(read) == 240, world
        parts = {s.share.images for r in ranks for s in r}
        assert max(parts) - min(parts) <= 1, world


@settings(deadline=None)
@given(order=ORDERS, world=WORLDS)
def test_parts_weighed_by_what_they_count_make_the_mean_of_the_global_batch(
    order: Order, world: int
) -> None:
    values = np.random.default_rng(0).normal(size=order.samples)
    for step, *parts in zip(
        order.rank(0, 0, 0, 1), *(order.rank(0, 0, r, world) for r in range(world)), strict=True
    ):
        weighed = [values[p.samples_B].mean() * p.share.weight for p in parts]
        assert np.mean(weighed) == pytest.approx(values[step.samples_B].mean(), abs=1e-9)
        assert (
            min(len(p.samples_B) for p in parts) == parts[0].share.least >= 1
        )  # every rank takes every step
        assert sum(p.share.images for p in parts) == step.share.images == len(step.samples_B)


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
    spread = (
        order.batch_size // order.shards + 2
    )  # a batch may come to the next windows before it has left these
    assert most <= order.shards * order.window * (1 + spread)


@given(sizes=SIZES, seed=SEEDS, epoch=st.integers(0, 100))
def test_epochs_and_seeds_differ_and_repeat_themselves(
    sizes: np.ndarray, seed: int, epoch: int
) -> None:
    sizes = np.append(sizes, [30, 30])
    order = Order(sizes, 8, seed)
    assert batches(order, epoch) == batches(Order(sizes, 8, seed), epoch)
    assert batches(order, epoch) != batches(order, epoch + 1)
    assert batches(order, epoch) != batches(Order(sizes, 8, seed + 1), epoch)


def test_a_batch_is_spread_over_nearly_as_many_row_groups_as_a_full_shuffle_would_do() -> None:
    """Of 1,000 row groups of 128, a batch of 64 drawn at will touches 62; windows of 2 in 12
    shards allow 24 at most.
    """
    sizes = np.full(1000, 128)
    bounds = np.cumsum(sizes)

    def distinct(order: Order) -> float:
        steps = itertools.islice(order.rank(0, 0, 0, 1), 200)
        return float(
            np.mean(
                [len(np.unique(np.searchsorted(bounds, s.samples_B, side="right"))) for s in steps]
            )
        )

    assert 21 < distinct(Order(sizes, 64, 0)) <= 24
    assert distinct(Order(sizes, 64, 0, shards=48, window=4)) > 0.85 * distinct(
        Order(sizes, 64, 0, shards=1, window=1000)
    )


@pytest.mark.parametrize("sizes", [[60], [20, 20, 20]])
@pytest.mark.parametrize("world", [1, 2])
def test_small_batches_of_a_small_table_come_from_all_of_it(sizes: list[int], world: int) -> None:
    """Batch 0 of a table in one row group had the same half of its rows in every epoch."""
    order = Order(np.array(sizes), 6, 0)
    first = [batches(order, epoch, world)[0] for epoch in range(20)]
    # Of draws at will, one of 20 has a row in 88 of 100 cases.
    assert len(set(itertools.chain.from_iterable(first))) > 0.8 * 60
    # Those of one epoch are of different places, too.
    spread = [np.ptp(batch) for epoch in range(20) for batch in batches(order, epoch, world)]
    assert np.mean(spread) > 30


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=200).map(np.array), seed=SEEDS)
def test_weighted_sampling_draws_as_often_as_the_weights_say(
    weights: np.ndarray, seed: int
) -> None:
    copies = resample(weights, np.random.default_rng(seed))
    assert copies.sum() == len(weights)
    assert (np.abs(copies - weights / weights.sum() * len(weights)) < 1 + 1e-6).all()


def test_balanced_sampling_shows_every_class_equally_often() -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 9])
    order = Order(np.full(9, 111), 37, 0, weights_N=balanced_weights(labels))
    counts = np.bincount(labels[list(itertools.chain.from_iterable(batches(order, 0)))])
    assert counts.tolist() == pytest.approx([333, 333, 333], abs=2)
    assert batches(order, 0, 3, 5) == batches(order, 0, 1, 5)


@given(order=ORDERS, epoch=st.integers(0, 9), seed=SEEDS)
def test_each_copy_of_a_sample_has_a_place_of_its_own(order: Order, epoch: int, seed: int) -> None:
    """Weighted sampling draws a sample often, a batch may be filled up: the copies' augmentations
    differ by their places.
    """
    rare = np.where(np.random.default_rng(seed).random(order.samples) < 0.1, 50.0, 0.1)
    weighted = Order(
        order.sizes_F, order.batch_size, seed, order.shards, order.window, order.drop_last, rare
    )
    places = np.concatenate([s.positions_B for s in weighted.rank(epoch, 0, 0, 1)])
    assert len(np.unique(places)) == len(places)


@given(
    batch=st.integers(1, 64),
    start=st.integers(0, 1000),
    samples=st.integers(1, 99),
    world=st.integers(1, 9),
)
def test_ranks_share_a_batch_and_lose_no_row(
    batch: int, start: int, samples: int, world: int
) -> None:
    places = np.arange(start, start + batch)
    shares = [deal(places, samples, rank, world) for rank in range(world)]
    assert (
        sorted(p for mine, share in shares for p in mine[: share.images].tolist())
        == places.tolist()
    )
    assert all(len(mine) == max(1, share.images) for mine, share in shares)
    assert sum(share.weight for _, share in shares) == pytest.approx(world)


@given(sizes=SIZES, batch_size=st.integers(1, 40), world=st.integers(1, 9))
def test_an_evaluation_sees_every_sample_once_in_equally_many_batches(
    sizes: np.ndarray, batch_size: int, world: int
) -> None:
    ranks: list[list[Step]] = [
        list(evaluation(sizes, batch_size, rank, world)) for rank in range(world)
    ]
    assert len({len(steps) for steps in ranks}) == 1  # sharded weights gather in step
    assert sorted(i for steps in ranks for s in steps for i in s.samples_B.tolist()) == list(
        range(int(sizes.sum()))
    )
    assert max(len(s.samples_B) for steps in ranks for s in steps) <= batch_size


@pytest.mark.parametrize(
    ("world", "micro", "most"), [(1, 1, 12), (1, 4, 3), (3, 1, 4), (5, 1, 3), (4, 5, 1)]
)
def test_a_rank_validates_no_more_images_at_once_than_it_trains_on(
    world: int, micro: int, most: int
) -> None:
    """Each had a whole global batch: on 16 GPUs 16 times what it trained on."""
    rows = Rows(labels_N=np.zeros(50, np.uint8), sizes_F=np.array([20, 30]))
    source = Source("memory", rows, 32, FeedConfig(), inputs=np.zeros((50, 2), np.float32))
    ranks = []
    for rank in range(world):
        feed = Feed(source, source, 12, 0, rank, world, micro=micro)
        ranks.append([batch.samples_B.tolist() for batch in feed.val()])
    assert max(len(batch) for told in ranks for batch in told) <= most
    assert sorted(itertools.chain(*(itertools.chain(*told) for told in ranks))) == list(range(50))
    assert len({len(told) for told in ranks}) == 1


@pytest.mark.parametrize(
    ("carrier", "side_px", "images"),
    [("threads", 32, 256), ("cache", 512, 256), ("threads", 2048, 16), ("memory", 2048, 256)],
)
def test_a_finished_model_is_judged_on_fewer_images_at_once_if_they_are_large(
    carrier: str, side_px: int, images: int
) -> None:
    """A batch of 256 images of 2,048 px is 3.2 GB, and some batches are read ahead."""
    assert Source(carrier, None, side_px, FeedConfig()).judged_at_once == images
