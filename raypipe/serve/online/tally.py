"""Counts of answered requests, an interval and a model version each, as records of the stream
RaypipeServing_CL (raypipe/monitor/).

A request costs a lock and two numbers. A thread makes the records; the process of `raypipe serve`
sends them: a replica needs no login. A replica that is killed loses the counts of one interval.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypipe.monitor import streams
from raypipe.monitor.recorder import Keeping, Recorder

EVERY_S = 30.0
MOST_SAMPLES = 4096  # latencies of an interval that percentiles are taken from


@dataclass
class _Of:
    """One model version in one interval. samples: seconds of some requests, drawn at random."""

    statuses: Counter[int] = field(default_factory=Counter)
    images: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    samples: list[float] = field(default_factory=list)


class Tally:
    """The counts of one replica. All methods may be called from any thread."""

    def __init__(self, keepings: Sequence[Keeping], replica: str, every_s: float = EVERY_S) -> None:
        self._recorders = [Recorder(keeping) for keeping in keepings]
        self._replica = replica
        self._every_s = every_s
        self._turn = threading.Lock()
        self._of: dict[str, _Of] = {}
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tally", daemon=True)
        if self._recorders:
            self._thread.start()

    def answered(self, model: str, status: int) -> None:
        """A request to predict has its answer. model: NAME/N of the champion."""
        if self._recorders:
            with self._turn:
                self._of.setdefault(model, _Of()).statuses[status] += 1

    def predicted(self, model: str, seconds: float) -> None:
        """An image was predicted, in so many seconds from the request's arrival."""
        if not self._recorders:
            return
        with self._turn:
            of = self._of.setdefault(model, _Of())
            of.images += 1
            of.seconds += seconds
            of.slowest = max(of.slowest, seconds)
            if len(of.samples) < MOST_SAMPLES:
                of.samples.append(seconds)
            elif (place := random.randrange(of.images)) < MOST_SAMPLES:
                of.samples[place] = seconds

    def close(self) -> None:
        """Keep what was counted since the last record."""
        self._stop.set()
        if not self._recorders:
            return
        self._thread.join(timeout=10)
        for recorder in self._recorders:
            recorder.close()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._keep()
            for recorder in self._recorders:
                # So that the process that sends may take it.
                recorder.close()
        self._keep()

    def _keep(self) -> None:
        with self._turn:
            counted, self._of = self._of, {}
            seconds, self._since = time.monotonic() - self._since, time.monotonic()
        for model, of in sorted(counted.items()):
            values = _record(of) | {"Model": model, "Replica": self._replica, "Seconds": seconds}
            for recorder in self._recorders:
                recorder.note(streams.SERVING, values)


def _record(of: _Of) -> dict[str, Any]:
    """The columns of one version's counts."""
    errors = sum(n for status, n in of.statuses.items() if status >= 500)
    refused = sum(n for status, n in of.statuses.items() if 400 <= status < 500)
    values: dict[str, Any] = {
        "Requests": of.statuses.total(),
        "Errors": errors,
        "Refused": refused,
        "Images": of.images,
        "Statuses": {str(status): n for status, n in sorted(of.statuses.items())},
    }
    if of.images:
        values["LatencyMeanMs"] = 1000 * of.seconds / of.images
        values["LatencyMaxMs"] = 1000 * of.slowest
        ordered = sorted(of.samples)
        for share in (50, 95, 99):
            at = min(len(ordered) - 1, share * len(ordered) // 100)
            values[f"LatencyP{share}Ms"] = 1000 * ordered[at]
    return values
