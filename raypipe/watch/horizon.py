"""A false-alarm rate for a year of nights, and p-values small enough to keep it.

A user wants "at most 3 % chance of a false alarm in 365 nights". Each night tests at an equal share
of that, 8.2e-5. By the union bound the chance of any false alarm in 365 checks in a row is at most
the sum of the shares. What this asks of a night, and what it does not:

- Each night's p-value is valid on its own: P(p <= a) <= a over the draw of reference and window.
  A permutation p-value counts the reference's own sampling error, which all nights share.
- Nothing is asked of the nights together. They may depend in any way: the same modules photographed
  on many nights, an unlucky reference. An e-process or CUSUM needs tonight's distribution given the
  past; with AR(1) nights it alarmed in nearly every year, where 3 % were asked for
  (benchmarks/results/2026-11-25-horizon.md).

Covered: the rows of one window are exchangeable with the reference's rows, or whole groups are
(`watch.group`). Windows of different nights may share images. A small drift that lasts is not seen
by one night of 50 images at 8.2e-5: where images of several nights are independent draws, they are
tested together (spans.py).

Not covered: nights whose images share weather or light, unless the reference has many such nights;
then single rows are no independent draws. And a season that the reference has not seen: that is
drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import DataError


@dataclass(frozen=True)
class Horizon:
    """The promise of WatchHorizon: in any `checks` checks in a row, levels sum to `budget` at
    most."""

    checks: int
    budget: float

    def __post_init__(self) -> None:
        if self.checks < 1 or not 0 < self.budget < 1:
            raise DataError(
                "A horizon has no such size",
                got=(self.checks, self.budget),
                rule="checks is at least 1, and budget between 0 and 1",
            )

    def level(self, history: Sequence[float] = ()) -> float:
        """The level of the next check: its tests, corrected for their number, alarm below it.

        history: the levels of earlier checks, oldest first; of one that did not run, 0. After
        larger levels (the settings were changed) this is less than an equal share, and 0 where
        nothing is left: the check may look, but not alarm. DataError for a level outside 0 to 1.
        """
        if not all(0 <= spent <= 1 for spent in history):
            raise DataError("The history holds a level outside 0 to 1", got=list(history)[-5:])
        share = self.budget / self.checks
        # Of this check's horizon; of a horizon of one check, none.
        recent = list(history)[max(0, len(history) - self.checks + 1) :]
        left = self.budget - math.fsum(recent)
        # Equal shares sum up to the budget but for rounding.
        return share if left > share * (1 - 1e-9) else max(0.0, left)
