"""Champion and challenger on the same rows of one slice, and small slices judged together.

A slice is one source of images. Results come in two kinds, and `unit` tells them apart:

  unit is None    labels and tags: each row is right or wrong, and figures are shares of rows
  unit is a float numbers: each row has an absolute error, and `unit` is what errors are counted in
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.report.formats import digits_of
from raypipe.watch import safety, superiority

Rows = Sequence[bool] | Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """Champion and challenger on the same rows of one slice.

    The names of the fields are columns of stored decisions and part of their key.
    """

    slice: str
    images: int
    champion: float  # share of images that it has right, or its mean absolute error
    challenger: float
    won: int  # images only the challenger has right, or rows on which its error is smaller
    lost: int  # the same for the champion
    p_value: float  # one-sided, of 'the challenger is no better'
    is_new: bool  # the champion was not trained on this slice
    unit: float | None = None
    spread: float = 0.0  # with a unit: the standard deviation of the gains

    @property
    def difference(self) -> float:
        """How much better the challenger is: a share of images, or units less error."""
        if self.unit is None:
            return (self.won - self.lost) / self.images
        return (self.champion - self.challenger) / self.unit

    @property
    def standard_error(self) -> float:
        """The standard error of the difference.

        For shares half a row is added on each side, which keeps it above 0 where the models never
        differ.
        """
        if self.unit is not None:
            return self.spread / self.unit / math.sqrt(self.images)
        rows = self.images + 1
        won, lost = (self.won + 0.5) / rows, (self.lost + 0.5) / rows
        return math.sqrt((won + lost - (won - lost) ** 2) / rows)

    def p_worse(self, tolerance: float) -> float:
        """The p-value of 'worse by `tolerance` or more': small means safe.

        NaN where a model predicts numbers that are not finite.
        """
        if self.unit is None:
            return safety.tango_p(self.won, self.lost, self.images, tolerance)
        return safety.student_p(self.difference, self.standard_error, self.images, tolerance)

    @property
    def p_harmed(self) -> float:
        """The p-value of 'the challenger is no worse'."""
        if self.unit is None:
            return superiority.mcnemar(self.lost, self.won)
        return safety.student_p_harmed(self.difference, self.standard_error, self.images)

    def at_worst(self, level: float) -> float:
        """The lower confidence bound of the difference at this level."""
        if self.unit is None:
            return safety.tango_bound(self.won, self.lost, self.images, level)
        return safety.student_bound(self.difference, self.standard_error, self.images, level)

    @property
    def change(self) -> str:
        """The difference in words."""
        if self.unit is None:
            return f"{points(self.difference)} on {self.slice}"
        return f"error {self.champion:.3g} to {self.challenger:.3g} on {self.slice}"

    def amount(self, difference: float) -> str:
        """Any difference in the slice's unit, in words."""
        if self.unit is None:
            return points(difference)
        return f"{-difference * self.unit:+.3g} error"


def compare(
    name: str, champion: Rows, challenger: Rows, is_new: bool, unit: float | None = None
) -> Comparison:
    """Compare paired rows. Row i of both models is the same image.

    Without a unit a row is True where the model is right. With a unit it is an absolute error.
    Raises ValueError if the rows are not paired, or if there are none.
    """
    kind = bool if unit is None else float
    champion_N, challenger_N = np.asarray(champion, kind), np.asarray(challenger, kind)
    if champion_N.shape != challenger_N.shape or champion_N.size == 0:
        shapes = f"{champion_N.shape} and {challenger_N.shape}"
        raise ValueError(f"paired rows of equal length and at least one, got {shapes}")

    # A gain is positive where the challenger is better: errors count the other way round.
    gains_N = challenger_N.astype(float) - champion_N
    if unit is not None:
        gains_N = champion_N - challenger_N
    won, lost = int((gains_N > 0).sum()), int((gains_N < 0).sum())

    # Hits and errors have tests of their own.
    spread = 0.0
    if unit is None:
        p_value = superiority.mcnemar(won, lost)
    else:
        p_value = superiority.sign_flips(gains_N)
        if gains_N.size > 1:
            spread = float(gains_N.std(ddof=1))
    return Comparison(
        slice=name,
        images=champion_N.size,
        champion=float(champion_N.mean()),
        challenger=float(challenger_N.mean()),
        won=won,
        lost=lost,
        p_value=p_value,
        is_new=is_new,
        unit=unit,
        spread=spread,
    )


def pooled(slices: Sequence[Comparison], least_rows: int) -> list[Comparison]:
    """The slices that safety is judged on: large ones alone, small ones together.

    A small slice alone would fail its test for lack of rows and block every challenger. If all
    small ones together are still too few, the smallest large one joins them.
    """
    by_size = sorted(slices, key=lambda s: (s.images, s.slice))
    small = [s for s in by_size if s.images < least_rows]
    large = by_size[len(small) :]
    if not small:
        return large
    # Too few even together: the smallest of the large ones lends its rows.
    if large and sum(s.images for s in small) < least_rows:
        small.append(large.pop(0))
    return [*large, merged(small)]


def merged(slices: Sequence[Comparison]) -> Comparison:
    """One comparison over the rows of several slices.

    Its p-value is 1: superiority is not tested on it.
    """
    if len(slices) == 1:
        return slices[0]
    # Means of the slices, weighted by their rows, are the means of all rows.
    rows = sum(s.images for s in slices)
    champion = sum(s.images * s.champion for s in slices) / rows
    challenger = sum(s.images * s.challenger for s in slices) / rows
    unit = slices[0].unit
    return Comparison(
        slice=_joined([s.slice for s in slices]),
        images=rows,
        champion=champion,
        challenger=challenger,
        won=sum(s.won for s in slices),
        lost=sum(s.lost for s in slices),
        p_value=1.0,
        is_new=all(s.is_new for s in slices),
        unit=unit,
        spread=0.0 if unit is None else _merged_spread(slices, champion - challenger, rows),
    )


def _merged_spread(slices: Sequence[Comparison], gain: float, rows: int) -> float:
    """The standard deviation of the gains of all rows, from those of the slices."""
    squares = 0.0  # deviations from the common mean
    for s in slices:
        inside = (s.images - 1) * s.spread**2
        between = s.images * (s.champion - s.challenger - gain) ** 2
        squares += inside + between
    return math.sqrt(squares / (rows - 1))


def _joined(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return " + ".join(names)
    return f"{names[0]} + {names[1]} + {len(names) - 2} more small slices"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * share:+.{digits_of(share)}f} points"
