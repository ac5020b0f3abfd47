"""One retrain at a time, wherever it is started, and how far it has come.

A Delta table, on any store, has the events of each retrain: who holds it, its states, its end.
Each event is committed directly on those that were read, so nobody writes on an outdated view:

- `held`: a process took the lease of this model. `beat`: it lives. `released`: it gives it back.
- `cleaning`, `cleaned`, `budgeted`, `trained`, `compared`: a state was reached; `data` says what
  came of it.
- `ended`: the decision was carried out. `failed`: it broke, and why.

A lease outlives its process, and is taken over when that process is gone: on the same machine that
is seen at once; elsewhere by its silence for LEASE_S of the observer's own clock, so clocks that
differ or go back do not matter. A process of the same machine that lives, and has written nothing
lately (it was stopped, or could not give the lease back), is waited for in the same way. Whoever
lost its lease cannot write a state any more, and stops.

The states are a record; the work itself finds what it has done by its own keys (retrain.py). So a
run that is killed anywhere goes on when it is started again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa

from raypipe.errors import RaypipeError, one_line
from raypipe.tables import retries, scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import (
    TRIES,
    Moved,
    append_once,
    json_of,
    newest,
    require_columns_of,
    require_rows_of,
    require_still_there,
)
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable

log = logging.getLogger("raypipe")
LEASE_S = 120.0
BEATS = 4  # in LEASE_S
SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("scope", pa.string()),
        ("cycle", pa.string()),
        ("event", pa.string()),
        ("holder", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("data", pa.string()),
    ]
)


class LeaseLost(RaypipeError):
    """Another process took this retrain over while this one did not answer."""


@dataclass(frozen=True)
class Event:
    """number: in the order of commits. scope: the model. cycle: names the retrain. holder: who."""

    number: int
    scope: str
    cycle: str
    event: str
    holder: str
    at: datetime
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Busy:
    """Another process is at it. who: its host and process. since: when it took the lease."""

    who: str
    since: datetime

    def __str__(self) -> str:
        return f"A retrain is under way ({self.who}, since {self.since:%Y-%m-%d %H:%M} UTC)"


class Journal:
    """The table of events of one model. Threads of a process may share it."""

    def __init__(self, uri: str, scope: str, options: dict[str, str] | None) -> None:
        self.uri, self.scope, self._options = resolve(uri), scope, options
        self._base: Any = None
        self._lock = threading.RLock()
        self.events: tuple[Event, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Read the newest version. Raises DataError for a table of something else."""
        with self._lock:
            base = newest(self.uri, self._options)
            # Its store is away, or it was deleted: that says nothing about the lease.
            anew = "it does not know of earlier retrains, nor of one that is under way"
            require_still_there(self.uri, base, self.events, anew)
            self._base = base
            if base is None:
                return
            require_columns_of(SCHEMA, self._base, self.uri, "retrain")
            table = ImageTable(self.uri, storage_options=self._options)
            pinned = table.pin(self._base.version())
            rows = scan.rows(table, pinned, SCHEMA.names, {"scope": self.scope})
            require_rows_of(SCHEMA, rows, self.uri)
            found = [
                Event(**{**row, "data": json_of(row["data"], self.uri)}) for row in rows.to_pylist()
            ]
            self.events = tuple(sorted(found, key=lambda event: event.number))

    def add(self, cycle: str, event: str, holder: str, data: Mapping[str, Any]) -> bool:
        """Commit an event directly on those that were read. False if somebody else was first."""
        with self._lock:
            number = self.events[-1].number + 1 if self.events else 1
            row = {
                "number": number,
                "scope": self.scope,
                "cycle": cycle,
                "event": event,
                "holder": holder,
                "at": datetime.now(UTC),
                "data": json.dumps(dict(data)),
            }
            why = commit_properties(f"retrain {self.scope} {cycle}: {event}")
            rows = pa.Table.from_pylist([row], SCHEMA)
            try:
                append_once(self.uri, rows, self._base, why, storage_options=self._options)
            except Moved:
                return False
            finally:
                self.refresh()
            return True

    @property
    def held(self) -> Event | None:
        """The lease that nobody has given back."""
        for event in reversed(self.events):
            if event.event in ("held", "released"):
                return event if event.event == "held" else None
        return None

    @property
    def broken(self) -> str:
        """The newest retrain, if it was killed or failed; "" if it has come to its end, is under
        way, or none has begun.

        Of a process of another machine that has written nothing for LEASE_S it is not known; it is
        taken for dead.
        """
        if self.under_way is not None:
            return ""
        for event in reversed(self.events):
            if event.event in ("held", "ended"):
                return event.cycle if event.event == "held" else ""
        return ""

    @property
    def under_way(self) -> Busy | None:
        """Who is at a retrain now; None if nobody is. What is not known of `broken` is not here."""
        held = self.held
        if held is None or not self._seems_alive(held):
            return None
        return Busy(str(held.data.get("who", "?")), held.at)

    def _seems_alive(self, held: Event) -> bool:
        """Is the process of this lease at it, as far as one look tells?"""
        at_work = _is_alive(held.data)
        newest = self.last_of(held.holder)
        # A process of this machine that lives may have written before the clock went back.
        is_later = bool(at_work) and newest.at > datetime.now(UTC)
        return at_work is not False and (is_later or _is_fresh(newest))

    def data(self, cycle: str, state: str) -> Mapping[str, Any] | None:
        """What was kept with a state of a retrain, the last time; None if it was not reached."""
        events = reversed(self.events)
        found = (e for e in events if e.cycle == cycle and e.event == state)
        return next((event.data for event in found), None)

    def last_of(self, holder: str) -> Event:
        """The newest event of a holder, which has at least one."""
        return [event for event in self.events if event.holder == holder][-1]


