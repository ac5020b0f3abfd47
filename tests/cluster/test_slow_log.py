"""A dashboard that sends a job's log slowly, after the job has ended, or cuts it off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from raypipe.cluster import jobs
from raypipe.cluster.jobs import Jobs, JobState, Lost


class Slow(Jobs):
    """Has one job that has ended; its log comes a line at a time.

    stays_open: the connection ends with nothing. whole: lines of the log in one piece.
    """

    def __init__(self, lines: int, stays_open: bool, whole: int) -> None:
        self.address, self._patience_s = "http://head:8265", 1.0
        self.lines, self.stays_open = lines, stays_open
        text = "".join(f"{number}\n" for number in range(whole))
        self._client = SimpleNamespace(get_job_logs=lambda job: text)

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
    slow = Slow(12, stays_open, 12)
    assert slow.follow("raypipe-train-1", text.append, text.append).code == 0
    assert "".join(text).split() == [str(number) for number in range(12)]


def test_the_rest_of_a_log_is_read_in_one_piece_where_the_connection_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The JSON line of a verb was lost, and it was said to have failed."""
    monkeypatch.setattr(jobs, "LAST_LINES_S", 0.4)
    text: list[str] = []
    silent = Slow(1, True, 2)
    assert silent.follow("raypipe-train-1", text.append, text.append).code == 0
    assert "".join(text) == "0\n1\n"


class Cut(Jobs):
    """Has one job that ends after some looks. Its log is cut off each time after a line of three.

    whole: what the dashboard gives in one piece; None if it does not.
    """

    def __init__(self, whole: str | None) -> None:
        self.address, self._patience_s = "http://head:8265", 1.0
        self.looks, self.tries, self.whole = 0, 0, whole
        self._client = SimpleNamespace(get_job_logs=self.logs)

    def state(self, job: str) -> JobState:
        self.looks += 1
        status = "SUCCEEDED" if self.looks > 8 else "RUNNING"
        return JobState(job, status, "train", "", None, 0.0, 0, "")

    async def _tail(self, job: str, take: Callable[[str], None]) -> None:
        self.tries += 1
        take("0\n")
        raise Lost("403, Invalid response status")

    def logs(self, job: str) -> str:
        if self.whole is None:
            raise RuntimeError("its node has gone")
        return self.whole


@pytest.mark.parametrize("whole", ["0\n1\n2\n", None])
def test_a_log_that_is_cut_off_is_said_once_and_arrives_in_the_end(
    monkeypatch: pytest.MonkeyPatch, whole: str | None
) -> None:
    """Behind a proxy without WebSockets it was asked for without a pause, and never shown."""
    pauses: list[float] = []
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=pauses.append))
    text: list[str] = []
    said: list[str] = []
    cut = Cut(whole)
    assert cut.follow("raypipe-train-1", text.append, said.append).code == 0
    assert "".join(text) == (whole or "0\n")
    assert len(pauses) == cut.tries - 1 > 0 and set(pauses) == {jobs.POLL_S}
    assert sum("was cut off: 403" in line for line in said) == 1
    rest = [line for line in said if "does not arrive: its node has gone" in line]
    assert len(rest) == (whole is None) and len(said) == 1 + len(rest)
