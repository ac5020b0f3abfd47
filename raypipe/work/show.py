"""What the work of a verb tells while it goes on. cli/console.py shows it on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from raypipe.search.trials.standing import Standing
from raypipe.train.loop import LoopState
from raypipe.train.measure.meter import Position


class Training(Protocol):
    """One training run."""

    def epoch(self, metrics: Mapping[str, float], state: LoopState) -> None: ...

    def step(self, at: Position) -> None: ...


class Show(Protocol):
    """Messages and progress of one verb."""

    began: float
    """`time.monotonic` when the command's process or the call began."""

    def say(self, text: str) -> None:
        """A line about what is going on."""

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Names and values, a line each."""

    def progress(
        self, label: str, unit: str = "images"
    ) -> AbstractContextManager[Callable[..., None]]:
        """A function that takes (done, total)."""

    def training(
        self, epochs: int, metric: str, within_s: float | None = None
    ) -> AbstractContextManager[Training]:
        """epochs: at most. within_s: the time in which it ends (train.anneal_s)."""

    def searching(
        self, metric: str
    ) -> AbstractContextManager[Callable[[int, int, Sequence[Standing]], None]]:
        """A function that takes (trials that ended, trials in total, the standings)."""