class Held:
    """The lease of one retrain, and its states. Made by `hold`."""

    def __init__(
        self, journal: Journal, cycle: str, holder: str, told: Callable[[str], None]
    ) -> None:
        self._journal, self.cycle, self._holder, self._told = journal, cycle, holder, told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def reached(self, state: str, **data: Any) -> None:
        """Keep a state. Raises LeaseLost if somebody has taken the lease over."""
        for attempt in range(1, TRIES + 1):
            self.require()
            if self._journal.add(self.cycle, state, self._holder, data):
                self._told(state)
                return
            retries.pause(attempt)
        raise retries.busy(self._journal.uri, f"{TRIES} tries")

    def data(self, state: str) -> Mapping[str, Any] | None:
        """What was kept with a state of this retrain; None if it was not reached."""
        return self._journal.data(self.cycle, state)

    def require(self) -> None:
        """Raise LeaseLost if the lease is not ours any more."""
        held = self._journal.held
        if held is None or held.holder != self._holder:
            now = held.data.get("who", "?") if held else "nobody"
            raise LeaseLost(
                "This retrain was taken over while it did not answer",
                got=f"held by {now}",
                rule=f"A process that is silent for {LEASE_S:.0f} s is taken for dead",
                fix="Nothing is lost: the other process goes on with what was done",
            )

    def _beat(self) -> None:
        while not self._stop.wait(LEASE_S / BEATS):
            try:
                self._journal.refresh()
                self.require()
                self._journal.add(self.cycle, "beat", self._holder, {})
            except LeaseLost:
                return
            except Exception as e:
                # The store may be away for a while; a state that cannot be kept says so.
                log.warning("The lease of the retrain was not renewed: %s", one_line(e))

    def close(self, error: BaseException | None) -> None:
        """Give the lease back, with the reason if the retrain broke."""
        self._stop.set()
        self._thread.join()
        if isinstance(error, LeaseLost):
            return
        if isinstance(error, Exception):
            self.reached("failed", why=one_line(error))
        self.reached("released")


@contextmanager
def hold(
    journal: Journal,
    cycle: str,
    say: Callable[[str], None] = log.info,
    told: Callable[[str], None] = lambda state: None,
    also: Mapping[str, Any] | None = None,
) -> Iterator[Held | Busy]:
    """Hold the lease of a model's retrain inside a `with` block; Busy if another process does.

    told: called with each state that was kept. also: kept with the lease. It waits at most LEASE_S
    to see whether the other one lives. Raises DataError for a table that cannot be read or written.
    """
    holder = uuid.uuid4().hex
    taken = _take(journal, cycle, holder, say, also or {})
    if isinstance(taken, Busy):
        yield taken
        return
    held = Held(journal, cycle, holder, told)
    try:
        yield held
    except BaseException as e:
        try:
            held.close(e)
        except Exception as other:
            # The first error says more.
            log.warning("The lease of the retrain was not given back: %s", one_line(other))
        raise
    held.close(None)


def _take(
    journal: Journal, cycle: str, holder: str, say: Callable[[str], None], also: Mapping[str, Any]
) -> Busy | None:
    """Take the lease; Busy if its holder lives."""
    me = {"who": f"{socket.gethostname()} process {os.getpid()}", **_process(), **also}
    for attempt in range(1, TRIES + 1):
        journal.refresh()
        held = journal.held
        if held is not None:
            who = str(held.data.get("who", "?"))
            alive = _is_alive(held.data)
            if alive and not _is_fresh(journal.last_of(held.holder)):
                alive = None
            if alive is None:
                say(f"{who} holds the lease: waiting for a sign of life")
                alive = _shows_life(journal, held)
                if journal.held != held:
                    continue  # given back, or taken by a third: look again
            if alive:
                return Busy(who, held.at)
            say(f"{who} has ended without giving the retrain back: going on with it")
        if journal.add(cycle, "held", holder, me):
            return None
        retries.pause(attempt)
    raise retries.busy(journal.uri, f"{TRIES} tries")


def _shows_life(journal: Journal, held: Event) -> bool:
    """Does the holder write anything within the lease, by this process's own clock?"""
    seen = journal.last_of(held.holder).number
    until = time.monotonic() + LEASE_S
    while time.monotonic() < until:
        time.sleep(LEASE_S / 40)
        journal.refresh()
        if journal.held != held:
            return False
        if journal.last_of(held.holder).number != seen:
            return True
    return False


def _is_fresh(event: Event) -> bool:
    """Was it written within the lease, by this machine's clock? Not known after that went back."""
    age_s = (datetime.now(UTC) - event.at).total_seconds()
    return 0 <= age_s < LEASE_S


def _process() -> dict[str, Any]:
    """What tells this process from all others of its machine."""
    return {
        "kernel": _kernel(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "ticks": _ticks(os.getpid()),
    }


def _ticks(pid: int) -> int | None:
    """When a process started, by a clock that counts from the boot: setting the time of day moves
    psutil's answer, and not this one. None without such a process, and where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name before may hold blanks and brackets: the last one ends it.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _kernel() -> str | None:
    """Names this boot of this machine and the namespace of its process numbers; None elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _is_alive(data: Mapping[str, Any]) -> bool | None:
    """Whether the process of a `held` event runs; None if it cannot be seen from here."""
    if data.get("kernel") is None or data.get("kernel") != _kernel():
        return None
    try:
        started = psutil.Process(int(data["pid"])).create_time()
    except psutil.NoSuchProcess:
        return False
    # The number may belong to another process by now.
    ticks = _ticks(int(data["pid"]))
    if data.get("ticks") is not None and ticks is not None:
        return bool(ticks == data["ticks"])
    return bool(abs(started - float(data["started"])) < 1)
