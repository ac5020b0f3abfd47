"""Drop or relabel single rows of a pinned version.

A row is named by its file and its number in that file, never by its id. An id may be in a table
twice, may be null, and needs other quotes in each engine. A file never changes once it is written,
so (file, number) names one row for as long as the version exists.

How one commit changes rows:
1. Each file with such rows is written again, without them or with other values (`changed_file`).
2. One commit removes the old files from the table and adds the new ones.
3. The commit must not be rebased. It lands directly on the version that was read; otherwise `Moved`
   is raised, the new files are deleted, and the table is as before.
4. If the answer to a commit is lost, the batch id in its metadata shows whether it landed.

Cost: a touched file is copied once. deltalake cannot remove a file that has a deletion vector, or
whose path is percent-encoded. If a touched file is one of these, the whole table is written again;
from a store its rows then pass through a file in the temporary folder.
Source: the Delta protocol, sections "Add File and Remove File" and "Column Mapping".
"""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from raypipe import stores
from raypipe.errors import DataError
from raypipe.tables import casting, changed_file, constraints, fragment, log, retries, scan, storage
from raypipe.tables.changed_file import NewFile
from raypipe.tables.changes import Change, Changes, Place
from raypipe.tables.commits import BATCH, Moved
from raypipe.tables.moved_rows import moved
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable, TableVersion

__all__ = ["Change", "Changes", "Place", "commit", "drop", "places"]
# deltalake encodes other characters of a path a second time, and then removes no file.
_SAFE_PATH = re.compile(r"[A-Za-z0-9._=/-]+")


def places(
    table: ImageTable, pinned: TableVersion, columns: Sequence[str], where: scan.Where | None = None
) -> pa.Table:
    """These columns of every visible row, and where it is: `file` (text) and `place`, its number
    there (int64).
    """
    names = list(columns)
    fragments, _ = scan.plan(table, pinned, where)
    first_rows = {}  # of each row group: its first row's number in the file
    for part, start in zip(fragments, scan.starts(fragments), strict=True):
        first_rows[part.file, part.row_group] = start
    tables = []
    for part, rows in scan.located(table, pinned, names, where):
        # A row's number in its row group becomes its number in the file.
        start = first_rows[part.file, part.row_group]
        in_group = rows[scan.ROW].cast(pa.int64())
        in_file = pc.add(in_group, start)
        files = pa.repeat(part.file, len(rows))
        rows = rows.drop_columns([scan.ROW])
        tables.append(_with_places(rows, files, in_file))
    if not tables:
        empty = scan.rows(table, pinned, names, where).slice(0, 0)
        return _with_places(empty, pa.array([], pa.string()), pa.array([], pa.int64()))
    return pa.concat_tables(tables)


def drop(table: ImageTable, pinned: TableVersion, rows: Iterable[Place], why: str) -> TableVersion:
    """Make a version without these rows of `pinned`, and return it. A second call with the same
    `why` does nothing.

    Raises DataError when rows came or went since `pinned`: the result would not be the pinned
    version less `rows`.
    """
    wanted = sorted(set(rows))
    for _ in range(retries.ATTEMPTS):
        # What has happened to the table since `pinned`?
        delta, since = table.commits(after=pinned.version)
        done = [entry["version"] for entry in since if entry.get("raypipe") == why]
        if done:
            return TableVersion(table.uri, min(done))
        if not wanted:
            return pinned
        require_same_rows(table, pinned, since)

        # Nothing that changed a row. Compactions may have moved rows to other files.
        changes: dict[str, Change] = defaultdict(Change)
        for place in moved(table, pinned, delta, wanted):
            changes[place.file].gone.add(place.row)
        properties = commit_properties(why, f"@v{pinned.version}")
        try:
            return TableVersion(table.uri, commit(table, delta, changes, properties))
        except Moved:
            continue  # perhaps only a tag: look at the new commits
    raise retries.busy(table.uri)


def require_same_rows(table: ImageTable, pinned: TableVersion, since: list[dict[str, Any]]) -> None:
    """Raise DataError if one of these commits since `pinned` (newest first) changed a row."""
    foreign = [entry for entry in since if entry["changes"]]
    if foreign:
        oldest = foreign[-1]
        raise DataError(
            f"{table.uri} has changed since version {pinned.version}",
            got=f"{oldest['operation'] or 'a commit'} in version {oldest['version']}",
            rule="Rows that came later were not judged",
            fix="Pin the newest version and run again",
        )


