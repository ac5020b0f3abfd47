"""A folder where records wait until they are sent: bounded, for several processes, safe to kill.

    FOLDER/1/TIME-ID-STREAM.open     a process appends to it, and holds a lock on it
    FOLDER/1/TIME-ID-STREAM.ready    complete
    FOLDER/1/TIME-ID-STREAM.asked    sent, and there was no answer: it is sent again
    FOLDER/1/TIME-ID-STREAM.gone     dropped; its records are being counted
    FOLDER/1/dropped.json            how many were dropped
    FOLDER/1/lock                    held for moments: while files are made, dropped, counted
    FOLDER/1/send.lock               held by the process that sends

A file is a segment: one stream's records, a line of JSON each. Each step is one rename, so a kill
leaves what was before or what comes after:

- A record is kept when its line is in the page cache: a kill loses none, a power cut may lose the
  last seconds.
- A segment whose process is gone has no lock: whoever looks next makes it ready.
- A segment is removed when the service has taken all of it. A kill in between sends it twice, with
  the same record ids.
- A new segment is made only where it fits; the oldest go for it. The name says `gone` before they
  are counted, and dropped.json says which are counted, so that each is counted once.

1 in the path is the format. Another one would have its own folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import Timeout

from raypipe.config import to_json
from raypipe.files import file_lock, write_atomic
from raypipe.monitor import streams

FORMAT = 1
LEAST_SEGMENT, MOST_SEGMENT = 16 * 2**10, 256 * 2**10  # bytes
_BLOCK = 4096  # what a small file takes on a disk
# The counts, the two locks, and a new version of the counts beside the old one.
_RESERVED = 8 * _BLOCK
_TURN_S = 2.0  # to wait for the lock, which others hold for moments
_MOST_TOKENS = 200
_NAME = re.compile(r"(\d{20})-([0-9a-f]{12})-(\w{1,60})\.(open|ready|asked|gone)", re.ASCII)


class Full(Exception):
    """No segment fits, and none can be dropped for it: other processes have them open."""


@dataclass(frozen=True, order=True)
class Segment:
    """A file of one stream's records. at: its place in the order of age."""

    at: int
    id: str
    stream: str
    state: str
    path: Path = field(compare=False)

    def become(self, state: str) -> Segment:
        """Rename it. Raises FileNotFoundError if somebody else did so first."""
        path = self.path.with_suffix(f".{state}")
        self.path.rename(path)
        return Segment(self.at, self.id, self.stream, state, path)

    def now(self) -> Segment:
        """The same in the state that it has now. Raises FileNotFoundError if it is gone."""
        for state in ("ready", "asked"):
            path = self.path.with_suffix(f".{state}")
            if path.exists():
                return Segment(self.at, self.id, self.stream, state, path)
        raise FileNotFoundError(self.path)

    def disk(self) -> int:
        """Bytes that it takes on the disk; 0 if it is gone."""
        try:
            return _blocks(self.path.stat().st_size)
        except FileNotFoundError:
            return 0

    def lines(self) -> tuple[list[bytes], int]:
        """Its records, and how many lines are none. What follows the last line break was being
        written when its process was killed: nobody was told that it is kept."""
        *whole, _torn = self.path.read_bytes().split(b"\n")
        lines = [line for line in whole if _is_record(line)]
        return lines, len(whole) - len(lines)


@dataclass
class Dropped:
    """How many records were dropped, by STREAM|REASON, since the spool exists.

    counted: what is in the counts, by a name of its own. told: what the service knows.
    """

    spool: str
    totals: dict[str, dict[str, Any]] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, stream: str, reason: str, sizes: Sequence[int], maybe: bool) -> None:
        """Count records of these sizes once for this name."""
        if name in self.counted or not sizes:
            return
        now = streams.moment(datetime.now(timezone.utc))
        empty = {"records": 0, "bytes": 0, "maybe": 0, "first": now, "last": now}
        total = self.totals.setdefault(f"{stream}|{reason}", empty)
        total["records"] += len(sizes)
        total["bytes"] += sum(sizes)
        total["maybe"] += len(sizes) if maybe else 0
        total["last"] = now
        self.counted = [*self.counted, name][-_MOST_TOKENS:]

    def untold(self) -> dict[str, dict[str, Any]]:
        return {k: t for k, t in self.totals.items() if t["records"] > self.told.get(k, 0)}


