"""Delivers what waits in a spool, on a thread of its own. Nothing here raises into a run.

Every few seconds the thread makes this process's records ready, and sends what waits, oldest
first: several segments of a stream make one request of at most 1 MB. One process sends at a time,
for all that share the spool.

- No answer, 429, 5xx: the pause doubles up to five minutes, or is what Retry-After says.
- 401, 403, 404 and a stream that the rule does not have: one warning, and a try each five minutes.
  A process with a newer token or permission delivers what waits.
- 400 and 413 for some records: halves of them are sent, until what is refused stands alone. It is
  dropped and counted, if the service took other records of its stream; else nothing is dropped.

How many records were dropped is told last, as records of their own.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from raypipe.errors import hidden, one_line
from raypipe.monitor import streams
from raypipe.monitor.ingestion import MOST_OF_REQUEST, REQUEST_S, Again, Problem, Refused
from raypipe.monitor.recorder import Recorder
from raypipe.monitor.spool import Dropped, Segment

log = logging.getLogger("raypipe")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
MOST_REFUSED = 3  # records, one by one, until one is tried from the other end
PATIENCE = 4  # failures in a row until it is worth a warning
_TURN_S = 0.2  # between two looks whether another process has sent ours


class Service(Protocol):
    """Takes records: the Logs Ingestion API, or another one in tests."""

    cpu_s: float

    def send(self, stream: str, lines: Sequence[bytes], seconds: float) -> None:
        """Raises Again, Problem or Refused."""


@dataclass
class _Round:
    """One delivery. until: on the monotonic clock."""

    until: float
    taken: set[str] = field(default_factory=set)
    """Streams of which something was taken."""
    newest: dict[str, Segment] = field(default_factory=dict)
    """By stream."""

    def left_s(self) -> float:
        return self.until - time.monotonic()


class Sender:
    """The thread. where: names the service in messages."""

    def __init__(self, recorder: Recorder, service: Service, every_s: float, where: str) -> None:
        self._recorder, self._spool, self._service = recorder, recorder.spool, service
        self._every_s, self._where = every_s, where
        self._stop = threading.Event()
        self._until = float("inf")
        self._failures = 0
        self._warned: set[str] = set()
        self._why = ""
        self._pause_s = self._cpu_s = 0.0
        self._not_before = 0.0  # on the monotonic clock: what the service asked for
        self._thread = threading.Thread(target=self._run, name="azure-monitor", daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this thread and its requests, as of its last delivery."""
        return self._cpu_s + self._service.cpu_s

    def close(self, within_s: float) -> None:
        """Deliver what waits, for no longer than this; the rest stays in the spool."""
        self._until = time.monotonic() + within_s
        self._recorder.close()
        self._stop.set()
        self._thread.join(within_s + (1.0 if within_s else 0.0))
        self._say_what_is_left()

    def _run(self) -> None:
        # What an earlier run left goes at once.
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            pause_s = self._deliver_or_pause(REQUEST_S * 4)
            self._cpu_s = time.thread_time()
        # The last delivery. A pause that the server asked for is kept.
        while True:
            if self._not_before >= self._until:
                break
            time.sleep(max(0.0, self._not_before - time.monotonic()))
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                break
            self._deliver_or_pause(left_s)
            if self._is_done():
                break
            if self._failures >= PATIENCE:
                # A service that is down is not waited for at the end of each run.
                break
            # Another process may be sending ours.
            pause_s = self._pause_s if self._failures else _TURN_S
            if time.monotonic() + pause_s >= self._until:
                break
            time.sleep(pause_s)
        self._cpu_s = time.thread_time()

    def _is_done(self) -> bool:
        try:
            return self._spool.is_empty() and not self._recorder.has_in_memory()
        except OSError:
            return not self._recorder.has_in_memory()

    def _deliver_or_pause(self, within_s: float) -> float:
        """One delivery. Returns the seconds until the next one."""
        try:
            self._deliver(_Round(time.monotonic() + within_s))
            self._failures = 0
            return self._every_s
        except Again as e:
            self._failures += 1
            self._why = str(e)
            if self._failures == PATIENCE:
                self._warn("down", f"{e}. Records wait in {self._spool.folder}")
            self._not_before = time.monotonic() + e.after_s
            self._pause_s = max(e.after_s, self._backed_off(FIRST_PAUSE_S))
        except Problem as e:
            self._failures += 1
            self._why = str(e)
            self._warn(e.kind, f"{e}. Records wait in {self._spool.folder}")
            self._pause_s = LONGEST_PAUSE_S
        except OSError as e:
            self._failures += 1
            self._why = f"the spool cannot be used ({one_line(e, 120)})"
            # A lock that another process holds is free soon.
            if not isinstance(e, TimeoutError):
                self._warn("spool", f"{self._why}: records wait in memory alone")
            self._pause_s = self._every_s
        except Exception as e:
            # A mistake of ours. It costs records, and never the run.
            self._failures += 1
            self._why = f"{type(e).__name__}"
            self._warn("mistake", f"a mistake of raypipe: {type(e).__name__}: {one_line(e)}")
            log.debug("The sink failed", exc_info=True)
            self._pause_s = LONGEST_PAUSE_S
        return self._pause_s

    def _backed_off(self, first_s: float) -> float:
        # Two processes of one moment must not come back at one moment.
        grown = min(LONGEST_PAUSE_S, first_s * 2 ** min(self._failures - 1, 10))
        return grown * random.uniform(0.75, 1.0)

    def _deliver(self, now: _Round) -> None:
        """Send all that waits. Raises Again, Problem, or OSError."""
        problem: Exception | None = None
        try:
            self._recorder.spool_memory()
            self._spool.rotate()
            with self._spool.sending() as is_ours:
                if is_ours:
                    problem = self._send_segments(now)
                    self._tell_dropped(self._spool.dropped(), now)
        except OSError as e:
            problem = e
        self._send_memory(now)
        if problem is not None:
            raise problem

    def _send_segments(self, now: _Round) -> Exception | None:
        """Returns the problem of a stream that is not taken while others are."""
        problem: Exception | None = None
        waiting = self._spool.segments()
        most = min(MOST_OF_REQUEST, self._spool.most_at_once)
        # By stream, so that one the rule does not have holds up no other.
        for stream, of_stream in groupby(sorted(waiting, key=_stream), _stream):
            segments = list(of_stream)
            now.newest[stream] = segments[-1]
            try:
                for batch in _batches(segments, most):
                    self._send_batch(batch, now)
            except Problem as e:
                if e.kind != "stream":
                    raise
                self._warn(f"stream {stream}", f"{e}. Records wait in {self._spool.folder}")
                problem = Problem(f"stream {stream}", str(e))
        return problem

    def _send_batch(self, batch: list[Segment], now: _Round) -> None:
        asked = []
        lines: list[bytes] = []
        for segment in batch:
            try:
                asked.append(segment.become("asked"))
                found, unreadable = asked[-1].lines()
            except FileNotFoundError:
                # Dropped meanwhile.
                continue
            if unreadable:
                self._spool.count_unreadable(segment, unreadable)
            lines += found
        try:
            if lines:
                self._post(batch[0].stream, lines, now)
        except Refused as e:
            self._send_apart(asked, batch, now, e)
            return
        except (Again, Problem) as e:
            if isinstance(e, Problem) or e.answered:
                self._unask(asked, batch)
            raise
        for segment in asked:
            self._spool.remove(segment)

    def _send_apart(
        self, asked: list[Segment], before: list[Segment], now: _Round, why: Refused
    ) -> None:
        """Send segments of which something is refused. before: as they were."""
        for number, segment in enumerate(asked):
            try:
                refused = self._halve(segment.stream, segment.lines()[0], now)
                if refused:
                    self._require_any(segment.stream, now, why)
            except FileNotFoundError:
                continue
            except (Again, Problem):
                # Of this one, halves may have been taken: then it stays asked, and is sent again.
                first = number + (segment.stream in now.taken)
                self._unask(asked[first:], before)
                raise
            self._spool.remove(segment, refused)
            if refused:
                said = f"{why} for {len(refused)} records, which are dropped and counted"
                self._warn("refused", said)

    def _halve(self, stream: str, lines: list[bytes], now: _Round, refused: int = 0) -> list[bytes]:
        """Send records; returns those that are refused one by one. refused: how many were so far.

        Raises Problem if it is not the records, as `_require_any` does.
        """
        if not lines:
            return []
        try:
            self._post(stream, lines, now)
            return []
        except Refused as e:
            if refused >= MOST_REFUSED:
                self._require_any(stream, now, e)
            if len(lines) == 1:
                return lines
        half = len(lines) // 2
        found = self._halve(stream, lines[:half], now, refused)
        return found + self._halve(stream, lines[half:], now, refused + len(found))

    def _require_any(self, stream: str, now: _Round, why: Refused) -> None:
        """Raise Problem if the service takes no record of the stream: not the newest, either.

        Then it is not the records, and none of them may be dropped.
        """
        if stream in now.taken:
            return
        try:
            lines = now.newest[stream].now().lines()[0]
            self._post(stream, lines[-1:], now)
        except (Refused, FileNotFoundError):
            raise Problem("stream", f"{why} for all records of {stream}") from None

    def _post(self, stream: str, lines: Sequence[bytes], now: _Round) -> None:
        left_s = now.left_s()
        if left_s <= 0:
            raise Again("there was no time left", answered=True)
        self._service.send(stream, lines, min(REQUEST_S, left_s))
        now.taken.add(stream)

    def _unask(self, segments: Sequence[Segment], before: Sequence[Segment]) -> None:
        """The service said that it has taken none of these now.

        before: as they were. One that was asked before may have arrived then.
        """
        were_ready = {segment.id for segment in before if segment.state == "ready"}
        for segment in (s for s in segments if s.id in were_ready):
            try:
                segment.become("ready")
            except FileNotFoundError:
                continue

    def _tell_dropped(self, dropped: Dropped, now: _Round) -> None:
        """Tell the counts that the service does not know yet."""
        untold = dropped.untold()
        if not untold:
            return
        self._post_dropped(dropped.spool, untold, now)
        self._spool.told(dropped)
        self._warn_of_drops(untold)

    def _post_dropped(self, spool: str, untold: dict[str, dict[str, Any]], now: _Round) -> None:
        lines = [self._dropped_line(spool, key, total) for key, total in untold.items()]
        try:
            self._post(streams.DROPPED, lines, now)
        except Refused as e:
            raise Problem("counts", f"{e} for counts of dropped records") from None

    def _dropped_line(self, spool: str, key: str, total: dict[str, Any]) -> bytes:
        stream, _, reason = key.partition("|")
        values = {
            "RecordId": f"{spool}-{stream}-{reason}-{total['records']}",
            "Spool": spool,
            "Stream": stream,
            "Reason": reason,
            "Records": total["records"],
            "Bytes": total["bytes"],
            "MayHaveArrived": total["maybe"],
            "First": total["first"],
            "Last": total["last"],
        }
        return self._recorder.line(streams.DROPPED, values).rstrip(b"\n")

    def _send_memory(self, now: _Round) -> None:
        """Send what could not be spooled, and tell what did not fit into memory."""
        kept = self._recorder.take_memory()
        try:
            while kept:
                stream = kept[0][0]
                lines: list[bytes] = []
                for other, line in kept:
                    if other != stream or _size(lines) + len(line) > MOST_OF_REQUEST:
                        break
                    lines.append(line.rstrip(b"\n"))
                self._post(stream, lines, now)
                del kept[: len(lines)]
        except Refused as e:
            raise Problem("refused", f"{e} for records in memory") from None
        finally:
            self._recorder.put_back(kept)
        untold = self._recorder.untold()
        if untold:
            self._post_dropped(self._recorder.dropped.spool, untold, now)
            self._recorder.told(untold)
            self._warn_of_drops(untold)

    def _warn_of_drops(self, untold: dict[str, dict[str, Any]]) -> None:
        counted = ", ".join(
            f"{total['records']} of {key.partition('|')[0]} ({key.partition('|')[2]})"
            for key, total in untold.items()
        )
        self._warn("dropped", f"records were dropped, and this was reported: {counted}")

    def _say_what_is_left(self) -> None:
        try:
            waits = not self._spool.is_empty()
        except OSError:
            waits = False
        # What was warned of before says where they wait.
        if waits and not self._warned:
            why = f": {self._why}" if self._why else ""
            folder = self._spool.folder
            self._warn("left", f"not all records were delivered{why}. They wait in {folder}")
        lost = self._recorder.in_memory()
        if lost:
            self._warn("lost", f"{lost} records in memory were not delivered and are lost")

    def _warn(self, kind: str, why: str) -> None:
        """One warning a kind and run."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("Azure Monitor at %s: %s", self._where, hidden(why))


def _stream(segment: Segment) -> str:
    return segment.stream


def _batches(segments: list[Segment], most: int) -> list[list[Segment]]:
    """Segments, the oldest first, as many together as have `most` bytes; or one that is larger."""
    made: list[list[Segment]] = []
    size = 0
    for segment in segments:
        # One comma a record is its line break.
        try:
            bytes_ = segment.path.stat().st_size
        except FileNotFoundError:
            continue
        if not made or size + bytes_ + 2 > most:
            made.append([])
            size = 0
        made[-1].append(segment)
        size += bytes_
    return made


def _size(lines: Sequence[bytes]) -> int:
    return 2 + sum(len(line) + 1 for line in lines)
