"""How one global batch is divided among the ranks, and how much each rank's part counts.

Where the world size does not divide the batch, the parts differ by one image. A mean over the
ranks' mean losses would then count some images more than others; `Share.weight` corrects that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """How much one rank's part of a global batch counts.

    images: how many the rank holds. 0: it has none, and computes one image of another rank that
    counts nothing, because every rank must take every step.
    even: the mean number of images per rank.
    least: the smallest part of any rank, at least 1.
    """

    images: int
    even: float
    least: int

    @classmethod
    def whole(cls, images: int) -> Share:
        """The share of the only rank."""
        return cls(images, float(images), images)

    @property
    def weight(self) -> float:
        """Factor of this part's mean loss: the mean over the ranks is then the global batch's
        mean.
        """
        return self.images / self.even if self.even else 0.0


def deal(positions_B: np.ndarray, samples: int, rank: int, world: int) -> tuple[np.ndarray, Share]:
    """This rank's positions of a global batch, and its share.

    Positions from `samples` on fill up the last batch from the epoch's start. They go to the rank
    that reads that shard.
    """
    owner_B = positions_B % samples % world
    sizes = np.bincount(owner_B, minlength=world)
    share = Share(
        images=int(sizes[rank]),
        even=len(positions_B) / world,
        least=max(1, int(sizes.min())),
    )
    if share.images:
        return positions_B[owner_B == rank], share

    # This rank has none: it computes another rank's image, which counts nothing.
    return positions_B[:1], share
