"""Memory is lent again when all that was made from it is gone, and never before."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.feed.buffers import Buffers

KEEPERS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda lent: lent,
    "view": lambda lent: lent[3:5],
    "reshaped": lambda lent: lent.reshape(2, -1).T,
    "memoryview": lambda lent: lent.data[1:2],
    "tensor": lambda lent: torch.from_numpy(lent),
    "view of a tensor": lambda lent: torch.from_numpy(lent)[1:].view(-1),
    "array of a tensor": lambda lent: torch.from_numpy(lent).numpy()[2:],
    "bytes of a memoryview": lambda lent: np.frombuffer(lent.data, np.uint8),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_buffer_is_not_lent_while_anything_looks_at_it(name: str) -> None:
    buffers = Buffers()
    lent = buffers.take(1000)
    where = lent.ctypes.data
    kept = KEEPERS[name](lent)
    del lent
    assert buffers.take(1000).ctypes.data != where
    del kept
    assert buffers.take(1000).ctypes.data == where


def test_threads_are_never_lent_the_same_memory() -> None:
    buffers, clashes = Buffers(), list[int]()

    def use(mine: int) -> None:
        for _ in range(2000):
            lent = buffers.take(64)
            lent[:] = mine
            time.sleep(0)  # others may run now
            if (lent != mine).any():
                clashes.append(mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert not clashes


def test_batches_follow_each_other_in_the_same_memory() -> None:
    buffers = Buffers()
    places = set()
    for n in (4, 4, 3, 4):
        batch = buffers.tensor((n, 8, 8, 3))
        assert batch.shape == (n, 8, 8, 3) and batch.dtype == torch.uint8 and batch.is_contiguous()
        places.add(batch.data_ptr())
        del batch
    assert len(places) == 1


def test_more_than_are_kept_are_lent_all_the_same() -> None:
    buffers = Buffers(most=2)
    lent = [buffers.take(10) for _ in range(5)]
    assert len({a.ctypes.data for a in lent}) == 5
    del lent
    assert len(buffers._held) == 2
