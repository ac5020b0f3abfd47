"""Interrupt what cannot look at a clock, as Ctrl-C would; only the main thread can be."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raypipe.errors import RaypipeError


class OutOfTime(RaypipeError):
    """What was interrupted had no more time."""


class _TimeIsOver(BaseException):
    """Not an Exception: who turns any error into a message of his own would turn this one, too."""


@contextmanager
def interrupted(after_s: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in what is within, after so many seconds; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if after_s <= 0:
        raise error()

    def over(number: int, frame: Any) -> None:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    except _TimeIsOver:
        raise error() from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
