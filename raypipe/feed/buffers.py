"""Memory that is used again once nobody looks at it any more.

The system clears fresh pages before it gives them out, and allocators hand large blocks back as soon as another thread frees
them: for batches (9.6 MB for 64 images of 224 px) and row groups (5 MB) that took 7 % of the time that decoding takes, and what
was kept in between doubled the peak.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if (
    TYPE_CHECKING
):  # tasks that read and decode need no tensor, and start three seconds earlier without
    from torch import Tensor

FREE = 2  # references to a buffer that nobody uses: ours, and the argument of getrefcount
STEP = (
    2**20
)  # sizes are rounded up to this, so that row groups of nearly the same size can follow each other


class Buffers:
    """Lends bytes. A buffer is lent again when everything made from it is gone: arrays, their views, tensors, memoryviews."""

    def __init__(self, most: int = 16) -> None:
        """More than `most` at a time are lent, too, but not kept."""
        self._most, self._held = most, list[np.ndarray]()
        self._looking = threading.Lock()  # two readers must not find the same buffer free

    def take(self, size: int) -> np.ndarray:
        """uint8 of this size, with any content."""
        with self._looking:
            for i in range(len(self._held)):
                if len(self._held[i]) >= size and sys.getrefcount(self._held[i]) == FREE:
                    return self._held[i][
                        :size
                    ]  # a view: it and whatever is made from it refer to the buffer
            fresh = np.empty(-(-size // STEP) * STEP, np.uint8)
            if len(self._held) < self._most:
                self._held.append(fresh)
            return fresh[:size]

    def tensor(self, shape: Sequence[int], pinned_memory: bool = False) -> Tensor:
        """uint8 of this shape. Pinned memory is left to torch, which also waits for copies under way to the device."""
        import torch

        if pinned_memory:
            return torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self.take(math.prod(shape)).reshape(tuple(shape)))
