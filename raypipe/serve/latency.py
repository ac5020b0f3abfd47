"""How long models take for a batch, measured in pairs on this machine.

A model alone on a busy machine looks slow. So all models take the same batch one after the other,
in rounds whose order is turned each time, and a ratio is taken within a round: what slows one of
them for seconds slows the other one, too. The first rounds only warm up. How many rounds follow is
settled by the time of these, never by what is found.

One thread of torch computes, as in each worker of a server. Several of them wait for each other at
every layer, so beside other work one image took 40 to 80 times as long (416 ms instead of 5 with
two threads on two cores), and the interval of its median did not show it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from raypipe.feed.dataset import Pinned
from raypipe.images.decode import decode_good
from raypipe.models.predictor import Predictor
from raypipe.registry import made_by
from raypipe.tables import scan

IMAGES = 32  # different ones that latency is measured with
WARM = 3  # rounds
FEWEST, MOST = 21, 101
SECONDS = 60.0  # that more than FEWEST rounds may take


class Timed(Protocol):
    """What is timed: a package, or a model that has none yet."""

    @property
    def model(self) -> Predictor: ...

    def predict(self, images: Sequence[bytes], threads: int) -> Any:
        """Labels or scores of encoded images."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of each model in each round (`times_RM`), for `batch` images; `machine` says on
    which one, in words."""

    times_RM: tuple[tuple[float, ...], ...]
    batch: int
    machine: str


def measure(
    packages: Sequence[Timed],
    images: Sequence[bytes],
    batch: int,
    clock: Callable[[], float] = time.perf_counter,
    most_s: float = SECONDS,
    fewest: int = FEWEST,
) -> Times:
    """Time `packages` on a batch, from encoded images to labels, with one thread of decoding.

    images: encoded; they are repeated, or the first are taken, to fill the batch. clock: seconds.
    most_s: seconds that more rounds than `fewest` may take.
    Raises ValueError without images, DataError for a model whose scores are not finite.
    """
    if not images:
        raise ValueError("latency is of images, and there are none")
    filled = [images[i % len(images)] for i in range(batch)]

    def round_of(order: Sequence[int]) -> tuple[float, ...]:
        took = [0.0] * len(packages)
        for number in order:
            began = clock()
            packages[number].predict(filled, threads=1)
            took[number] = (clock() - began) * 1000
        return tuple(took)

    forwards = range(len(packages))
    with one_thread():
        warm = [round_of(forwards) for _ in range(WARM)]
        # The first round loads the models; the last one is what a round takes.
        round_s = max(sum(warm[-1]) / 1000, 1e-6)
        rounds = int(min(MOST, max(fewest, most_s / round_s)))

        was_on = gc.isenabled()
        gc.disable()
        try:
            times = [round_of(forwards if r % 2 == 0 else forwards[::-1]) for r in range(rounds)]
        finally:
            if was_on:
                gc.enable()
        return Times(tuple(times), batch, _machine(packages[0]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread in what is within."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine(package: Timed) -> str:
    import torch

    known = made_by.machine()
    device = package.model.device
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    words = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{known['cpu']}, {words} of {known['cpus']} CPUs"


def images(pinned: Pinned, split: str, side_px: int, threads: int) -> list[bytes]:
    """The first images of a split that decode, encoded; IMAGES at most.

    One that does not is no reason to fail: rows without a label are not compared, so nobody else
    has to decode them.
    """
    found: list[bytes] = []
    column = pinned.table.columns.image
    for part in scan.each(pinned.table, pinned.version, [column], pinned.rows_of(split)):
        for first in range(0, len(part), IMAGES):
            some = part[column].slice(first, IMAGES).to_pylist()
            found += [some[slot] for slot in decode_good(some, side_px, threads).good]
            if len(found) >= IMAGES:
                return found[:IMAGES]
    return found
