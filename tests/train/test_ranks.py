"""The tests' own ranks: what hangs says where, and what fails says why."""

from __future__ import annotations

import time
from typing import Any

import pytest

from . import ranks


def sleeps(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 had enough")


def test_ranks_that_hang_are_stopped_and_show_where() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)2 ranks did not end in .*rank 1\n.*in sleeps"):
        ranks.start(sleeps, (), 2, limit_s=3)


class Stuck:
    """Reading it back never ends, so the rank that is given it never comes to the meeting."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Stuck.times += 1
        return time.sleep, (600,)


def test_ranks_that_never_meet_are_started_three_times_and_then_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "MEETING_S", 0.5)
    with pytest.raises(TimeoutError, match=r"2 ranks did not meet in .*\nrank 0\nnever began"):
        ranks.start(fails, (Stuck(),), 2)
    assert Stuck.times == 3 * 2  # once a rank


def test_what_a_rank_raises_is_raised() -> None:
    with pytest.raises(Exception, match="rank 1 had enough"):
        ranks.start(fails, (), 2)
