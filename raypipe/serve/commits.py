"""Collects what workers have predicted, and commits it in parts, each once.

A part is some neighbouring pieces. It is committed directly on a version whose parts are known: if
a rival commits first, what it has committed is left out, and the rest is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.serve import pieces
from raypipe.serve.links import links
from raypipe.serve.pieces import Piece
from raypipe.serve.predicted_rows import whole
from raypipe.serve.workers import Done
from raypipe.tables import retries
from raypipe.tables.commits import TRIES
from raypipe.tables.parts import PartTable

log = logging.getLogger("raypipe")

# A commit waits for so many rows, bytes or seconds, whichever comes first. It is in the driver's
# memory, and what a kill loses.
COMMIT_ROWS = 20_000
COMMIT_BYTES = 64 * 2**20
COMMIT_S = 60.0


class Stopped(Exception):
    """The caller asked to stop: what was predicted is committed, the rest is not begun."""


@dataclass(frozen=True)
class Calls:
    """What a prediction tells its caller, and asks.

    progress: (images done, all images). say: a message. stop: asked before each task.
    commit_s: a commit waits at most so long for more rows.
    """

    progress: Callable[[int, int], None] = lambda done, total: None
    say: Callable[[str], None] = log.warning
    stop: Callable[[], bool] = lambda: False
    commit_s: float = COMMIT_S


class Commits:
    """Collects predicted pieces and commits them, each once."""

    def __init__(self, out: PartTable, same: dict[str, Any], images: int, calls: Calls) -> None:
        """same: the columns with one value in all rows. images: to predict, over all runs."""
        self._out, self._images, self._calls = out, images, calls
        self.same = same
        self._waiting: list[tuple[Piece, pa.Table]] = []
        self._rows, self._bytes = 0, 0  # of what waits
        self._since = time.monotonic()
        self._done = 0
        self.made = 0
        self.device_s = 0.0  # that workers took for these rows
        self.there: set[int] = set()
        self._look()

    def _look(self) -> None:
        """Which pieces are in the table: this run's, an earlier one's, or a rival's."""
        link = links(self._out.counts()).get(self.same["key"])
        self.there = link.pieces if link else set()

    def begin(self, done: int) -> None:
        """So many images were done before this run."""
        self._done = done
        self._since = time.monotonic()
        self._calls.progress(done, self._images)

    def is_there(self, number: int) -> bool:
        """Need this piece not be begun?"""
        return self._calls.stop() or number in self.there

    def has(self, cut: list[Piece]) -> bool:
        return self.there >= {piece.number for piece in cut}

    def add_all(self, stream: Iterator[Done]) -> None:
        for done, rows, seconds in stream:
            self.device_s += seconds
            self._rows += len(rows)
            self._bytes += rows.nbytes
            # The rows of its pieces, one after the other.
            start = 0
            for piece in done:
                self._waiting.append((piece, rows.slice(start, piece.rows)))
                start += piece.rows
            self._done += start
            self.made += start
            self._calls.progress(min(self._done, self._images), self._images)
            if self._is_due():
                self._commit()
        self._commit()

    def _is_due(self) -> bool:
        rows, size = self._rows, self._bytes
        waited = time.monotonic() - self._since
        return rows >= COMMIT_ROWS or size >= COMMIT_BYTES or waited >= self._calls.commit_s

    def _commit(self) -> None:
        """Commit what waits, in as many commits as it has gaps."""
        tables = {piece.number: table for piece, table in self._waiting}
        self._waiting, self._rows, self._bytes = [], 0, 0
        self._since = time.monotonic()
        self._keep(tables, self.same)

    def _keep(self, tables: dict[int, pa.Table], same: dict[str, Any]) -> None:
        """Commit these pieces, but those that are there. Raises DataError if others never rest."""
        lost = 0
        while missing := sorted(tables.keys() - self.there):
            # A part has no gaps: its name is its first and its last piece.
            first, last = pieces.neighbours(missing)[0]
            own = [tables[number] for number in range(first, last + 1)]
            part = same | {"part": pieces.part(first, last)}
            rows = whole(own, part)
            if self._out.add(rows):
                self.there.update(range(first, last + 1))
                continue
            # Somebody else has committed, perhaps these pieces.
            self._look()
            lost += 1
            if lost == TRIES:
                raise retries.busy(self._out.uri, f"{TRIES} tries")
            retries.pause(lost)

    def add_gone(self, rows: pa.Table, first: int) -> None:
        """Commit the rows that say what went, as pieces after all others."""
        same = self.same | {"gone": True}
        number = first
        for start in range(0, len(rows), COMMIT_ROWS):
            # One commit each, so that a part stays bounded.
            table = rows.slice(start, COMMIT_ROWS)
            self._keep({number: table}, same)
            number += 1

    def require_all(self) -> None:
        """Raise DataError if a part has lost rows since it was committed."""
        link = links(self._out.counts()).get(self.same["key"])
        have = link.have if link else 0
        rows = self.same["rows"]
        if have != rows:
            lack = f"lacks {rows - have} of the {rows} rows"
            more = f"has {have} rows instead of the {rows}"
            raise DataError(
                f"{self._out.uri} {lack if have < rows else more} of a prediction",
                rule="Its parts are all there, so somebody has changed them",
                fix=f"Delete its rows, key = '{self.same['key']}', to have them made again; "
                "or restore them",
            )
