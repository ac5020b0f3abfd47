"""Rows of a small table that only ever grows, in the order of its commits.

A clock may go back, and a writer's clock proves nothing. The number of the commit that added a
file does. Such a table is evidence only while nobody changed a row of it: `altered` names the
first commit that did more than append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypipe.tables import history, log, scan
from raypipe.tables.address import resolve
from raypipe.tables.table import ImageTable

COMMIT = "raypipe.commit"  # of a row: the number of the commit that added it


@dataclass(frozen=True)
class Appended:
    """rows: with COMMIT (None: the log has forgotten it, or a compaction moved the row), oldest
    first. altered: what changed rows, "" if nothing did. place: the table, as resolved."""

    rows: tuple[dict[str, Any], ...]
    altered: str = ""
    place: str = ""


def read(uri: str, storage_options: dict[str, str] | None = None, clock: str = "") -> Appended:
    """All rows of the table at `uri`; none if there is no table.

    clock: the column that orders rows whose commit is not known. Raises DataError.
    """
    path = resolve(uri)
    if not ImageTable.exists(path, storage_options):
        return Appended((), "", path)
    table = ImageTable(path, storage_options=storage_options)
    pinned = table.pin()
    delta = table.at(pinned)
    placed = log.Places(delta.table_uri)
    added: dict[str, int] = {}
    altered = ""
    for entry in reversed(history.commits(delta, path, storage_options, files=True)):
        number, what = entry["version"], entry["operation"] or "a commit"
        if entry["removed"] and entry["changes"]:
            altered = altered or f"{what} in commit {number} changed rows"
        if entry["changes"]:
            # As a scan names the files.
            added |= {placed.name(name): number for name in entry["added"]}
    names = [field.name for field in delta.schema().fields]
    found: list[dict[str, Any]] = []
    for fragment, part in scan.located(table, pinned, names):
        commit = added.get(fragment.file)
        for row in part.drop_columns([scan.ROW]).to_pylist():
            found.append({**row, COMMIT: commit})
    # Rows without a commit are older than the log, or were compacted: they come first.
    found.sort(key=lambda row: (_order(row), str(row.get(clock, ""))))
    return Appended(tuple(found), altered, path)


def _order(row: dict[str, Any]) -> int:
    return -1 if row[COMMIT] is None else int(row[COMMIT])