class Spool:
    """One process's view of the folder. `keep` may be called from any thread."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder / str(FORMAT)
        self._most = most_bytes
        # Of what is sent together: less of a small spool, so that something else can be dropped.
        self.most_at_once = max(LEAST_SEGMENT, most_bytes // 4)
        self._segment = min(MOST_SEGMENT, max(LEAST_SEGMENT, most_bytes // 32))
        self._turn = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._pid = os.getpid()

    def keep(self, stream: str, line: bytes) -> None:
        """Append one record, with its line break. Raises OSError, or Full."""
        with self._turn:
            if self._pid != os.getpid():
                # A fork: these are the parent's.
                self._open, self._pid = {}, os.getpid()
            own = self._open.get(stream)
            if own is not None and own.is_deleted():
                # Somebody has deleted the folder: what follows is kept in a new one.
                self._finish(stream)
                own = None
            if own is not None and own.size + len(line) > max(self._segment, len(line)):
                self._finish(stream)
                own = None
            if own is None:
                own = self._open[stream] = self._new(stream, len(line))
            try:
                own.append(line)
            except OSError:
                self._finish(stream)
                raise

    def rotate(self) -> None:
        """Make this process's own segments ready to be sent."""
        with self._turn:
            for stream in list(self._open):
                self._finish(stream)

    def segments(self) -> list[Segment]:
        """What waits, the oldest first: also what processes that are gone left open."""
        there = self._list()
        found = [s for s in there if s.state in ("ready", "asked")]
        if any(s.state == "open" for s in there):
            # Under the lock a segment that was just made has its own lock, too.
            with self.locked():
                for left in (s for s in there if s.state == "open" and _is_orphan(s.path)):
                    with suppress(FileNotFoundError):
                        found.append(left.become("ready"))
        return sorted(found)

    def remove(self, segment: Segment, refused: Sequence[bytes] = ()) -> None:
        """Remove what was taken. refused: the records of it that never will be."""
        if refused:
            with self.locked():
                dropped = self._read_dropped()
                sizes = [len(line) for line in refused]
                dropped.add(f"{segment.id}:refused", segment.stream, "refused", sizes, False)
                self._write_dropped(dropped)
        segment.path.unlink(missing_ok=True)

    def drop(self, name: str, stream: str, reason: str, sizes: Sequence[int]) -> None:
        """Count records that were never in a segment."""
        with self.locked():
            dropped = self._read_dropped()
            dropped.add(name, stream, reason, sizes, False)
            self._write_dropped(dropped)

    def count_unreadable(self, segment: Segment, lines: int) -> None:
        """Count lines of a segment that are no records."""
        with self.locked():
            dropped = self._read_dropped()
            name = f"{segment.id}:unreadable"
            dropped.add(name, segment.stream, "unreadable", [0] * lines, False)
            self._write_dropped(dropped)

    def dropped(self) -> Dropped:
        """The counts."""
        with self.locked():
            self._finish_drops()
            return self._read_dropped()

    def told(self, counts: Dropped) -> None:
        """Remember that the service knows these counts."""
        with self.locked():
            dropped = self._read_dropped()
            if dropped.spool != counts.spool:
                return
            for key, total in counts.totals.items():
                dropped.told[key] = max(dropped.told.get(key, 0), total["records"])
            self._write_dropped(dropped)

    def is_empty(self) -> bool:
        """Does nothing wait, and were all drops told? Raises OSError."""
        with self.locked():
            is_waiting = any(s.state != "open" or _is_orphan(s.path) for s in self._list())
            return not is_waiting and not self._read_dropped().untold()

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Is it this process's turn to send? False: another one does, and sends ours as well."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = file_lock(self.folder / "send.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder. Raises OSError if there is none, or others keep it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # One object a use: a lock of filelock is its thread's own.
        lock = file_lock(self.folder / "lock")
        lock.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            lock.release()

    def _list(self) -> list[Segment]:
        found = []
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match:
                    found.append(Segment(int(match[1]), match[2], match[3], match[4], path))
        return sorted(found)

    def _new(self, stream: str, least: int) -> _Open:
        """A new open segment. The oldest ones go until it fits; raises Full where they do not."""
        room = _blocks(max(self._segment, least))
        with self.locked():
            self._finish_drops()
            self._sweep()
            there = self._list()
            # An open segment may grow to its largest size without asking again.
            full = _blocks(self._segment)
            taken = {s: max(full, s.disk()) if s.state == "open" else s.disk() for s in there}
            free = self._most - _RESERVED - sum(taken.values())
            # What may have arrived goes last: nobody could say whether it was dropped.
            by_age = sorted(there, key=lambda s: (s.state == "asked", s))
            for old in by_age:
                if free >= room:
                    break
                if old.state == "open" and not _is_orphan(old.path):
                    continue
                free += taken[old]
                self._drop(old)
            if free < room:
                raise Full
            # The clock may have gone back: what is newer has the larger number all the same.
            at = min(max([time.time_ns(), *(s.at + 1 for s in there)]), 10**20 - 1)
            name = f"{at:020d}-{uuid.uuid4().hex[:12]}-{stream}.open"
            return _Open(self.folder / name)

    def _finish(self, stream: str) -> None:
        self._open.pop(stream).finish()

    def _drop(self, segment: Segment) -> None:
        """Drop a segment and count its records. The caller holds the lock."""
        with suppress(FileNotFoundError):
            # The counts must say whether it may have arrived, after a kill, too.
            if segment.state == "asked":
                dropped = self._read_dropped()
                dropped.counted.append(f"{segment.id}:asked")
                self._write_dropped(dropped)
            segment.become("gone")
        self._finish_drops()

    def _finish_drops(self) -> None:
        """Count what was dropped and remove it; also what a killed process left so."""
        gone = [s for s in self._list() if s.state == "gone"]
        if not gone:
            return
        dropped = self._read_dropped()
        for segment in gone:
            lines, unreadable = segment.lines()
            maybe = f"{segment.id}:asked" in dropped.counted
            sizes = [len(line) for line in lines]
            dropped.add(segment.id, segment.stream, "full", sizes, maybe)
            name = f"{segment.id}:unreadable"
            dropped.add(name, segment.stream, "unreadable", [0] * unreadable, False)
        self._write_dropped(dropped)
        for segment in gone:
            segment.path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove halves of dropped.json that killed processes left. The caller holds the lock."""
        for partial in self.folder.glob("*.partial"):
            partial.unlink(missing_ok=True)

    def _read_dropped(self) -> Dropped:
        try:
            read = json.loads((self.folder / "dropped.json").read_bytes())
            if read.pop("format") == FORMAT:
                return Dropped(**read)
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError):
            # Damaged by hand: its counts are lost, and a new spool begins to count.
            pass
        return Dropped(uuid.uuid4().hex[:12])

    def _write_dropped(self, dropped: Dropped) -> None:
        write_atomic(
            self.folder / "dropped.json",
            to_json(
                {
                    "format": FORMAT,
                    "spool": dropped.spool,
                    "totals": dropped.totals,
                    "counted": dropped.counted,
                    "told": dropped.told,
                }
            ),
        )


class _Open:
    """A segment that this process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    def append(self, line: bytes) -> None:
        """Raises OSError, and leaves no half of the line."""
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                raise OSError(28, "no room for the whole record")
        except OSError:
            # If this fails as well, the line has no end, and the next one is in another segment.
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(line)

    def is_deleted(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0

    def finish(self) -> None:
        with suppress(OSError):
            if self.size:
                self._path.rename(self._path.with_suffix(".ready"))
            else:
                self._path.unlink()
        os.close(self._fd)


def _is_orphan(path: Path) -> bool:
    """Is an open segment's process gone? False if the file is."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
