"""A dashboard that sends a job's log slowly, after the job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from raypipe.cluster import jobs
from raypipe.cluster.jobs import Jobs, JobState


class Slow(Jobs):
    """Has one job that has ended; its log comes a line at a time."""

    def __init__(self, lines: int, stays_open: bool) -> None:
        self.address, self._patience_s = "http://head:8265", 1.0
        self.lines, self.stays_open = lines, stays_open

    def state(self, job: str) -> JobState:
        return JobState(job, "SUCCEEDED", "train", "", None, 0.0, 0, "")

    async def _tail(self, job: str, take: Callable[[str], None]) -> None:
        for number in range(self.lines):
            await asyncio.sleep(0.1)
            take(f"{number}\n")
        while self.stays_open:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("stays_open", [False, True])
def test_a_log_is_read_for_as_long_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, stays_open: bool
) -> None:
    """After 10 s the rest was left out: the JSON line of a verb, and why it failed."""
    monkeypatch.setattr(jobs, "LAST_LINES_S", 0.4)
    text: list[str] = []
    slow = Slow(12, stays_open)
    assert slow.follow("raypipe-train-1", text.append, text.append).code == 0
    assert "".join(text).split() == [str(number) for number in range(12)]
