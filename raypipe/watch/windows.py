"""Which images a check looks at: those that came since the last one, each once.

The log of windows (window_log.py) keeps how far the checks of a table have come. What came since
then, arrivals.py finds. A window needs no clock: versions say what is new.

Where nobody can tell what came, a check fails and says so, until one with watch.window=all has
looked at every image. That check is noted as a window without `since`, and later windows begin
behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from raypipe.config import RunConfig, key_of
from raypipe.errors import DataError, Unreachable
from raypipe.tables import retries
from raypipe.tables.between import Rows
from raypipe.tables.commits import TRIES
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch.arrivals import Arrivals
from raypipe.watch.settings import WatchConfig
from raypipe.watch.window_log import Entry, Log, missed_checks


@dataclass(frozen=True)
class Window:
    """Images to check. rows: None for all rows of the version.

    key: names the window by what is in it. again: it was checked before, and nothing came since.
    missed: in words, the checks that did not run or failed; their images are in the window.
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
        if not self.images:
            return f"No image of {self.table.uri} came{came}: there is nothing to check"
        images, they = f"{self.images} images", "they are"
        if self.images == 1:
            images, they = "1 image", "it is"
        return (
            f"{images} of {self.table.uri} came{came}, and a check needs {self.needed}: {they} "
            "checked with those that come next"
        )


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
        self._arrivals = Arrivals(self._table, source, say)
        chosen = self._arrivals.selection(self._newest)

        def line(uri: str) -> str:
            return key_of("windows", uri, self._newest.table_id, *chosen, cfg.name)

        self.log = Log(cfg.place(run, "windows"), line(self._newest.uri), cfg.storage_options)
        self._line_at = line

    def next(self) -> Window | Waiting:
        """The window to check now. Needs a connection to Ray. Raises DataError as tables do."""
        if self._cfg.window != "since_last" or self._source.version is not None:
            self._tell_unused()
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

    def _tell_unused(self) -> None:
        """Name the settings that do nothing: these windows may have the same images again."""
        horizon = self._cfg.horizon
        unused = {
            "watch.every_h": self._cfg.every_h is not None,
            "watch.horizon.spans": horizon is not None and bool(horizon.spans),
        }
        by = f"watch.window={self._cfg.window}"
        if self._source.version is not None:
            by = f"watch.batch.version={self._source.version}"
        for name, is_set in unused.items():
            if is_set:
                self._say(
                    f"{name} has no effect with {by}: it is about checks that follow each other, "
                    "as with watch.window=since_last and no version"
                )

    def _tell_moved(self) -> None:
        """Say so if this table was checked at another address: its windows begin anew here."""
        for uri, version in self.log.elsewhere(self._line_at).items():
            self._say(
                f"{self._newest.uri} was checked as {uri} before, up to v{version}: it is the same "
                "table, moved or copied. At another address its windows begin anew, with all of "
                "its images"
            )

    def checked(self, window: Window, evidence: str, predictions: tuple[str, str]) -> None:
        """Note that this window has its evidence. Does nothing the second time.

        It also does nothing if the window was left and its images are in a newer one, which has
        more. After a check of the whole table, a line goes on that nobody could follow any more.
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
        """Later windows begin behind this one, if nobody can tell any more what came since.

        This one had all rows, by watch.window=all. It happens once: afterwards it can be told.
        """
        if self._cfg.window != "all" or self._source.version is not None:
            return
        for attempt in range(1, TRIES + 1):
            last, before = self.log.last("checked"), self.log.checked
            if last is None or not self._arrivals.is_lost(last, window.version, before):
                return
            every = self._arrivals.all_of(window.version)
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
        state = self._arrivals.state(self._newest)
        key = key_of("window", self._newest.identity, state)
        return Window(0, None, self._newest, state, None, 0, key)

    def _last_n(self) -> Window | Waiting:
        """The newest commits that have watch.last_n images together; all images if there are less.

        Where the log does not reach back so far, it is all images, too.
        """
        wanted = self._cfg.last_n
        state = self._arrivals.state(self._newest)
        everything = self._arrivals.all_of(self._newest)
        total = sum(everything.counts)
        if total < self._cfg.min_images:
            return Waiting(self._newest, None, total, self._cfg.min_images)
        since: int | None = None
        rows = everything
        if total > wanted:
            since, rows = self._arrivals.of_newest_commits(wanted, self._newest)
        key = key_of("last", wanted, since, self._newest.identity, state)
        mine = None if since is None else rows
        return Window(0, since, self._newest, state, mine, sum(rows.counts) or total, key)

    def _look(self) -> Window | Waiting | None:
        """One look at the log; None if another process was faster, and the log was read anew."""
        log = self.log
        before = log.last("checked", "waiting", "nothing")
        missed = missed_checks(before, self._cfg.every_h, self._clock())
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
        state = self._arrivals.state(self._newest)
        rows = None
        if last is None or (last.version, last.state) != (self._newest.version, state):
            rows = self._arrivals.after(last, self._newest, log.checked)
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
        """Note a check that found nothing new, so that the next one does not call it missed."""
        at, every_h = self._clock(), self._cfg.every_h
        if every_h and at - self.log.entries[-1].at > timedelta(hours=every_h / 2):
            # If another process was faster, its event says the same.
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
        """The window of an entry; None if its version is gone, or has other rows now."""
        try:
            version = self._table.pin(entry.version)
            if self._arrivals.state(version) != entry.state:
                return None
            before = self.log.checked if entry.since is not None else []
            before = [one for one in before if one.window < entry.window]
            rows = self._arrivals.after(before[-1] if before else None, version, before)
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
        """The window of an entry whose images are `rows`.

        The first window has no rows of its own: all rows of the version are predicted as usual.
        """
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


def _is_of(entry: Entry, window: Window) -> bool:
    """Is the event about this window? One that is opened after it was left has its number, too."""
    known = entry.window, entry.version, entry.state
    return known == (window.number, window.version.version, window.state)
