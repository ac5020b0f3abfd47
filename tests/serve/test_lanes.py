"""Threads of the champion and of the challenger: one that hangs holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.models.zoo import ImageModel
from raypipe.registry import packing
from raypipe.registry.package import Package, Reference
from raypipe.serve.online import batching
from raypipe.serve.online.batching import (
    MOST_SHADOW_BYTES,
    MOST_SHADOWS,
    SHADOW_BATCH,
    Batcher,
    Outcome,
)
from raypipe.serve.online.models import Served
from tests.conftest import encode, striped

from .conftest import CFG, CLASSES

IMAGE = encode(striped(1, "warm"))


class Waits(Package):
    """A package that predicts when it is told to."""

    go: threading.Event
    batches: list[int]

    def predict_pixels(self, pixels_NHWC: np.ndarray) -> Any:
        self.batches.append(len(pixels_NHWC))
        assert self.go.wait(30)
        return super().predict_pixels(pixels_NHWC)


@dataclass
class Two:
    """A champion, and a challenger that waits; both are asked as models are."""

    champion: Served
    challenger: Served

    def of(self, role: str) -> Served:
        return self.champion if role == "champion" else self.challenger


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = Reference(np.zeros((4, 64)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    model = ImageModel(CFG, len(CLASSES)).eval()
    return packing.build(tmp_path_factory.mktemp("lanes"), model, CFG, CLASSES, reference, {})


@pytest.fixture
def two(folder: Path) -> Iterator[Two]:
    waits = Waits(folder)
    waits.go, waits.batches = threading.Event(), []
    yield Two(Served("cells/1", Package(folder)), Served("cells/2", waits))
    waits.go.set()


@pytest.fixture
def batcher(two: Two) -> Iterator[Batcher]:
    models: Any = two
    made = Batcher(models, batching.off(), 1, 10**6, challenged=True)
    yield made
    two.challenger.package.go.set()  # type: ignore[attr-defined]
    made.close()


def answered(batcher: Batcher, role: Any, seconds: float = 10) -> Outcome:
    async def ask() -> Outcome:
        return await asyncio.wait_for(
            batcher.submit(role, IMAGE, asyncio.get_running_loop()), seconds
        )

    return asyncio.run(ask())


@pytest.mark.parametrize("line", ["challenger", "shadow"])
def test_a_challenger_that_hangs_keeps_no_thread_of_the_champion(
    batcher: Batcher, two: Two, line: str
) -> None:
    answered(batcher, "champion")
    if line == "shadow":
        batcher.shadow(IMAGE, lambda outcome: None)
    with pytest.raises(asyncio.TimeoutError):
        answered(batcher, "challenger", 0.3)
    assert batcher.hangs(0.2) and not batcher.hangs(60)
    for _ in range(20):
        assert answered(batcher, "champion").version == "cells/1"
    assert batcher.alive()
    # It was only slow: from then on it answers again.
    two.challenger.package.go.set()  # type: ignore[attr-defined]
    assert answered(batcher, "challenger").version == "cells/2" and not batcher.hangs(0.2)


def test_shadows_wait_for_a_free_thread_and_the_oldest_are_dropped(
    batcher: Batcher, two: Two
) -> None:
    waits: Any = two.challenger.package
    batcher.plan = batching.on(32, 0)
    seen: list[Outcome] = []
    # The champion is at work: no shadow begins.
    two.champion, kept = Served("cells/1", waits), two.champion
    busy = threading.Thread(target=answered, args=(batcher, "champion"))
    busy.start()
    while not waits.batches:
        time.sleep(0.01)
    dropped = sum(batcher.shadow(IMAGE, seen.append) for _ in range(MOST_SHADOWS + 5))
    time.sleep(0.2)
    assert dropped == 5 and waits.batches == [1] and not seen
    waits.go.set()
    busy.join()
    two.champion = kept
    deadline = time.monotonic() + 20
    while len(seen) < MOST_SHADOWS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert max(waits.batches) == SHADOW_BATCH
    assert {outcome.version for outcome in seen} == {"cells/2"}


def test_shadows_that_wait_are_bounded_in_bytes(batcher: Batcher, two: Two) -> None:
    """256 photographs of 10 MB waited, and the container was killed for its memory."""
    waits: Any = two.challenger.package
    # The champion is at work: no shadow begins.
    two.champion = Served("cells/1", waits)
    busy = threading.Thread(target=answered, args=(batcher, "champion"))
    busy.start()
    while not waits.batches:
        time.sleep(0.01)
    large = bytes(MOST_SHADOW_BYTES // 3)
    assert sum(batcher.shadow(large, lambda outcome: None) for _ in range(5)) == 2
    # One that is larger than all of the room is not kept.
    assert batcher.shadow(bytes(MOST_SHADOW_BYTES + 1), lambda outcome: None) == 4
    waits.go.set()
    busy.join()
