"""Interrupt what cannot look at a clock, as Ctrl-C would; only the main thread can be."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raypipe.errors import RaypipeError

_LONGEST_S = 1e9  # the system's timer refuses much more, and nobody waits for thirty years


class OutOfTime(RaypipeError):
    """What was interrupted had no more time."""


class _TimeIsOver(BaseException):
    """Not an Exception: who turns any error into a message of his own would turn this one, too."""


@contextmanager
def interrupted(after_s: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in what is within, after so many seconds; only in the main thread.

    A Ctrl-C that came first stays one, though its cleaning up was still under way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if after_s <= 0:
        raise error()
    is_within = True

    def over(number: int, frame: Any) -> None:
        # An alarm may come when all is done, and the timer not stopped yet.
        if is_within:
            raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, min(after_s, _LONGEST_S))
    try:
        try:
            yield
        finally:
            is_within = False
    except _TimeIsOver as e:
        asked = _asked_to_stop(e)
        raise asked or error() from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # None: a handler that is not Python's cannot be set again.
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _asked_to_stop(error: BaseException) -> BaseException | None:
    """The Ctrl-C, or the exit, during whose handling this error came."""
    earlier = error.__context__
    while earlier is not None and not isinstance(earlier, (KeyboardInterrupt, SystemExit)):
        earlier = earlier.__context__
    return earlier
