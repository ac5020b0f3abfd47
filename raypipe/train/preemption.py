"""Notice to leave: a pre-empted node, a job that is stopped. All ranks must hear it in the same step, to save the same step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

EVERY_S = 1.0


class Notice:
    """Called by every rank after each step: has any of them been told to leave? Once it says so, it goes on saying so.

    Ranks ask each other about once a second, by one message of two numbers: whether they were told, and how long a step takes,
    from which all of them count alike after how many steps to ask again.
    """

    def __init__(
        self, told: Callable[[], bool], device: torch.device, world: int, every_s: float = EVERY_S
    ) -> None:
        self._told, self._device, self._world, self._every_s = told, device, world, every_s
        self._asked_at, self._steps, self._ask_after, self._heard = time.perf_counter(), 0, 1, False

    def __call__(self) -> bool:
        self._steps += 1
        if self._world == 1:  # to ask oneself costs nothing
            self._heard = self._heard or self._told()
        elif self._steps >= self._ask_after and not self._heard:
            now = time.perf_counter()
            both = torch.tensor(
                [self._told(), (now - self._asked_at) / self._steps],
                dtype=torch.float64,
                device=self._device,
            )
            dist.all_reduce(both, dist.ReduceOp.MAX)
            heard, step_s = both.tolist()
            wanted = int(self._every_s / max(step_s, 1e-6))
            self._heard, self._ask_after = (
                heard > 0,
                min(2 * self._ask_after, max(1, wanted)),
            )  # a first step may be too short
            self._asked_at, self._steps = now, 0
        return self._heard


@contextmanager
def on_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Instead of dying of SIGTERM, call `tell`, while the block runs. Only a main thread can; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: Any) -> None:
        tell()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
