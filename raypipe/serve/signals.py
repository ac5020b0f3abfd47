"""Ends a stream or a server on SIGTERM or SIGINT, between two steps of its work.

Not a threading.Event: a handler runs in the main thread between any two instructions. If the
thread, or an earlier handler, holds the Event's lock there, `set` waits for it for ever.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LOOK_S = 0.1


class Stop:
    """Whether to stop; a signal's handler may ask for it at any moment."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        self._asked = True

    def is_set(self) -> bool:
        return self._asked

    def wait(self, seconds: float) -> bool:
        """Sleep so long, or until it is set; returns whether it is."""
        until = time.monotonic() + seconds
        while not self._asked and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
        return self._asked


@contextmanager
def stopping() -> Iterator[Stop]:
    """What SIGTERM and the first SIGINT set; the second SIGINT interrupts.

    Only a main thread can take signals: elsewhere nothing sets it.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
