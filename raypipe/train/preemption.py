"""Notice to leave: a node is preempted, or the job is stopped.

All ranks must leave in the same step. A rank that left alone would leave the others waiting in
their next all-reduce, and all ranks have to save the same step. So the ranks agree, by one
all-reduce (maximum) of two numbers about once a second:

1. Was any rank told to leave? If so, every rank leaves after this step.
2. How long does the slowest rank's step take? From this number all ranks compute the same count of
   steps until the next all-reduce. Clocks are never compared, because they differ between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

EVERY_S = 1.0


class Notice:
    """Call it on every rank after each step: must all ranks leave now? Once True, it stays True.

    must_leave: was this rank told to leave? every_s: about how often the ranks ask each other.
    """

    def __init__(
        self,
        must_leave: Callable[[], bool],
        device: torch.device,
        world: int,
        every_s: float = EVERY_S,
    ) -> None:
        self._must_leave = must_leave
        self._device = device
        self._world = world
        self._every_s = every_s
        self._leaving = False
        self._asked_at = time.perf_counter()
        self._steps_since = 0
        self._ask_after = 1

    def __call__(self) -> bool:
        self._steps_since += 1
        if self._leaving:
            return True
        # A single rank asks after each step: that needs no message.
        if self._world == 1:
            self._leaving = self._must_leave()
        elif self._steps_since >= self._ask_after:
            self._ask_all_ranks()
        return self._leaving

    def _ask_all_ranks(self) -> None:
        # The mean step of this rank since the last all-reduce.
        now = time.perf_counter()
        my_step_s = (now - self._asked_at) / self._steps_since
        answers = torch.tensor(
            [self._must_leave(), my_step_s], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(answers, dist.ReduceOp.MAX)
        anyone, step_s = answers.tolist()
        self._leaving = anyone > 0
        # At most twice as many steps as before: the first step may be unusually short.
        steps = max(1, int(self._every_s / max(step_s, 1e-6)))
        self._ask_after = min(2 * self._ask_after, steps)
        self._asked_at = now
        self._steps_since = 0
