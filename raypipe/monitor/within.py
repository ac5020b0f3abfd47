"""Work that may hang, for a caller that must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def within(seconds: float, work: Callable[[], Any]) -> None:
    """Run `work`, which takes no longer than `seconds` of this thread. Raises what it raises.

    Raises TimeoutError if it has not ended by then; it goes on, and nobody waits for it. A timeout
    of a socket begins anew with each byte: a server that drips would hold us for ever.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True, name="within")
    thread.start()
    thread.join(max(0.0, seconds))
    if thread.is_alive():
        raise TimeoutError("it does not answer in time")
    if raised:
        raise raised[0]
