"""Images that belong together, as the cells of one module: what changes places in a permutation.

Rows of one group are alike, so they are no independent draws: two blocks of neighbouring cells
differ without drift, and a test that moves single rows calls it drift. So whole groups move. They
can change places only if they are about of one size: the larger ones are cut.

Legend: N rows of the reference, M of the batch, L of both, U units (groups, or rows without one),
P permutations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MANY = 10**12  # more regroupings than anybody draws


def codes(names: Sequence[str]) -> np.ndarray:
    """A number for each group. A row with a blank name is a group of its own."""
    # Not by an array of text: that drops a NUL at the end, and one long name makes all as long.
    place: dict[str | int, int] = {}
    return np.array([place.setdefault(name or row, len(place)) for row, name in enumerate(names)])


def median_size(group_N: np.ndarray) -> int:
    """Rows of the group in the middle, of all groups by size."""
    return max(1, int(np.median(np.unique(group_N, return_counts=True)[1])))


def at_most(group_N: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Places of at most `size` rows of each group, drawn at random, sorted."""
    mixed = rng.permutation(len(group_N))
    order = mixed[np.argsort(group_N[mixed], kind="stable")]
    sorted_N = group_N[order]
    starts = np.searchsorted(sorted_N, sorted_N)
    return np.sort(order[np.arange(len(order)) - starts < size])


def apart(order: Iterable[int], *names: Sequence[str]) -> list[int]:
    """Rows of which no two have a name in common, sorted: in this order, each that shares none with
    those before it.

    names: for each way in which rows belong together, the name of each row. A blank one is
    nobody's.
    """
    taken: list[set[str]] = [set() for _ in names]
    kept = []
    for row in order:
        mine = [of_rows[row] for of_rows in names]
        if any(name in known for name, known in zip(mine, taken, strict=True)):
            continue
        kept.append(row)
        for name, known in zip(mine, taken, strict=True):
            if name:
                known.add(name)
    return sorted(kept)


def whole(group_N: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Places of the rows of whole groups, drawn at random, sorted: at most `most` rows, but two
    groups at least."""
    drawn_U, sizes_U = np.unique(group_N, return_counts=True)
    order_U = rng.permutation(len(drawn_U))
    fits_U = sizes_U[order_U].cumsum() <= most
    fits_U[:2] = True
    return np.flatnonzero(np.isin(group_N, drawn_U[order_U[fits_U]]))


@dataclass(frozen=True)
class Units:
    """unit_L: the number of each row's unit, 0 to U - 1; those of the reference's `rows` rows come
    first. A group that both sides have is two units."""

    unit_L: np.ndarray
    rows: int

    @classmethod
    def of(cls, group_N: np.ndarray, group_M: np.ndarray) -> Units:
        """Of the groups of both sides."""
        units_N = np.unique(group_N, return_inverse=True)[1]
        units_M = np.unique(group_M, return_inverse=True)[1] + units_N.max() + 1
        return cls(np.concatenate([units_N, units_M]), len(group_N))

    @property
    def counts(self) -> tuple[int, int]:
        """(of the reference, of the batch)."""
        ours = int(self.unit_L[: self.rows].max()) + 1
        return ours, int(self.unit_L.max()) + 1 - ours

    @property
    def ways(self) -> float:
        """How many ways there are to call as many units the batch; one of them is ours."""
        ours, theirs = self.counts
        # Exact numbers of this size do not fit into a float.
        return float(min(math.comb(ours + theirs, theirs), MANY))

    def regroupings(self, count: int, seed: int) -> np.ndarray:
        """in_batch_LP of `mmd.mmd`: `count` random ways to call as many units the batch."""
        ours, theirs = self.counts
        rng = np.random.default_rng(seed)
        in_batch_UP = np.zeros((ours + theirs, count), bool)
        for p in range(count):
            in_batch_UP[rng.permutation(ours + theirs)[:theirs], p] = True
        chosen_LP: np.ndarray = in_batch_UP[self.unit_L]
        return chosen_LP
