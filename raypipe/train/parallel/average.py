"""EMA of the weights (Polyak and Juditsky 1992): steadier than the last step's, for one copy more of this rank's share.

It works on what a rank stores, whole or a shard, so it costs no communication under any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Average:
    """The exponential mean of `stored()`, and which of the two the model shows. Without a `decay` it does nothing."""

    def __init__(self, decay: float | None, stored: Callable[[], list[Tensor]]) -> None:
        self.decay, self.steps, self._stored, self._shown = decay, 0, stored, False
        self._other = (
            [t.clone() for t in stored()] if decay else []
        )  # whichever of mean and weights is not in the model

    @torch.no_grad()
    def update(self) -> None:
        """After each step. Early means forget faster, or the random start would weigh in for 1 / (1 - decay) steps."""
        if self.decay:
            self.steps += 1
            decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
            torch._foreach_lerp_(self._other, self._stored(), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Take the model's weights of now for the mean."""
        if self.decay:
            torch._foreach_copy_(self._other, self._stored())

    @torch.no_grad()
    def show(self, mean: bool) -> None:
        """Put the mean, or the trained weights, into the model."""
        if self.decay and mean != self._shown:
            here = self._stored()
            kept = [t.clone() for t in here]
            torch._foreach_copy_(here, self._other)
            torch._foreach_copy_(self._other, kept)
            self._shown = mean

    @contextmanager
    def showing(self, mean: bool) -> Iterator[None]:
        before = self._shown
        self.show(mean)
        yield
        self.show(before)