def commit(table: ImageTable, base: DeltaTable, changes: Changes, why: CommitProperties) -> int:
    """Make the changes in one commit directly after `base`; returns its version.

    Raises Moved when somebody else committed first, DataError when the table cannot be written.
    """
    properties = _with_counts(why, changes)
    # Not asked of `base` later: one of the two ways to write moves it to the new version.
    number = base.version()
    files, schema = log.files(base, table.uri, {})
    touched = [file for file in files if file.name in changes]
    unknown = sorted(set(changes) - {file.name for file in touched})
    if unknown:
        raise AssertionError(f"files that version {number} does not have: {unknown[:3]}")
    _require_allowed(table, base, changes)
    mapped = casting.is_mapped(schema)
    written: list[str] = []  # names of new files
    try:
        if _files_can_be_swapped(table, base, touched, changes, mapped):
            actions = _swap_files(table, base, touched, changes, schema, written)
            base.create_write_transaction(
                actions,
                "append",
                base.schema(),
                partition_by=base.metadata().partition_columns or None,
                commit_properties=properties,
            )
        else:
            _write_whole_table(table, base, changes, properties)
    except DataError:
        _remove_files(table, written)
        raise
    except Exception as e:  # deltalake's errors share no base class
        landed = _landed(table, number, properties)
        if landed is not None:
            return landed
        _remove_files(table, written)
        if isinstance(e, CommitFailedError) and table.delta().version() > number:
            raise Moved(str(e)) from None
        raise storage.refusal(e, table.uri, "Rows of the table cannot be changed") from None
    return number + 1


def _require_allowed(table: ImageTable, base: DeltaTable, changes: Changes) -> None:
    """Raise DataError where the changed rows would break a constraint of the table."""
    constraints.require_changeable(base, table.uri)
    changed = {name for change in changes.values() for name in change.values}
    names = constraints.needed(base, changed)
    if not names:
        return
    pinned = TableVersion(table.uri, base.version())
    fragments, schema = scan.plan(table.without_sample(), pinned)
    rows = [fragment.output_schema(schema, names).empty_table()]
    for part, start in zip(fragments, scan.starts(fragments), strict=True):
        change = changes.get(part.file)
        if change is None or not change.values:
            continue
        found, rows_N = fragment.read([part], schema, names, {}, table.storage_options)
        numbers = (rows_N + start).tolist()
        kept = {name: change.values[name] for name in change.values if name in names}
        found = _visible_changed(found, numbers, Change(change.gone, kept))
        # Rows that stay as they are were judged when they were written.
        touched = {row for values in kept.values() for row in values} - change.gone
        still = [number for number in numbers if number not in change.gone]
        rows.append(found.filter(pa.array([number in touched for number in still], pa.bool_())))
    constraints.require(base, table.uri, pa.concat_tables(rows), changed)


def _with_places(rows: pa.Table, files: pa.Array, numbers: pa.Array) -> pa.Table:
    return rows.append_column("file", files).append_column("place", numbers)


def _with_counts(why: CommitProperties, changes: Changes) -> CommitProperties:
    """`why` with the numbers of dropped and relabelled rows and a batch id; deltalake may not
    rebase.
    """
    removed = relabelled = 0
    for change in changes.values():
        removed += len(change.gone)
        relabelled += sum(len(values) for values in change.values.values())
    metadata = dict(why.custom_metadata or {})
    if removed:
        metadata["raypipe.removed"] = str(removed)
    if relabelled:
        metadata["raypipe.relabelled"] = str(relabelled)
    metadata[BATCH] = uuid.uuid4().hex
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0)


def _files_can_be_swapped(
    table: ImageTable,
    base: DeltaTable,
    touched: Sequence[log.File],
    changes: Changes,
    mapped: bool,
) -> bool:
    """Can deltalake remove each of these files, and has each the columns that are to change?"""
    logged = {}  # a file's name -> its path as the log writes it
    placed = log.Places(base.table_uri)
    for path in pa.table(base.get_add_actions())["path"].to_pylist():
        logged[placed.name(path)] = path
    for file in touched:
        if file.keep_N is not None or not _SAFE_PATH.fullmatch(logged[file.name]):
            return False
        if not _holds_columns(table, file, changes[file.name], mapped):
            return False
    return True


def _holds_columns(table: ImageTable, file: log.File, change: Change, mapped: bool) -> bool:
    """Has the file every column that is to change, under the table's name? Partition values are in
    the log only.
    """
    # Opened in any case: a file that cannot be read fails here, before anything is written.
    opened = fragment.open_file(file.uri, file.path, table.storage_options)
    if not change.values:
        return True
    stored = opened.schema_arrow.names
    return not mapped and set(change.values) <= set(stored)


