"""Nothing is lost, nothing comes twice, and the world size changes nothing but who does the work."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypipe.feed import order
from raypipe.feed.dataset import CacheFeed, Samples

WORLDS = st.integers(1, 9)
SEEDS = st.integers(0, 2**31)


def samples(count: int) -> Samples:
    """Row i holds the number i."""
    rows = np.arange(count)
    return Samples(rows.astype(np.float32)[:, None], rows.astype(np.int64), tuple(map(str, rows)))


def feeds(train: int, val: int, batch_size: int, world: int, seed: int = 3) -> list[CacheFeed]:
    return [CacheFeed(samples(train), samples(val), batch_size, seed, rank, world) for rank in range(world)]


@given(batches=st.integers(1, 20), batch_size=st.integers(1, 40), seed=SEEDS, epoch=st.integers(0, 1000))
def test_every_sample_comes_exactly_once_an_epoch_when_the_batch_divides(
    batches: int, batch_size: int, seed: int, epoch: int
) -> None:
    seen = list(order.global_batches(order.epoch_order(batches * batch_size, seed, epoch), batch_size))
    assert [len(b) for b in seen] == [batch_size] * batches
    assert sorted(np.concatenate(seen).tolist()) == list(range(batches * batch_size))


@given(count=st.integers(1, 300), batch_size=st.integers(1, 64), seed=SEEDS)
def test_what_does_not_fill_a_batch_waits_for_another_epoch(count: int, batch_size: int, seed: int) -> None:
    seen = list(order.global_batches(order.epoch_order(count, seed, 0), batch_size))
    assert len(seen) == order.steps_per_epoch(count, batch_size) >= 1
    rows = np.concatenate(seen).tolist()
    assert len(set(rows)) == len(rows) >= min(count, count - batch_size + 1)


@given(batch=st.integers(1, 64), world=WORLDS)
def test_ranks_share_a_batch_evenly_and_lose_no_row(batch: int, world: int) -> None:
    rows = np.arange(100, 100 + batch)
    shares = [order.rank_slice(rows, rank, world) for rank in range(world)]
    assert {len(s) for s in shares} == {-(-batch // world)}
    assert set(np.concatenate(shares).tolist()) == set(rows.tolist())
    if batch % world == 0:
        assert sorted(np.concatenate(shares).tolist()) == rows.tolist()


@given(batches=st.integers(1, 8), per_rank=st.integers(1, 8), world=WORLDS, epoch=st.integers(0, 50))
def test_global_batches_are_the_same_at_every_world_size(batches: int, per_rank: int, world: int, epoch: int) -> None:
    size = per_rank * world
    alone = [set(labels.tolist()) for _, labels in feeds(batches * size, 1, size, 1)[0].train(epoch)]
    ranks = [[labels.tolist() for _, labels in feed.train(epoch)] for feed in feeds(batches * size, 1, size, world)]
    together = [set().union(*parts) for parts in zip(*ranks, strict=True)]
    assert together == alone


@given(train=st.integers(1, 120), val=st.integers(1, 120), batch_size=st.integers(1, 40), world=WORLDS)
def test_every_rank_sees_equally_many_batches_and_validation_rows_come_exactly_once(
    train: int, val: int, batch_size: int, world: int
) -> None:
    ranks = feeds(train, val, batch_size, world)
    sizes = [[len(labels) for _, labels in feed.train(0)] for feed in ranks]
    assert sizes == [sizes[0]] * world
    validated = [[labels.tolist() for _, labels in feed.val()] for feed in ranks]
    assert len({len(batches) for batches in validated}) == 1  # sharded strategies gather weights in step, also here
    assert sorted(row for batches in validated for batch in batches for row in batch) == list(range(val))
    assert max(len(batch) for batches in validated for batch in batches) <= batch_size


@given(seed=SEEDS, epoch=st.integers(0, 100))
def test_epochs_and_seeds_differ_and_repeat_themselves(seed: int, epoch: int) -> None:
    first = order.epoch_order(64, seed, epoch).tolist()
    assert first == order.epoch_order(64, seed, epoch).tolist()
    assert first != order.epoch_order(64, seed, epoch + 1).tolist()
    assert first != order.epoch_order(64, seed + 1, epoch).tolist()


def test_inputs_and_labels_stay_together() -> None:
    for feed in feeds(50, 13, 8, 2):
        for inputs, labels in [*feed.train(4), *feed.val()]:
            assert inputs[:, 0].long().tolist() == labels.tolist()
