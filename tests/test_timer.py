"""Alarms within alarms: the inner one neither ends nor outlives the outer one."""
# Starts no Ray cluster.

from __future__ import annotations

import signal
import threading
from contextlib import suppress

import pytest

from raypipe.timer import OutOfTime, interrupted

SOON, LATE = 0.05, 60.0


def wait() -> None:
    """For an alarm. Raises nothing by itself, so a test without an alarm fails after a while."""
    threading.Event().wait(5)


def over(name: str) -> OutOfTime:
    return OutOfTime(f"{name} is over")


@pytest.mark.parametrize("inner_s", [LATE, SOON / 5])
def test_an_outer_alarm_comes_though_an_inner_one_is_done(inner_s: float) -> None:
    """The inner one ended the outer one's timer: search.limits were measured, and then a search
    waited for another process without an end."""
    with pytest.raises(OutOfTime, match="outer"), interrupted(SOON, lambda: over("outer")):
        with interrupted(inner_s, lambda: over("inner")):
            pass
        wait()


def test_an_outer_alarm_that_is_due_first_is_raised_past_the_inner_one() -> None:
    with pytest.raises(OutOfTime, match="outer"), interrupted(SOON, lambda: over("outer")):
        with pytest.raises(OutOfTime), interrupted(LATE, lambda: over("inner")):
            wait()
        raise AssertionError("the inner one did not have this error")


def test_after_an_inner_alarm_the_outer_one_still_counts() -> None:
    came = []
    with pytest.raises(OutOfTime, match="outer"), interrupted(4 * SOON, lambda: over("outer")):
        with pytest.raises(OutOfTime, match="inner"), interrupted(SOON, lambda: over("inner")):
            wait()
        came.append("inner")
        wait()
    assert came == ["inner"]


def as_ray_waits() -> None:
    """Ray's waits catch a KeyboardInterrupt, and raise another one, which knows nothing of it."""
    with suppress(KeyboardInterrupt):
        wait()
    raise KeyboardInterrupt


def test_a_wait_of_ray_ends_like_any_other() -> None:
    with pytest.raises(OutOfTime, match="mine"), interrupted(SOON, lambda: over("mine")):
        as_ray_waits()
    with pytest.raises(OutOfTime, match="outer"), interrupted(SOON, lambda: over("outer")):
        with interrupted(LATE, lambda: over("inner")):
            as_ray_waits()
        raise AssertionError("it is the outer one's")


def test_what_an_inner_alarm_raised_is_no_ctrl_c_for_the_outer_one() -> None:
    with pytest.raises(OutOfTime, match="outer"), interrupted(4 * SOON, lambda: over("outer")):
        try:
            with interrupted(SOON, lambda: over("inner")):
                as_ray_waits()
        except OutOfTime:
            wait()


def test_a_ctrl_c_stays_one_though_the_time_is_over() -> None:
    with pytest.raises(KeyboardInterrupt, match="mine"), interrupted(SOON, lambda: over("time")):
        try:
            wait()
        finally:
            raise KeyboardInterrupt("mine")
    with pytest.raises(KeyboardInterrupt, match="mine"), interrupted(LATE, lambda: over("time")):
        raise KeyboardInterrupt("mine")
    with pytest.raises(KeyboardInterrupt, match="mine"), interrupted(SOON, lambda: over("time")):
        try:
            raise KeyboardInterrupt("mine")
        finally:
            as_ray_waits()


def test_an_alarm_that_was_ended_lets_what_is_within_go_on() -> None:
    with interrupted(LATE, lambda: over("outer")), interrupted(SOON, lambda: over("mine")) as alarm:
        alarm.end()
        threading.Event().wait(2 * SOON)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > SOON, "the outer one's"


def test_the_timer_of_somebody_else_goes_on_afterwards() -> None:
    """pytest has one for each test, with a handler of its own."""
    came: list[int] = []
    mine = signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
    theirs_s = signal.setitimer(signal.ITIMER_REAL, SOON)[0]
    try:
        with interrupted(LATE, lambda: over("ours")):
            threading.Event().wait(2 * SOON)
            assert not came
        threading.Event().wait(SOON)
        assert came == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, mine)
        signal.setitimer(signal.ITIMER_REAL, theirs_s)
