"""EMA: an exponential moving average of the weights (Polyak and Juditsky 1992).

The average is steadier than the last step's weights. It costs one more copy of this rank's share.
It works on what a rank stores, a whole tensor or a shard, so it needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raypipe.torch_private import copy_all, lerp_all


class Average:
    """The mean of `stored()` over the steps. The model holds either the weights or their mean.

    `show` swaps the two. Without a `decay` all methods do nothing.
    """

    def __init__(self, decay: float | None, stored: Callable[[], list[Tensor]]) -> None:
        self.decay = decay
        self.steps = 0
        self._stored = stored
        self._shows_mean = False
        # The one of the two that is not in the model: the mean, or the weights while `_shows_mean`.
        self._other = [t.clone() for t in stored()] if decay else []

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step to the mean.

        The mean forgets faster at first. Otherwise the random start would count for
        1 / (1 - decay) steps.
        """
        if self.decay:
            self.steps += 1
            decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
            lerp_all(self._other, self._stored(), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the mean to the model's current weights."""
        if self.decay:
            copy_all(self._other, self._stored())

    @torch.no_grad()
    def show(self, mean: bool) -> None:
        """Put the mean, or the trained weights, into the model."""
        if self.decay and mean != self._shows_mean:
            in_model = self._stored()
            before = [t.clone() for t in in_model]
            copy_all(in_model, self._other)
            copy_all(self._other, before)
            self._shows_mean = mean

    @contextmanager
    def showing(self, mean: bool) -> Iterator[None]:
        """`show(mean)` for the length of a block."""
        before = self._shows_mean
        self.show(mean)
        try:
            yield
        finally:
            # After an error too: training on with the mean would change the result.
            self.show(before)
