"""Takes records: completes them, checks them, and keeps them in the spool. It never raises.

Where the spool cannot be written (a full disk, a folder that is read-only), records wait in memory,
at most MOST_IN_MEMORY bytes of them: a process with a sender delivers them from there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from raypipe.errors import hidden, one_line
from raypipe.monitor import streams
from raypipe.monitor.spool import Dropped, Full, Spool
from raypipe.version import VERSION

log = logging.getLogger("raypipe")
MOST_IN_MEMORY = 4 * 2**20  # bytes
_REST_S = 10.0  # until a spool that failed is tried again


@dataclass(frozen=True)
class Keeping:
    """What a process needs to keep records; another one sends them."""

    folder: Path
    most_bytes: int
    run_id: str
    run_name: str
    verb: str


class Recorder:
    """Keeps the records of one process. All methods may be called from any thread."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self.spool = Spool(keeping.folder, keeping.most_bytes)
        self._process, self._pid = uuid.uuid4().hex[:12], os.getpid()
        self._version = VERSION
        self._turn = threading.Lock()
        self._sequence = 0
        self._memory: deque[tuple[str, bytes]] = deque()
        self._memory_bytes = 0
        self._rests_until = 0.0
        self._warned: set[str] = set()
        self.dropped = Dropped(f"memory-{self._process}")
        self.cpu_s = 0.0
        self.noted = 0

    def note(self, stream: str, values: Mapping[str, Any]) -> None:
        """Keep a record: the columns of `streams.STREAMS`, without those that all have.

        RunId and RecordId may be given.
        """
        began = time.thread_time()
        try:
            self._note(stream, values)
        except Exception as e:
            # A mistake of ours; tests of the schema find it. The run goes on.
            self._warn("mistake", f"a record was not kept: {type(e).__name__}: {one_line(e)}")
        with self._turn:
            self.cpu_s += time.thread_time() - began
            self.noted += 1

    def _note(self, stream: str, values: Mapping[str, Any]) -> None:
        try:
            line = self.line(stream, values)
        except streams.TooBig as e:
            self._warn("too_big", f"{e}: it is dropped and counted")
            self._drop(stream, "too_big", streams.MOST_OF_RECORD)
            return
        if time.monotonic() >= self._rests_until:
            try:
                self.spool.keep(stream, line)
                return
            except Full:
                self._warn("full", "the spool is full: records are dropped and counted")
                self._drop(stream, "full", len(line))
                return
            except OSError as e:
                self._rests_until = time.monotonic() + _REST_S
                why = f"the spool cannot be written ({one_line(e, 160)}): records wait in memory"
                # A lock that another process holds is free soon.
                if not isinstance(e, TimeoutError):
                    self._warn("spool", why)
        self._remember(stream, line)

    def line(self, stream: str, values: Mapping[str, Any]) -> bytes:
        """The whole record as a line. Raises what `streams.line` does."""
        with self._turn:
            if self._pid != os.getpid():
                # A fork. With the parent's name its records would have the ids of the parent's.
                self._pid, self._process, self._sequence = os.getpid(), uuid.uuid4().hex[:12], 0
            self._sequence += 1
            number = self._sequence
        own = {
            "TimeGenerated": datetime.now(timezone.utc),
            "RecordId": f"{self._process}-{number}",
            "RunId": self._keeping.run_id,
            "RunName": self._keeping.run_name,
            "Verb": self._keeping.verb,
            "Process": self._process,
            "Sequence": number,
            "RaypipeVersion": self._version,
        }
        given = {name: value for name, value in values.items() if value is not None}
        return streams.line(stream, own | given)

    def close(self) -> None:
        """Make what this process kept ready to be sent."""
        self.spool_memory()
        self.spool.rotate()

    def spool_memory(self) -> None:
        """Bring what waits in memory into the spool, if it can be written again."""
        if not self._memory or time.monotonic() < self._rests_until:
            return
        kept = self.take_memory()
        try:
            while kept:
                self.spool.keep(*kept[0])
                kept.pop(0)
        except (OSError, Full):
            self._rests_until = time.monotonic() + _REST_S
        finally:
            self.put_back(kept)

    def take_memory(self) -> list[tuple[str, bytes]]:
        with self._turn:
            kept = list(self._memory)
            self._memory.clear()
            self._memory_bytes = 0
        return kept

    def put_back(self, kept: list[tuple[str, bytes]]) -> None:
        with self._turn:
            self._memory.extendleft(reversed(kept))
            self._memory_bytes += sum(len(line) for _, line in kept)
            self._fit()

    def has_in_memory(self) -> bool:
        return bool(self._memory) or bool(self.untold())

    def untold(self) -> dict[str, dict[str, Any]]:
        """Counts of records that were dropped where the spool could not count them."""
        with self._turn:
            return {key: dict(total) for key, total in self.dropped.untold().items()}

    def told(self, counts: Mapping[str, Mapping[str, Any]]) -> None:
        with self._turn:
            for key, total in counts.items():
                self.dropped.told[key] = total["records"]

    def in_memory(self) -> int:
        return len(self._memory)

    def _remember(self, stream: str, line: bytes) -> None:
        with self._turn:
            self._memory.append((stream, line))
            self._memory_bytes += len(line)
            self._fit()

    def _fit(self) -> None:
        """The oldest go. The caller holds the lock."""
        while self._memory_bytes > min(MOST_IN_MEMORY, self._keeping.most_bytes):
            stream, line = self._memory.popleft()
            self._memory_bytes -= len(line)
            self.dropped.add(uuid.uuid4().hex, stream, "full", [len(line)], False)

    def _drop(self, stream: str, reason: str, size: int) -> None:
        name = uuid.uuid4().hex
        try:
            self.spool.drop(name, stream, reason, [size])
        except OSError:
            with self._turn:
                self.dropped.add(name, stream, reason, [size], False)

    def _warn(self, kind: str, why: str) -> None:
        """One warning a kind and process."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("Azure Monitor: %s", hidden(why))
