"""What a request may cost: its answer when it costs too much, the rate of a client, and the room
for running requests."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MOST_CLIENTS = 10_000  # addresses that the rate limit remembers


class Refused(Exception):
    """A request that gets an error: an HTTP status, and the four parts of an error's body."""

    def __init__(
        self,
        status: int,
        what: str,
        *,
        got: Any = None,
        rule: str = "",
        fix: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.parts = {"what": what, "got": got, "rule": rule, "fix": fix}
        self.headers = headers or {}


class Rates:
    """Token buckets, one for each client address: `rate` requests a second, bursts of twice that.

    It remembers the MOST_CLIENTS addresses that asked last, so memory is bounded whoever asks.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate) if rate else 0.0
        self._clock = clock
        # By address: requests that may come at once, and when that was counted.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count one request. Raises Refused (429) for a client that sends too many."""
        if self._rate is None:
            return
        # The bucket fills with time, up to a burst.
        now = self._clock()
        left, then = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        # The address that asked longest ago is forgotten.
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = (1 - left) / self._rate
            raise Refused(
                429,
                "Too many requests from this address",
                rule=f"{self._rate:g} requests a second",
                fix=f"Wait {wait_s:.2g} s",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )


@dataclass
class Room:
    """The running requests, and the bytes that are set aside for their bodies.

    told: called with the number of requests when it changes.
    """

    most: int
    most_bytes: int
    told: Callable[[float], None] = lambda requests: None
    requests: int = field(default=0, init=False)
    bytes: int = field(default=0, init=False)
    closed: bool = field(default=False, init=False)

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Room for one request with a body of at most `size` bytes. Raises Refused (503)."""
        if self.closed:
            raise Refused(503, "The server is stopping", headers={"Retry-After": "5"})
        if self.requests >= self.most or self.bytes + size > self.most_bytes:
            raise Refused(
                503,
                "The server is busy",
                got=f"{self.requests} requests of {self.bytes:,} bytes",
                rule=f"It holds {self.most} requests and {self.most_bytes:,} bytes at a time",
                fix="Send it again in a second",
                headers={"Retry-After": "1"},
            )
        self.requests += 1
        self.bytes += size
        self.told(self.requests)
        try:
            yield
        finally:
            self.requests -= 1
            self.bytes -= size
            self.told(self.requests)
