"""One line of the leaderboard, while the search runs and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Standing:
    """A trial as it stands while the search runs, or after it."""

    name: str

    changes: dict[str, Any]

    best: float
    """The best value of the metric so far; with train.result=last, the last one."""

    epochs: int

    state: str
    """running, waiting, full (it ran all its epochs), fitted (at once), stopped or failed.

    While the search runs, full is also a trial that its own rule (train.stopping) ended."""

    compared: tuple[int, float] | None = None
    """(N, its best of the first N epochs), if trials ended after different numbers of epochs."""

    seconds: float = 0.0
    """For which it held devices."""

    device_s: float = 0.0
    """Seconds times devices."""


@dataclass(frozen=True)
class Reached:
    """The best value of a search so far, and when it was reached.

    seconds: since the first answer began, or the first trial; what came before a kill counts. by:
    the trial's name, or what else made the model. epochs: that it had trained for; 0: it has none.
    """

    seconds: float
    value: float
    by: str
    epochs: int = 0
