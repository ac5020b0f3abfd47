"""Which rows came and went between two versions of a table, from the log where it tells.

The log lists the files of both versions. A file that both have, with the same deleted rows, holds
the same rows, and is not opened. What is left are files that were added, rewritten (UPDATE, MERGE,
OPTIMIZE, a restore) or got another deletion vector:
- nothing but added files: their rows are new, and nothing is read;
- no commit between says that data changed (OPTIMIZE): no row is new;
- else the rows of these files, and of no others, are compared by id and sha256 of the image.

Rows that are equal in both can stand for each other, so they are counted and not located.
Names: N rows; an identity is 16 bytes, as two uint64.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import ray

from raypipe.cluster.tasks import result
from raypipe.errors import DataError, without_secrets
from raypipe.tables import fragment, history, scan
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment, Options
from raypipe.tables.table import ImageTable, TableVersion

AHEAD = 16  # tasks at a time; each reads one row group


@dataclass(frozen=True)
class Rows:
    """Selected rows of a version, still to be read: row groups, and how to read them.

    Rows that are not selected count as deleted. Ids are texts in `schema` and in `where`.
    """

    fragments: list[Fragment]
    schema: pa.Schema
    where: Where
    counts: list[int]
    """Rows of each fragment."""


def selected(
    table: ImageTable, pinned: TableVersion, where: Where, only: Collection[str] | None = None
) -> Rows:
    """The rows of a version that match `where` and are in the table's sample; reads no image.

    only: of these files, by path. Raises DataError as tables do.
    """
    columns = [table.columns.id, table.columns.image]
    delta = table.at(pinned)
    table.require(delta, *columns, *where)
    # From here on `where` has the names and types of the files.
    fragments, schema = scan.plan(table, pinned, where, only)
    named, where = scan.with_names(table, schema, columns, where)
    counts = scan.counted(fragments, named, where, table.storage_options)
    rows = Rows(fragments, named, where, counts)
    return _some(rows)


def _some(rows: Rows) -> Rows:
    """Without the row groups that have none of the rows."""
    fragments: list[Fragment] = []
    counts: list[int] = []
    for group, count in zip(rows.fragments, rows.counts, strict=True):
        if count:
            fragments.append(group)
            counts.append(count)
    return replace(rows, fragments=fragments, counts=counts)


@dataclass(frozen=True)
class Difference:
    """new: rows of the later version that the earlier lacks. gone_N2: identities of the others'.

    files: how many had to be looked at. compared: their images had to be read.
    """

    new: Rows
    gone_N2: np.ndarray
    files: int
    compared: bool = False


NOTHING_N2 = np.empty((0, 2), np.uint64)


def between(
    table: ImageTable, before: TableVersion, after: TableVersion, where: Where
) -> Difference:
    """What came and what went from `before` to `after`, of the rows that match `where`.

    Raises DataError where the earlier version or a file of it is not there any more, and where
    the names mean other columns now.
    """
    # Column mapping gives a name to another column, and the files stay as they are.
    names = read_columns(table, where)
    was = table.snapshot(before).columns(table.uri, names)
    if was != table.snapshot(after).columns(table.uri, names):
        raise DataError(
            f"Columns of {table.uri} were renamed or got another type since v{before.version}",
            got=", ".join(names),
            rule="The same files now say something else",
        )

    # Files by path, with what is deleted of them.
    old = table.snapshot(before).paths(table.uri)
    now = table.snapshot(after).paths(table.uri)
    came = {path for path, deleted in now.items() if old.get(path) != deleted}
    went = {path for path, deleted in old.items() if now.get(path) != deleted}
    # OPTIMIZE: all rows are the same in other files.
    if went and only_moved(table, before, after):
        came = set()
        went = set()

    new = selected(table, after, where, came)
    if not went:
        return Difference(new, NOTHING_N2, len(came))
    # Rows of files that were rewritten are on both sides: they are compared.
    old_rows = selected(table, before, where, went)
    known_N2 = identities(table, old_rows)
    return compare(table, new, known_N2)


def state(table: ImageTable, pinned: TableVersion, where: Where) -> str:
    """A hash of the rows that a prediction of this version is about; see Snapshot.state."""
    return table.snapshot(pinned).state(table.uri, read_columns(table, where))


def read_columns(table: ImageTable, where: Where) -> list[str]:
    """The columns that decide what is predicted."""
    return list(dict.fromkeys([table.columns.id, table.columns.image, *where]))


def restored(table: ImageTable, before: TableVersion, after: TableVersion) -> bool:
    """Was the table set back to an older version between these two, so that old rows came back?

    False where old commits were cleaned up and nobody can tell. Raises DataError.
    """
    delta = table.at(after)
    entries = history.commits(delta, table.uri, table.storage_options, before.version)
    return any(str(entry["operation"]).upper() == "RESTORE" for entry in entries)


def only_moved(table: ImageTable, before: TableVersion, after: TableVersion) -> bool:
    """Does every commit between say that it changes no row? Raises DataError."""
    delta = table.at(after)
    options = table.storage_options
    entries = history.commits(delta, table.uri, options, before.version)
    # Old commits may have been cleaned up.
    if len(entries) != after.version - before.version:
        return False
    return not any(entry["changes"] for entry in entries)


def compare(table: ImageTable, rows: Rows, known_N2: np.ndarray) -> Difference:
    """Which of `rows` are new, and which of the known identities they lack. Reads the images."""
    found = list(_identified(table, rows))
    parts = [identities_N2 for _, identities_N2 in found]
    mine_N2 = np.concatenate([NOTHING_N2, *parts])
    is_new = surplus(mine_N2, known_N2)

    # Of each row group only the new rows stay.
    fragments: list[Fragment] = []
    counts: list[int] = []
    start = 0
    for group, (rows_N, part_N2) in zip(rows.fragments, found, strict=True):
        chosen = rows_N[is_new[start : start + len(part_N2)]]
        start += len(part_N2)
        fragments.append(_only(group, chosen))
        counts.append(len(chosen))
    new = _some(replace(rows, fragments=fragments, counts=counts))
    is_gone = surplus(known_N2, mine_N2)
    files = len({group.file for group in rows.fragments})
    return Difference(new, known_N2[is_gone], files, compared=True)


def identities(table: ImageTable, rows: Rows) -> np.ndarray:
    """uint64 (N, 2) of all the rows, in order. Reads the images."""
    return np.concatenate([NOTHING_N2, *(part for _, part in _identified(table, rows))])


def identity_of(names: Iterable[str | None], hashes: Iterable[str | None]) -> np.ndarray:
    """uint64 (N, 2) of rows with these ids and sha256 of their images."""
    joined = bytearray()
    for pair in zip(names, hashes, strict=True):
        # repr keeps None and the text "None" apart.
        text = repr(pair).encode()
        joined += hashlib.blake2b(text, digest_size=16).digest()
    numbers = np.frombuffer(bytes(joined), np.uint64)
    return numbers.reshape(-1, 2)


def surplus(mine_N2: np.ndarray, others_M2: np.ndarray) -> np.ndarray:
    """bool (N,): the rows that mine has more often than others have; of equal ones the last."""
    if not len(mine_N2) or not len(others_M2):
        return np.ones(len(mine_N2), bool)
    # Equal rows get the same number.
    both = np.concatenate([mine_N2, others_M2])
    _, groups = np.unique(both, axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    mine_N = groups[: len(mine_N2)]
    others_M = groups[len(mine_N2) :]
    other_counts = np.bincount(others_M, minlength=groups.max() + 1)

    # The how-manieth of its equals each row is: sorted, its place less that of the first.
    order = np.argsort(mine_N, kind="stable")
    sorted_N = mine_N[order]
    first_N = np.searchsorted(sorted_N, sorted_N)
    nth_N = np.empty(len(mine_N), np.int64)
    nth_N[order] = np.arange(len(mine_N)) - first_N
    is_more: np.ndarray = nth_N >= other_counts[mine_N]
    return is_more


def _identified(table: ImageTable, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each row group: the rows' numbers in it, and their identities. By tasks on the cluster."""
    columns = (table.columns.id, table.columns.image)
    how = (rows.schema, columns, rows.where, table.storage_options)
    if not ray.is_initialized():
        # A dry run. Ray would start a cluster for the first task.
        yield from (_identify(group.for_task(), how) for group in rows.fragments)
        return
    reading = ray.put(how)
    task = ray.remote(num_cpus=1, max_retries=3)(without_secrets(_identify))
    # A few tasks at a time, and their results in order.
    started: deque[ray.ObjectRef] = deque()
    for group in rows.fragments:
        started.append(task.remote(group.for_task(), reading))
        if len(started) >= AHEAD:
            yield result(started.popleft())
    while started:
        yield result(started.popleft())


def _identify(
    group: Fragment, reading: tuple[pa.Schema, tuple[str, str], Where, Options]
) -> tuple[np.ndarray, np.ndarray]:
    schema, (name, image), where, options = reading
    # One column may be both.
    wanted = list(dict.fromkeys([name, image]))
    rows, rows_N = fragment.read([group], schema, wanted, where, options)
    names = rows[name].to_pylist()
    hashes = sha256s(rows[image])
    return rows_N, identity_of(names, hashes)


def sha256s(images: pa.ChunkedArray) -> list[str | None]:
    """The sha256 of each image, in hex; None where there is none."""
    hashes: list[str | None] = []
    for image in images:
        data = image.as_buffer() if image.is_valid else None
        hashes.append(None if data is None else hashlib.sha256(data).hexdigest())
    return hashes


def _only(group: Fragment, rows_N: Sequence[int] | np.ndarray) -> Fragment:
    """The row group with these rows alone; the others count as deleted."""
    deleted_N = np.ones(group.rows, bool)
    deleted_N[rows_N] = False
    packed = np.packbits(deleted_N).tobytes() if deleted_N.any() else b""
    return replace(group, deleted=packed)
