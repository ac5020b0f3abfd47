"""Which images a check looks at: those that came since the last one, each once.

A log in a Delta table says how far the checks of a table have come. Its events, of one line (table,
selection of rows, watch.name), are numbered, and each is committed directly on the one before it:

- `opened`: a window, the images that came after version `since` up to `version`. Whoever comes
  while it is open joins it: two checks at once, or the next one after a kill.
- `checked`: its evidence is kept. The next window begins at its version.
- `waiting`: too few images came. They stay for the next window, which begins where this one did.
- `nothing`: a check ran, and no image had come. Kept with watch.every_h, which counts checks.
- `left`: an opened window cannot be read any more (its version was vacuumed, or the table restored
  from a backup). Its images belong to the next window.

`tables/between.py` tells from the table's own log what came. Where it cannot, all images are
compared with those of earlier windows, whose identities are in the predictions table. So they are
after a RESTORE, which brings back rows that an earlier window may have had. A window needs no
clock: versions say what is new. Where these predictions are gone, too, a check fails and says so,
until one with watch.window=all has looked at every image: it is noted as a window without `since`,
and the line goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raypipe.config import RunConfig, key_of
from raypipe.errors import DataError, Unreachable
from raypipe.serve.links import batches
from raypipe.tables import between, retries, scan
from raypipe.tables.address import resolve
from raypipe.tables.between import NOTHING_N2, Rows
from raypipe.tables.commits import (
    TRIES,
    Moved,
    append_once,
    newest,
    require_columns_of,
    require_rows_of,
    require_still_there,
)
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch.settings import WatchConfig

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


@dataclass(frozen=True)
class Window:
    """Images to check. rows: None for all rows of the version.

    key: names the window by what is in it. again: it was checked before, and nothing came since.
    missed: in words, the checks that did not run; their images are in the window.
    """

    number: int
    since: int | None
    version: TableVersion
    state: str
    rows: Rows | None
    images: int
    key: str
    again: bool = False
    missed: str = ""

    def __str__(self) -> str:
        came = "all" if self.since is None else f"what came after v{self.since}"
        return f"window {self.number} ({came} up to v{self.version.version})"


@dataclass(frozen=True)
class Waiting:
    """Too few images came for a check: they stay for the next one."""

    table: TableVersion
    since: int | None
    images: int
    needed: int
    missed: str = ""

    def __str__(self) -> str:
        came = "" if self.since is None else f" after v{self.since}"
        return (
            f"{self.images} images of {self.table.uri} came{came}, and a check needs "
            f"{self.needed}: they are checked with those that come next"
        )


class Log:
    """The events of one line. Several processes may add to it."""

    def __init__(self, uri: str, line: str, options: dict[str, str] | None) -> None:
        self.uri, self.line, self._options = resolve(uri), line, options
        self._base: Any = None
        self.entries: tuple[Entry, ...] = ()
        self.refresh()

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
        """Commit an event directly after those that were read; its number is given here.

        False if somebody else was first: nothing is written, and the newest version is read.
        """
        number = self.entries[-1].number + 1 if self.entries else 1
        entry = replace(entry, number=number)
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
        found = (entry for entry in reversed(self.entries) if entry.event in events)
        return next(found, None)

    def elsewhere(self, line_at: Callable[[str], str]) -> dict[str, int]:
        """{address: the newest version that was checked there} of tables that would have this line
        but for their address. line_at: the line of a table at this address."""
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

    @property
    def open(self) -> Entry | None:
        """The window that was opened last, if nobody has finished it."""
        last = self.last("opened", "checked", "left")
        return last if last and last.event == "opened" else None


class Windows:
    """The windows of one table, and how far its checks have come."""

    def __init__(
        self,
        source: TableConfig,
        cfg: WatchConfig,
        run: RunConfig,
        say: Callable[[str], None],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """say: told what a user should know. Raises DataError for tables that cannot be read."""
        self._source, self._cfg, self._say, self._clock = source, cfg, say, clock
        self._table, self._newest = ImageTable.open_pinned(source)
        chosen = _selection(self._table, self._newest, source)

        def line(uri: str) -> str:
            return key_of("windows", uri, self._newest.table_id, *chosen, cfg.name)

        self.log = Log(cfg.place(run, "windows"), line(self._newest.uri), cfg.storage_options)
        self._line_at = line

    def next(self) -> Window | Waiting:
        """The window to check now. Needs a connection to Ray. Raises DataError as tables do."""
        if self._cfg.window == "all" or self._source.version is not None:
            return self._whole()
        if self._cfg.window == "last_n":
            return self._last_n()
        if not self.log.entries:
            self._tell_moved()
        for attempt in range(1, TRIES + 1):
            found = self._look()
            if found is not None:
                return found
            retries.pause(attempt)
        raise retries.busy(self.log.uri, f"{TRIES} tries")

    def _tell_moved(self) -> None:
        """Say so if this table was checked at another address: its windows begin anew here."""
        for uri, version in self.log.elsewhere(self._line_at).items():
            self._say(
                f"{self._newest.uri} was checked as {uri} before, up to v{version}: it is the same "
                "table, moved or copied. At another address its windows begin anew, with all of "
                "its images"
            )

    def checked(self, window: Window, evidence: str, predictions: tuple[str, str]) -> None:
        """Keep that this window has its evidence. Does nothing the second time.

        Nor if the window was left, and its images are in a newer one, which has more. A check of
        the whole table gets a line going again that nobody can follow any more.
        """
        if not window.number:
            self._begin_anew(window, evidence, predictions)
            return
        for attempt in range(1, TRIES + 1):
            # Another check of it may have failed, and left it: this one has its evidence.
            last = self.log.last("opened", "checked", "left")
            if last is None or last.event == "checked" or not _is_of(last, window):
                return
            done = replace(
                last,
                event="checked",
                at=self._clock(),
                evidence=evidence,
                predictions=predictions[0],
                prediction=predictions[1],
            )
            if self._add(done):
                return
            retries.pause(attempt)
        raise retries.busy(self.log.uri, f"{TRIES} tries")

    def _begin_anew(self, window: Window, evidence: str, predictions: tuple[str, str]) -> None:
        """Later windows begin behind this one, which had all rows, if nobody could tell where else.

        So after watch.window=all, once.
        """
        if self._cfg.window != "all" or self._source.version is not None:
            return
        for attempt in range(1, TRIES + 1):
            last = self.log.last("checked")
            if last is None or not self._is_lost(last, window.version):
                return
            every = between.selected(self._table, window.version, self._source.where)
            done = Entry(
                0,
                "checked",
                last.window + 1,
                None,
                window.version.version,
                window.state,
                sum(every.counts),
                self._clock(),
                evidence,
                *predictions,
            )
            if self._add(done):
                self._say(f"Later checks begin behind this one, as window {done.window}")
                return
            retries.pause(attempt)
        raise retries.busy(self.log.uri, f"{TRIES} tries")

    def _is_lost(self, last: Entry, version: TableVersion) -> bool:
        """Can nobody tell any more which images came after the window `last`?"""
        try:
            self._by_log(last, version)
        except Unreachable:
            raise
        except DataError:
            try:
                for entry in self._known():
                    self._identities(entry)
            except Unreachable:
                raise
            except DataError:
                return True
        return False

    def _known(self) -> list[Entry]:
        """Windows that were checked, oldest first, from the last one that had all rows."""
        return _of_line([entry for entry in self.log.entries if entry.event == "checked"])

    def leave(self, window: Window) -> None:
        """The window cannot be checked as it is: its images belong to the next one, with more."""
        for attempt in range(1, TRIES + 1):
            open_now = self.log.open
            if open_now is None or not _is_of(open_now, window):
                return
            if self._add(replace(open_now, event="left", at=self._clock())):
                return
            retries.pause(attempt)

    def _whole(self) -> Window:
        """All rows of the version, whatever was checked before."""
        state = between.state(self._table, self._newest, self._source.where)
        key = key_of("window", self._newest.identity, state)
        return Window(0, None, self._newest, state, None, 0, key)

    def _last_n(self) -> Window | Waiting:
        """The newest commits that have watch.last_n images together; all images if there are less.

        Where the log does not reach back so far, it is all images, too.
        """
        wanted = self._cfg.last_n
        where = self._source.where
        state = between.state(self._table, self._newest, where)
        everything = between.selected(self._table, self._newest, where)
        total = sum(everything.counts)
        if total < self._cfg.min_images:
            return Waiting(self._newest, None, total, self._cfg.min_images)
        since, rows = self._shortest(wanted) if total > wanted else (None, everything)
        key = key_of("last", wanted, since, self._newest.identity, state)
        mine = None if since is None else rows
        return Window(0, since, self._newest, state, mine, sum(rows.counts) or total, key)

    def _shortest(self, wanted: int) -> tuple[int | None, Rows]:
        """(version, what came after it): the last version after which `wanted` images came."""

        def after(number: int) -> Rows | None:
            try:
                before = self._table.pin(number)
                found = between.between(self._table, before, self._newest, self._source.where)
            except Unreachable:
                raise
            except DataError:
                return None
            return found.new

        # Back in steps that double, then forth by halving.
        newest = self._newest.version
        enough, step = -1, 1
        while newest - step >= 0:
            rows = after(newest - step)
            if rows is None:
                break
            if sum(rows.counts) >= wanted:
                enough = newest - step
                break
            step *= 2
        if enough < 0:
            return None, between.selected(self._table, self._newest, self._source.where)
        too_few = min(newest, newest - step // 2)
        while too_few - enough > 1:
            middle = (enough + too_few) // 2
            tried = after(middle)
            if tried is not None and sum(tried.counts) >= wanted:
                enough, rows = middle, tried
            else:
                too_few = middle
        assert rows is not None
        return enough, rows

    def _look(self) -> Window | Waiting | None:
        """One look at the log; None when somebody else was faster, so that it must be read anew."""
        log = self.log
        missed = self._missed()
        opened = log.open
        if opened is not None:
            window = self._reopen(opened, missed)
            if window is None:
                self._say(
                    f"Window {opened.window} (up to v{opened.version}) cannot be read any more: "
                    "its images are checked with the next one"
                )
                self._add(replace(opened, event="left", at=self._clock()))
            return window

        self._newest = self._table.newest()
        last = log.last("checked")
        state = between.state(self._table, self._newest, self._source.where)
        rows = None
        if last is None or (last.version, last.state) != (self._newest.version, state):
            rows = self._came(last, self._newest)
        images = sum(rows.counts) if rows else 0
        if last and not images:
            self._note_nothing(last)
            return self._again(last)
        assert rows is not None
        number = last.window + 1 if last else 1
        since = last.version if last else None
        entry = Entry(
            0, "opened", number, since, self._newest.version, state, images, self._clock()
        )
        if images < self._cfg.min_images:
            before = log.last("checked", "waiting", "left")
            known = before and before.event == "waiting" and before.state == state
            if known:
                self._note_nothing(entry)
            elif not self._add(replace(entry, event="waiting")):
                return None
            return Waiting(self._newest, since, images, self._cfg.min_images, missed)
        if not self._add(entry):
            return None
        return self._window(entry, self._newest, rows, missed=missed)

    def _add(self, entry: Entry) -> bool:
        return self.log.add(entry, self._cfg.name, self._newest.uri)

    def _note_nothing(self, about: Entry) -> None:
        """So that the next check does not take this one for missed."""
        at, every_h = self._clock(), self._cfg.every_h
        if every_h and at - self.log.entries[-1].at > timedelta(hours=every_h / 2):
            # If somebody else was faster, their event says as much.
            self._add(replace(about, event="nothing", at=at))

    def _again(self, last: Entry) -> Window | Waiting:
        """The window that was checked last: nothing came since.

        Waiting where its images cannot be read any more: a quiet night after a VACUUM is no error.
        """
        window = self._reopen(last, "", again=True)
        if window is not None:
            return window
        self._say(
            f"Nothing came since window {last.window} (up to v{last.version}), and its images "
            "cannot be read any more: it is not looked at again"
        )
        return Waiting(self._newest, last.version, 0, self._cfg.min_images)

    def _reopen(self, entry: Entry, missed: str, again: bool = False) -> Window | None:
        """The window of an entry; None if its version, or the state of it, is gone."""
        try:
            version = self._table.pin(entry.version)
            state = between.state(self._table, version, self._source.where)
            if state != entry.state:
                return None
            before = [e for e in self.log.entries if e.event == "checked"]
            before = [e for e in before if e.window < entry.window and entry.since is not None]
            rows = self._came(before[-1] if before else None, version, before)
        except Unreachable:
            raise
        except DataError:
            return None
        return self._window(entry, version, rows, again, missed)

    def _window(
        self,
        entry: Entry,
        version: TableVersion,
        rows: Rows,
        again: bool = False,
        missed: str = "",
    ) -> Window:
        """Without a window before it, all rows of the version are one prediction of it."""
        key = key_of("window", self.log.line, entry.window, version.identity, entry.state)
        mine = None if entry.since is None else rows
        return Window(
            entry.window,
            entry.since,
            version,
            entry.state,
            mine,
            sum(rows.counts),
            key,
            again,
            missed,
        )

    def _came(
        self,
        last: Entry | None,
        version: TableVersion,
        windows: Sequence[Entry] | None = None,
    ) -> Rows:
        """The rows that came after the window `last`. windows: those checked before, oldest first.

        Raises DataError where nothing tells it any more.
        """
        if last is None:
            return between.selected(self._table, version, self._source.where)
        where = self._source.where
        try:
            return self._by_log(last, version)
        except Unreachable:
            raise
        except DataError as e:
            self._say(
                f"What came after v{last.version} cannot be told from the log ({e.what}): all "
                "images are compared with those of earlier checks, by id and sha256"
            )
        known = self._known() if windows is None else _of_line(windows)
        known_N2 = np.concatenate([NOTHING_N2, *(self._identities(entry) for entry in known)])
        everything = between.selected(self._table, version, where)
        return between.compare(self._table, everything, known_N2).new

    def _by_log(self, last: Entry, version: TableVersion) -> Rows:
        """The rows that came after the window `last`, by the table's log. Raises DataError."""
        where = self._source.where
        before = self._table.pin(last.version)
        if between.state(self._table, before, where) != last.state:
            raise DataError(f"v{last.version} has other rows now")
        if between.restored(self._table, before, version):
            raise DataError("the table was restored to an older version")
        return between.between(self._table, before, version, where).new

    def _identities(self, entry: Entry) -> np.ndarray:
        """Of the images of a checked window, from its prediction."""
        columns = ["image_id", "sha256"]
        options = self._source.storage_options
        parts, why = [NOTHING_N2], ""
        try:
            for rows in batches(entry.predictions, entry.prediction, columns, options):
                ids, hashes = rows["image_id"].to_pylist(), rows["sha256"].to_pylist()
                parts.append(between.identity_of(ids, hashes))
        except Unreachable:
            raise
        except DataError as e:
            # A table whose files are gone, or another one in its place.
            why = f": {e.what}"
        found_N2 = np.concatenate(parts)
        if len(found_N2) < entry.images:
            raise DataError(
                f"The predictions of window {entry.window} are gone, so nobody can tell which "
                "images were checked",
                got=f"{len(found_N2)} of {entry.images} in {entry.predictions}{why}",
                fix="Run the check once with watch.window=all: it looks at every image, and later "
                "checks begin behind it. Or set another watch.name, which begins with all images",
            )
        return found_N2

    def _missed(self) -> str:
        """Which checks did not run, in words, by watch.every_h; "" if none or nobody knows."""
        last = self.log.last("checked", "waiting", "nothing")
        if last is None or self._cfg.every_h is None:
            return ""
        every = timedelta(hours=self._cfg.every_h)
        late = self._clock() - last.at
        if late < -every:
            return f"the clock stands before the last check ({last.at:%Y-%m-%d %H:%M} UTC)"
        count = int(late / every + (1 - LATE)) if late > LATE * every else 0
        if not count:
            return ""
        checks = "1 check" if count == 1 else f"{count} checks"
        return f"{checks} did not run since {last.at:%Y-%m-%d %H:%M} UTC"


def _selection(
    table: ImageTable, version: TableVersion, source: TableConfig
) -> tuple[Any, float | str, Any]:
    """(where, sample, columns): which rows a line is about, by the names in the files.

    A column that was renamed (column mapping) is the same column. Names of columns that decide
    nothing about a window are not in it.
    """
    stored = table.snapshot(version).stored_names(table.uri)

    def in_files(name: str) -> str:
        return stored.get(name, name)

    where = {in_files(name): wanted for name, wanted in source.where.items()}
    default = type(source.columns)()
    columns = default.model_copy(
        update={
            "id": in_files(source.columns.id),
            "image": in_files(source.columns.image),
        }
    )
    return where, source.sample_key, columns


def _of_line(windows: Sequence[Entry]) -> list[Entry]:
    """From the last one that had all rows of the table: what was before, nobody can tell."""
    first = max((n for n, entry in enumerate(windows) if entry.since is None), default=0)
    return list(windows[first:])


def _is_of(entry: Entry, window: Window) -> bool:
    """Is the event about this window? One that is opened after it was left has its number, too."""
    known = entry.window, entry.version, entry.state
    return known == (window.number, window.version.version, window.state)
