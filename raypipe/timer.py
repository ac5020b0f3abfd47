"""Interrupt what cannot look at a clock, as Ctrl-C would; only the main thread can be.

A process has one such timer, so it is always set to the alarm that is due first. An alarm within
another one leaves the outer one as it is.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raypipe.errors import RaypipeError

_LONGEST_S = 1e9  # the system's timer refuses much more, and nobody waits for thirty years
_AT_ONCE_S = 1e-3  # a timer of 0 would be none
_OURS = "An alarm of raypipe raised it"  # a note of a KeyboardInterrupt


class OutOfTime(RaypipeError):
    """What was interrupted had no more time."""


class Alarm:
    """One call of `interrupted`. due: of `time.monotonic`."""

    def __init__(self, due: float) -> None:
        self.due = due
        self.is_running = True
        self.has_come = False

    def end(self) -> None:
        """What is within goes on, and is not interrupted any more."""
        self.is_running = False
        if self in _alarms:
            _set_timer()


class _TimeIsOver(KeyboardInterrupt):
    """Not an Exception: who turns any error into a message of his own would turn this one, too.

    A KeyboardInterrupt is the only one at which ray.get and ray.wait (2.60) stop to wait. At any
    other one they wait until their tasks have ended, and then raise a SystemError.
    """

    def __init__(self, alarm: Alarm) -> None:
        super().__init__()
        self.alarm = alarm


_alarms: list[Alarm] = []  # of the main thread, the outer one first


@contextmanager
def interrupted(after_s: float, error: Callable[[], Exception]) -> Iterator[Alarm]:
    """Raise `error()` in what is within, after so many seconds; only in the main thread.

    A Ctrl-C that came first stays one, though its cleaning up was still under way. If an outer
    `interrupted` is due first, its error is raised, past this one.
    """
    alarm = Alarm(time.monotonic() + after_s)
    if threading.current_thread() is not threading.main_thread():
        yield alarm
        return
    if after_s <= 0:
        raise error()
    depth, began = len(_alarms), time.monotonic()
    # Of somebody else, as of pytest; 0: there is none. It waits until ours are done.
    others_s = 0.0 if depth else signal.getitimer(signal.ITIMER_REAL)[0]
    before = signal.signal(signal.SIGALRM, _over)
    _alarms.append(alarm)
    _set_timer()
    try:
        try:
            yield alarm
        finally:
            alarm.is_running = False
    except KeyboardInterrupt as e:
        if not _is_of(e, alarm):
            raise
        asked = _asked_to_stop(e, alarm)
        if asked is None:
            e.add_note(_OURS)  # an outer alarm may find it, and it is no Ctrl-C
        raise asked or error() from None
    finally:
        # Not only this one: an outer alarm may have come while an inner one was being removed.
        del _alarms[depth:]
        _set_timer()
        # None: a handler that is not Python's cannot be set again.
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if others_s:
            left_s = others_s - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, _AT_ONCE_S))


def _over(number: int, frame: Any) -> None:
    """The system's timer went off: interrupt what is within the outermost alarm that is due."""
    now = time.monotonic()
    running = [alarm for alarm in _alarms if alarm.is_running]
    for alarm in running:
        if alarm.due <= now:
            alarm.end()  # an outer one may be due while this one is handled
            alarm.has_come = True
            raise _TimeIsOver(alarm)
    # What was due is done by now, or the system's clock is a little ahead of ours.
    if running:
        _set_timer()


def _set_timer() -> None:
    """To the alarm that is due first; none if none runs."""
    due = min((alarm.due for alarm in _alarms if alarm.is_running), default=None)
    left_s = 0.0
    if due is not None:
        left_s = min(max(due - time.monotonic(), _AT_ONCE_S), _LONGEST_S)
    signal.setitimer(signal.ITIMER_REAL, left_s)


def is_alarm(error: BaseException) -> bool:
    """Did an alarm raise it, and no Ctrl-C?"""
    return isinstance(error, _TimeIsOver) or _OURS in getattr(error, "__notes__", ())


def _is_of(error: KeyboardInterrupt, alarm: Alarm) -> bool:
    """Did this alarm raise it? Ray raises a new KeyboardInterrupt in place of ours."""
    if isinstance(error, _TimeIsOver):
        return error.alarm is alarm
    return alarm.has_come


def _asked_to_stop(error: KeyboardInterrupt, alarm: Alarm) -> BaseException | None:
    """The Ctrl-C, or the exit, during whose handling the alarm came, or that came after it."""
    asked: BaseException | None = None
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, _TimeIsOver):
            if earlier.alarm is alarm:
                return error  # a Ctrl-C, while the end of the time was handled
        elif isinstance(earlier, (KeyboardInterrupt, SystemExit)):
            asked = asked or (None if is_alarm(earlier) else earlier)
        earlier = earlier.__context__
    return asked
