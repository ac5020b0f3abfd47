"""The request log: what users sent to the online server, what it answered, what they corrected.

ROOT/images     one row for each image, under the sha256 of its bytes, however often it was sent.
                It is an image table: `raypipe drift` and `raypipe predict` read it as any other
ROOT/answers    one row for each answer: request id, image, model, scores, embedding; and one for
                each prediction of a shadow
ROOT/feedback   one row for each label that came back; for a request the last one counts

Several replicas write to it.
An append goes directly on the version that was read (commits.py); if another commit came first, the
ids of its images are read, and those that are there by now are left out. Files whose ids are known
are not opened again: two replicas that write in turns would else read the whole table each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from raypipe.tables import retries, scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import TRIES, Moved, append_once
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import SCHEMA
from raypipe.tables.table import ImageTable

_TIME = pa.timestamp("us", tz="UTC")
# An image table, without what only ingest finds out.
_NOT_HERE = ("look", "family", "image")
IMAGES = pa.schema(
    [
        *(field for field in SCHEMA if field.name not in _NOT_HERE),
        ("time", _TIME),
        ("image", pa.binary()),
    ]
)
ANSWERS = pa.schema(
    [
        ("request_id", pa.string()),
        ("time", _TIME),
        ("image_id", pa.string()),
        ("model", pa.string()),
        # champion, challenger or shadow
        ("role", pa.string()),
        ("label", pa.string()),
        ("scores", pa.list_(pa.float32())),
        ("classes", pa.list_(pa.string())),
        ("embedding", pa.list_(pa.float32())),
        ("seconds", pa.float64()),
    ]
)
FEEDBACK = pa.schema(
    [
        ("request_id", pa.string()),
        ("label", pa.string()),
        # model.task, as the label was read
        ("task", pa.string()),
        ("time", _TIME),
    ]
)
# The log of a table keeps minima and maxima of these columns only.
_STATISTICS: dict[str, str | None] = {"delta.dataSkippingStatsColumns": "image_id,time"}
_PATH = "requests/"


@dataclass(frozen=True)
class RequestTables:
    """The addresses of the three tables."""

    images: str
    answers: str
    feedback: str

    @classmethod
    def below(cls, root: str) -> RequestTables:
        root = resolve(root).rstrip("/")
        return cls(f"{root}/images", f"{root}/answers", f"{root}/feedback")


@dataclass
class RequestLog:
    """Writes to the three tables. One thread at a time."""

    tables: RequestTables
    options: dict[str, str] | None = None
    # The ids that are there, at which version, and the files that they were read from.
    _known: set[bytes] = field(default_factory=set)
    _known_at: int = -1
    _files: dict[str, bytes] = field(default_factory=dict)
    # Ids that were appended here since: their files are not in `_files` yet.
    _mine: set[bytes] = field(default_factory=set)

    def add(
        self, images: Mapping[str, Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add images by their sha256, those that are new, and then the answers.

        So no answer refers to an image that is not there. Raises DataError if a table cannot be
        written; the same call may then be made again.
        """
        if images:
            self._append(self.tables.images, "requests", lambda base: self._new(images, base))
        self._add_rows(self.tables.answers, ANSWERS, answers, "answers")

    def add_feedback(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add labels by request id. Raises DataError if the table cannot be written."""
        self._add_rows(self.tables.feedback, FEEDBACK, rows, "feedback")

    def _add_rows(
        self, uri: str, schema: pa.Schema, rows: Sequence[Mapping[str, Any]], why: str
    ) -> None:
        if not rows:
            return
        table = pa.Table.from_pylist([dict(row) for row in rows], schema)
        self._append(uri, why, lambda base: table)

    def _append(self, uri: str, why: str, make: Callable[[DeltaTable | None], pa.Table]) -> None:
        """Append what `make` gives for the newest version, before anybody else does."""
        for attempt in range(1, TRIES + 1):
            base = None
            if ImageTable.exists(uri, self.options):
                base = ImageTable(uri, storage_options=self.options).delta()
            rows = make(base)
            if not len(rows):
                return
            try:
                after = append_once(
                    uri, rows, base, commit_properties(why), _STATISTICS, self.options
                )
            except Moved:
                retries.pause(attempt)
                continue
            if uri == self.tables.images:
                self._mine |= {_short(name) for name in rows["image_id"].to_pylist()}
                self._known_at = after.version()
            return
        raise retries.busy(uri, f"{TRIES} tries")

    def _new(self, images: Mapping[str, Mapping[str, Any]], base: DeltaTable | None) -> pa.Table:
        """The rows of images that the table lacks."""
        if base is None:
            # Somebody has moved or removed it.
            self._known, self._mine, self._files, self._known_at = set(), set(), {}, -1
        elif base.version() != self._known_at:
            self._learn(base.version())
            self._known_at = base.version()
        # Each image once, however often and to whichever replica it was sent.
        rows = []
        for sha256, image in images.items():
            short = _short(sha256)
            if short in self._known or short in self._mine:
                continue
            names = {"image_id": sha256, "sha256": sha256, "path": _PATH + sha256}
            rows.append({**image, **names, "source": "requests", "bytes": len(image["image"])})
        return pa.Table.from_pylist(rows, IMAGES)

    def _learn(self, version: int) -> None:
        """Know the ids of this version."""
        table = ImageTable(self.tables.images, storage_options=self.options)
        pinned = table.pin(version)
        files = table.snapshot(pinned).paths(table.uri)
        # Their files are new here, and are read.
        self._mine = set()
        # Rows were deleted, or files rewritten: what was there may be gone.
        if any(files.get(path) != rows for path, rows in self._files.items()):
            self._known, self._files = set(), {}
        groups, _ = scan.plan(table, pinned, only=files.keys() - self._files.keys())
        _, parts = scan.numbered(table, pinned, ["image_id"], only=groups)
        for rows, _ in parts:
            self._known |= {_short(name) for name in rows["image_id"].to_pylist()}
        self._files = files


def _short(sha256: str) -> bytes:
    """Half of the hash: enough to tell images apart, in a quarter of the memory."""
    return bytes.fromhex(sha256[:32])
