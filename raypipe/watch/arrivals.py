"""Which rows came into a table: after a checked window, or with the newest commits.

`tables/between.py` tells from the table's own log what came. Where it cannot, all images are
compared with those of earlier windows, whose identities are in the predictions table. So they are
after a RESTORE, which brings back rows that an earlier window may have had. Where these predictions
are gone, too, nobody can tell, and the message names the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raypipe.errors import DataError, Unreachable
from raypipe.serve.links import batches
from raypipe.tables import between
from raypipe.tables.between import NOTHING_N2, Rows
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch.window_log import Entry, since_all


class Arrivals:
    """What came into one table. Only the rows that its configuration selects count."""

    def __init__(self, table: ImageTable, source: TableConfig, say: Callable[[str], None]) -> None:
        """say: told when the table's log does not say what came."""
        self._table, self._source, self._say = table, source, say

    def selection(self, version: TableVersion) -> tuple[Any, float | str, Any]:
        """(where, sample, columns): which rows count, by the names that columns have in the files.

        A column that was renamed (column mapping) stays the same column. Columns that decide
        nothing about a window have their default names here.
        """
        source = self._source
        stored = self._table.snapshot(version).stored_names(self._table.uri)

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

    def state(self, version: TableVersion) -> str:
        """A name for the rows of a version by what they are."""
        return between.state(self._table, version, self._source.where)

    def all_of(self, version: TableVersion) -> Rows:
        return between.selected(self._table, version, self._source.where)

    def after(self, last: Entry | None, version: TableVersion, checked: Sequence[Entry]) -> Rows:
        """The rows that came after the window `last`, up to this version; all rows if it is None.

        checked: the windows that were checked before, oldest first. Raises DataError if nobody can
        tell any more.
        """
        if last is None:
            return self.all_of(version)
        try:
            return self._by_log(last, version)
        except Unreachable:
            raise
        except DataError as e:
            self._say(
                f"What came after v{last.version} cannot be told from the log ({e.what}): all "
                "images are compared with those of earlier checks, by id and sha256"
            )
        known = since_all(checked)
        known_N2 = np.concatenate([NOTHING_N2, *(self._identities(entry) for entry in known)])
        everything = self.all_of(version)
        return between.compare(self._table, everything, known_N2).new

    def is_lost(self, last: Entry, version: TableVersion, checked: Sequence[Entry]) -> bool:
        """Can nobody tell any more which images came after the window `last`?"""
        try:
            self._by_log(last, version)
        except Unreachable:
            raise
        except DataError:
            try:
                for entry in since_all(checked):
                    self._identities(entry)
            except Unreachable:
                raise
            except DataError:
                return True
        return False

    def of_newest_commits(self, wanted: int, newest: TableVersion) -> tuple[int | None, Rows]:
        """(version, what came after it): the last version after which `wanted` images came.

        Where the log does not reach back so far: (None, all rows).
        """

        def after(number: int) -> Rows | None:
            try:
                before = self._table.pin(number)
                found = between.between(self._table, before, newest, self._source.where)
            except Unreachable:
                raise
            except DataError:
                return None
            return found.new

        # Back in steps that double, until enough images came, or nobody can tell how many.
        too_few, enough, step = newest.version, -1, 1
        # None: all of them, as after no version at all, or as nobody can tell.
        rows: Rows | None = None
        while enough < 0 and newest.version >= step:
            number = newest.version - step
            tried = after(number)
            if tried is None or sum(tried.counts) >= wanted:
                enough, rows = number, tried
            else:
                too_few = number
            step *= 2
        # Then forth by halving the distance to a version after which too few came.
        while too_few - enough > 1:
            middle = (enough + too_few) // 2
            tried = after(middle)
            if tried is not None and sum(tried.counts) >= wanted:
                enough, rows = middle, tried
            elif tried is None and rows is None:
                # It cannot be read, as those before it.
                enough = middle
            else:
                too_few = middle
        return (None, self.all_of(newest)) if rows is None else (enough, rows)

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
        """The identities of the images of a checked window, from its prediction."""
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
            # The files of that table are gone, or another table is in its place.
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