def _swap_files(
    table: ImageTable,
    base: DeltaTable,
    touched: Sequence[log.File],
    changes: Changes,
    schema: pa.Schema,
    written: list[str],
) -> list[AddAction | RemoveAction]:
    """Write the new files; returns the actions that remove the old files and add the new ones.

    A file of which no row is left gets no new one. Names of new files are appended to `written`, so
    that a caller can delete them after an error.
    """
    logged = {}
    placed = log.Places(base.table_uri)
    for add in pa.table(base.get_add_actions(flatten=True)).to_pylist():
        logged[placed.name(add["path"])] = add

    # With column mapping the log calls the columns of partitions by their physical names, also if
    # files are mapped by id: `schema` has only what finds a column in a file.
    fields = pa.schema(base.schema().to_arrow()) if casting.is_mapped(schema) else schema
    called = {field.name: casting.physical_name(field) for field in fields}

    now_ms = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = []
    for file in touched:
        # The old file goes out.
        old = logged[file.name]
        partition = {called[name]: _logged_value(scalar) for name, scalar in file.partition}
        actions.append(RemoveAction(old["path"], True, now_ms, old["size_bytes"], partition))

        # The new file comes in, unless no row is left.
        name = f"part-00000-{uuid.uuid4()}-c000.parquet"
        written.append(name)
        out = NewFile(table, name)
        statistics = changed_file.copy(table, file, changes[file.name], out)
        if not statistics.rows:
            out.remove()
            continue
        stats = statistics.as_json(bounds=not casting.is_mapped(schema))
        actions.append(AddAction(name, out.size(), partition, now_ms, True, stats))
    return actions


def _write_whole_table(
    table: ImageTable, base: DeltaTable, changes: Changes, properties: CommitProperties
) -> None:
    """Write all rows of `base` again, with the changes made, in one commit."""
    pinned = TableVersion(table.uri, base.version())
    fragments, schema = scan.plan(table.without_sample(), pinned)
    names, options = schema.names, table.storage_options
    visible = fragment.output_schema(schema, names)

    def batches() -> Iterator[pa.RecordBatch]:
        for part, start in zip(fragments, scan.starts(fragments), strict=True):
            rows, rows_N = fragment.read([part], schema, names, {}, options)
            # Numbers of the visible rows in their file; deleted rows leave gaps.
            numbers = (rows_N + start).tolist()
            change = changes.get(part.file, Change())
            rows = _visible_changed(rows, numbers, change)
            yield from rows.cast(visible).to_batches()

    with ExitStack() as held:
        rows = pa.RecordBatchReader.from_batches(visible, batches())
        if stores.is_remote(base.table_uri):
            rows = held.enter_context(_from_this_machine(rows))
        write_deltalake(
            base,
            rows,
            mode="overwrite",
            writer_properties=writer_properties(table.columns.image),
            commit_properties=properties,
        )


@contextmanager
def _from_this_machine(rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatchReader]:
    """The same rows, from a temporary file.

    deltalake asks for rows in a thread of its own runtime. Whoever reads from a store there ends in
    "Cannot start a runtime from within a runtime": the store is read by the same runtime. A thread
    of ours would wait for ever where that has one thread, as in a container with one CPU.
    """
    with tempfile.NamedTemporaryFile(prefix="raypipe-rows-") as file:
        with pa.OSFile(file.name, "wb") as out, pa.ipc.new_stream(out, rows.schema) as written:
            for batch in rows:
                written.write_batch(batch)
        with pa.OSFile(file.name) as source:
            yield pa.ipc.open_stream(source)


def _visible_changed(rows: pa.Table, numbers: list[int], change: Change) -> pa.Table:
    """Visible rows of a file with the change made; `numbers` are their numbers in the file."""
    for name, values in change.values.items():
        new = {}
        for i, number in enumerate(numbers):
            if number in values:
                new[i] = values[number]
        rows = changed_file.set_values(rows, name, new)
    keep = [number not in change.gone for number in numbers]
    return rows.filter(pa.array(keep, pa.bool_()))


def _landed(table: ImageTable, number: int, properties: CommitProperties) -> int | None:
    """The version of our commit after `number`, if it landed although deltalake raised."""
    batch = (properties.custom_metadata or {})[BATCH]
    try:
        _, since = table.commits(after=number)
    except DataError:  # the table cannot be read any more: the first error says more
        return None
    for entry in since:
        if entry.get(BATCH) == batch:
            return int(entry["version"])
    return None


def _remove_files(table: ImageTable, names: Iterable[str]) -> None:
    """Delete new files that no commit names. A file that cannot be deleted stays until vacuum."""
    for name in names:
        try:
            NewFile(table, name).remove()
        except OSError:
            continue


def _logged_value(value: pa.Scalar) -> str | None:
    """A partition value as the log writes it."""
    if not value.is_valid:
        return None
    native = value.as_py()
    if isinstance(native, bytes):
        return native.decode()
    return str(value.cast(pa.string()).as_py())
