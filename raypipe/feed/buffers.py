"""Memory for batches and row groups that is used again when nothing refers to it any more.

Why: the system clears fresh pages before it hands them out, and allocators give large blocks back
as soon as another thread frees them. For batches (9.6 MB for 64 images of 224 px) and row groups
(5 MB) this took 7 % of the time of decoding, and blocks kept meanwhile doubled the peak.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

# Imported for types only: a task that reads and decodes starts three seconds earlier without torch.
if TYPE_CHECKING:
    from torch import Tensor

FREE = 2  # references to an unused buffer: the list of kept ones, and the argument of getrefcount
STEP = 2**20  # sizes are rounded up to this: row groups of nearly the same size share a buffer


class Buffers:
    """Lends memory. A buffer is free again when everything made from it is gone.

    That is every array, view, tensor and memoryview. Reference counts tell.
    """

    def __init__(self, most: int = 16) -> None:
        """most: how many buffers are kept. Further ones are lent once and then freed."""
        self._most = most
        self._held: list[np.ndarray] = []
        self._lock = threading.Lock()  # two readers must not take the same free buffer

    def take(self, size: int) -> np.ndarray:
        """A uint8 array of this size, with any content."""
        with self._lock:
            for i in range(len(self._held)):
                large_enough = len(self._held[i]) >= size
                if large_enough and sys.getrefcount(self._held[i]) == FREE:
                    # A view: it and what is made from it refer to the buffer.
                    return self._held[i][:size]

            # None is free: make one more.
            fresh = np.empty(-(-size // STEP) * STEP, np.uint8)
            if len(self._held) < self._most:
                self._held.append(fresh)
            return fresh[:size]

    def tensor(self, shape: Sequence[int], pinned_memory: bool = False) -> Tensor:
        """A uint8 tensor of this shape.

        torch manages pinned memory itself: it also waits for running copies to the device.
        """
        import torch

        shape = tuple(shape)
        if pinned_memory:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self.take(math.prod(shape)).reshape(shape))
