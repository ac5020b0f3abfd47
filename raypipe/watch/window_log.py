"""The log of windows: a Delta table that says how far the checks of a table have come.

Its events are numbered within a line (a table, a selection of its rows, and watch.name). Each event
is committed directly after the one before it:

- `opened`: a window, the images that came after version `since` up to `version`. Whoever comes
  while it is open joins it: two checks at once, or the next one after a kill.
- `checked`: its evidence is kept. The next window begins at its version.
- `waiting`: too few images came. They stay for the next window, which begins where this one did.
- `nothing`: a check ran, and no image had come. Kept with watch.every_h, which counts checks.
- `left`: an opened window cannot be read any more (its version was vacuumed, or the table restored
  from a backup). Its images belong to the next window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

import pyarrow as pa

from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import (
    Moved,
    append_once,
    newest,
    require_columns_of,
    require_rows_of,
    require_still_there,
)
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable

Event = Literal["opened", "checked", "waiting", "left", "nothing"]
SCHEMA = pa.schema(
    [
        ("line", pa.string()),
        ("number", pa.int64()),
        ("event", pa.string()),
        ("window", pa.int64()),
        ("name", pa.string()),
        ("table", pa.string()),
        ("since", pa.int64()),
        ("version", pa.int64()),
        ("state", pa.string()),
        ("images", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("evidence", pa.string()),
        ("predictions", pa.string()),
        ("prediction", pa.string()),
    ]
)
LATE = 1.5  # times watch.every_h: a check that is later has missed one


@dataclass(frozen=True)
class Entry:
    """One event of a line. since: None for a window that begins with the table.

    state: of the rows at `version` (between.state). predictions, prediction: where the rows of a
    checked window are (place, key).
    """

    number: int
    event: Event
    window: int
    since: int | None
    version: int
    state: str
    images: int
    at: datetime
    evidence: str = ""
    predictions: str = ""
    prediction: str = ""


class Log:
    """The events of one line. Several processes may add to it."""

    def __init__(self, uri: str, line: str, options: dict[str, str] | None) -> None:
        self.uri, self.line, self._options = resolve(uri), line, options
        self._base: Any = None
        self._is_written = True
        self.entries: tuple[Entry, ...] = ()
        self.refresh()

    def only_look(self) -> None:
        """From now on events are kept in memory alone: for a plan, which writes nothing."""
        self._is_written = False

    def refresh(self) -> None:
        """Read the newest version. Raises DataError for a table of something else."""
        base = newest(self.uri, self._options)
        anew = "its first window has all images of the table, checked before or not"
        require_still_there(self.uri, base, self.entries, anew)
        self._base = base
        if base is None:
            return
        require_columns_of(SCHEMA, self._base, self.uri, "drift check")
        table = ImageTable(self.uri, storage_options=self._options)
        pinned = table.pin(self._base.version())
        names = [field.name for field in SCHEMA if field.name in Entry.__annotations__]
        rows = scan.rows(table, pinned, names, {"line": self.line})
        require_rows_of(SCHEMA, rows, self.uri, {"since"})
        entries = [Entry(**row) for row in rows.to_pylist()]
        self.entries = tuple(sorted(entries, key=lambda e: e.number))

    def add(self, entry: Entry, name: str, table: str) -> bool:
        """Commit an event directly after those that were read. The log gives it its number.

        False if another process was faster: nothing is written, and the newest version is read.
        """
        number = self.entries[-1].number + 1 if self.entries else 1
        entry = replace(entry, number=number)
        if not self._is_written:
            self.entries = (*self.entries, entry)
            return True
        row = vars(entry) | {"line": self.line, "name": name, "table": table}
        why = commit_properties(f"drift check {name}: window {entry.window} {entry.event}")
        rows = pa.Table.from_pylist([row], SCHEMA)
        try:
            append_once(self.uri, rows, self._base, why, storage_options=self._options)
        except Moved:
            self.refresh()
            return False
        self.refresh()
        return True

    def last(self, *events: Event) -> Entry | None:
        """The newest of these events."""
        found = (entry for entry in reversed(self.entries) if entry.event in events)
        return next(found, None)

    @property
    def open(self) -> Entry | None:
        """The window that was opened last, if nobody has finished it."""
        last = self.last("opened", "checked", "left")
        return last if last and last.event == "opened" else None

    @property
    def checked(self) -> list[Entry]:
        """The windows that were checked, oldest first."""
        return [entry for entry in self.entries if entry.event == "checked"]

    def elsewhere(self, line_at: Callable[[str], str]) -> dict[str, int]:
        """Other addresses where this table was checked: {address: the newest checked version}.

        The line of such a table differs from this one by its address alone. line_at: the line that
        this table has at an address.
        """
        if self._base is None:
            return {}
        table = ImageTable(self.uri, storage_options=self._options)
        pinned = table.pin(self._base.version())
        wanted: dict[str, str | list[str]] = {"event": "checked"}
        rows = scan.rows(table, pinned, ["line", "table", "version"], wanted).to_pylist()
        found: dict[str, int] = {}
        for row in rows:
            uri, version = str(row["table"]), int(row["version"])
            if row["line"] == line_at(uri) != self.line:
                found[uri] = max(version, found.get(uri, version))
        return found


def since_all(checked: Sequence[Entry]) -> list[Entry]:
    """The checked windows from the last one that had all rows of the table, oldest first.

    What was checked before it, nobody can tell.
    """
    first = max((n for n, entry in enumerate(checked) if entry.since is None), default=0)
    return list(checked[first:])


def missed_checks(last: Entry | None, every_h: float | None, now: datetime) -> str:
    """The checks that did not run or failed, in words; "" if none did, or if nobody knows.

    last: the newest event that counts as a check. every_h: the hours between two checks.
    """
    if last is None or every_h is None:
        return ""
    every = timedelta(hours=every_h)
    late = now - last.at
    if late < -every:
        return f"the clock stands before the last check ({last.at:%Y-%m-%d %H:%M} UTC)"
    count = int(late / every + (1 - LATE)) if late > LATE * every else 0
    if not count:
        return ""
    checks = "1 check" if count == 1 else f"{count} checks"
    # One that was killed leaves nothing that tells it from one that was never started.
    return f"{checks} did not run, or failed, since {last.at:%Y-%m-%d %H:%M} UTC"
