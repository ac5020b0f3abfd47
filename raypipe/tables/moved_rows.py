"""Where rows of an older version are in a newer one, when only compactions lie between them.

A compaction moves rows to other files and changes none. Rows are recognised by a hash of all their
columns, image included. Rows that are equal in every column can stand for each other.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from deltalake import DeltaTable

from raypipe.errors import DataError
from raypipe.tables import fragment, log, scan
from raypipe.tables.changes import Place
from raypipe.tables.table import ImageTable, TableVersion


def moved(
    table: ImageTable, pinned: TableVersion, newest: DeltaTable, rows: Sequence[Place]
) -> list[Place]:
    """The places in version `newest` of these rows of version `pinned`. Raises DataError when a row
    is not there.
    """
    files = _files(table, newest)
    places = [place for place in rows if place.file in files]
    # Rows whose file is gone: file -> row numbers.
    missing = defaultdict[str, set[int]](set)
    for place in rows:
        if place.file not in files:
            missing[place.file].add(place.row)
    if not missing:
        return places

    # First the hashes of these rows in the old version, then the same hashes in the files that are
    # new since.
    wanted: Counter[bytes] = Counter()
    for place, digest in _hashes(table, pinned, lambda file: file in missing):
        if place.row in missing[place.file]:
            wanted[digest] += 1
    lost = sum(map(len, missing.values())) - wanted.total()
    if lost:
        raise DataError(
            f"{lost} rows are of files that {pinned} does not have",
            rule="The table was moved, or restored from a backup, since they were judged",
            fix="Run again: the version is judged anew",
        )
    before = _files(table, table.delta(pinned.version))
    now = TableVersion(table.uri, newest.version())
    for place, digest in _hashes(table, now, lambda file: file not in before):
        if wanted[digest] > 0:
            wanted[digest] -= 1
            places.append(place)
    if +wanted:
        raise DataError(
            f"{wanted.total()} rows of {pinned} are not in {now} any more",
            fix="Pin the newest version and run again",
        )
    return places


def _files(table: ImageTable, delta: DeltaTable) -> set[str]:
    files, _ = log.files(delta, table.uri, {})
    return {file.name for file in files}


def _hashes(
    table: ImageTable, version: TableVersion, of: Callable[[str], bool]
) -> Iterator[tuple[Place, bytes]]:
    """Place of each row in the files that `of` selects by name, and a hash of all its columns."""
    fragments, schema = scan.plan(table.without_sample(), version)
    options = table.storage_options
    for part, start in zip(fragments, scan.starts(fragments), strict=True):
        if not of(part.file):
            continue
        rows, rows_N = fragment.read([part], schema, schema.names, {}, options)
        # `rows_N` counts within the row group, a place counts within the file.
        numbers = (rows_N + start).tolist()
        for row, number in zip(rows.to_pylist(), numbers, strict=True):
            content = repr(row).encode()
            yield Place(part.file, number), hashlib.sha256(content).digest()
