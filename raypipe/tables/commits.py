"""Append once: directly on the version that was read, or not at all.

delta-rs rebases an append onto whatever others committed meanwhile, and two first writers both
succeed (measured: 4,000 rows of 2,000). So here an append goes like this:
1. The caller reads the newest version, `base`, and decides on its rows what to add.
2. `append_once` commits directly after `base`; deltalake must not rebase.
3. If another commit came first, `Moved` is raised and nothing is written. The caller starts again
   at 1.
4. If deltalake raises after its commit landed (the answer was lost), the batch id in the commit's
   metadata shows that, and the append counts as done.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from raypipe import stores
from raypipe.errors import DataError, one_line
from raypipe.tables import constraints, protocol, retries, scan, storage
from raypipe.tables.address import resolve
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable

BATCH = "raypipe.batch"  # commit property: the batch id
TRIES = 50  # of `rows_once`; each lost one means that somebody else's commit landed


class Moved(Exception):
    """Somebody else committed first; nothing was written."""


def append_once(
    uri: str,
    rows: pa.Table,
    base: DeltaTable | None,
    why: CommitProperties,
    configuration: dict[str, str | None] | None = None,
    storage_options: dict[str, str] | None = None,
    layout: WriterProperties | None = None,
) -> DeltaTable:
    """Commit `rows` directly after `base` (None: make the table); returns the new version, opened.

    Columns that the table lacks are added; columns that the rows lack become null. `configuration`
    has properties of a new table, `layout` those of the files (None: as for images). Raises Moved
    when `base` is not the newest version any more, DataError when the table cannot be written.
    """
    # Not a hash of the rows: a rival's commit of the same images may hold other labels.
    batch = uuid.uuid4().hex
    metadata = {**(why.custom_metadata or {}), BATCH: batch}
    other_columns = False
    if base is not None:
        require_appendable(uri, base, rows.schema)
        rows = _with_columns_of(base, rows)
        have = {field.name for field in base.schema().fields}
        other_columns = have != set(rows.schema.names)
    try:
        write_deltalake(
            uri if base is None else base,
            # In one chunk: rows of a chunked table are written in another order each time
            # (measured: 15 of 15).
            rows.combine_chunks(),
            # "append" would join a table that somebody has made since.
            mode="error" if base is None else "append",
            schema_mode="merge" if other_columns else None,
            configuration=configuration if base is None else None,
            writer_properties=layout or writer_properties(),
            storage_options=storage_options,
            commit_properties=CommitProperties(
                custom_metadata=metadata,
                max_commit_retries=0,
                app_transactions=why.app_transactions,
            ),
        )
    except Exception as e:  # deltalake's errors share no base class
        landed = _landed(uri, batch, base, storage_options)
        if landed is not None:
            return landed
        if isinstance(e, CommitFailedError) or (base is None and _is_table(uri, storage_options)):
            raise Moved(str(e)) from None
        if base is not None and _is_gone(uri, storage_options):
            raise DataError(
                f"{uri} is no longer a table",
                got=one_line(e, 100),
                rule="Its store cannot be reached, or somebody deleted or moved it during this run",
                fix="Make the store reachable, or bring the table back, and run the command "
                "again. If it stays deleted, the next run makes it anew, without its rows",
            ) from None
        broken = constraints.refusal(e, base, uri)
        if broken is not None:
            raise broken from None
        # deltalake raises its errors of Arrow as bare Exceptions.
        if isinstance(e, (OSError, DeltaError)) or type(e) is Exception or stores.cause(e, uri):
            raise storage.refusal(
                e, uri, "The table cannot be written", "Check that the folder can be written"
            ) from e
        raise
    if base is not None:
        return base  # write_deltalake has moved it to the new version
    # Version 0, not the newest: the caller has not read what others wrote since.
    return DeltaTable(uri, version=0, storage_options=storage_options)


def rows_once(
    uri: str,
    schema: pa.Schema,
    named: dict[str, str],
    make: Callable[[], pa.Table],
    why: str,
    storage_options: dict[str, str] | None = None,
    columns: list[str] | None = None,
) -> pa.Table:
    """The rows of the table at `uri` whose columns have the values `named`. If there are none,
    `make` them and append them.

    Two processes that make the same rows at once append them once: the second gets the rows of the
    first. `columns` selects columns (None: all), `why` goes into the history. Raises DataError when
    the table cannot be read or written, and for a table with columns that `schema` lacks.
    """
    path = resolve(uri)
    made: pa.Table | None = None
    for attempt in range(1, TRIES + 1):
        base = newest(path, storage_options)
        if base is not None:
            require_columns_of(schema, base, path, why)
            rows = rows_named(path, named, columns, storage_options, base.version())
            if len(rows):
                return rows
        if made is None:
            made = make()
        try:
            append_once(path, made, base, commit_properties(why), storage_options=storage_options)
            return made.select(columns) if columns else made
        except Moved:
            retries.pause(attempt)
    raise retries.busy(path, f"{TRIES} tries")


def rows_named(
    uri: str,
    named: dict[str, str],
    columns: list[str] | None = None,
    storage_options: dict[str, str] | None = None,
    version: int | None = None,
) -> pa.Table:
    """The rows whose columns have the values `named`.

    An empty table if there is no table, or if it lacks one of the columns because an earlier
    raypipe made it.
    """
    path = resolve(uri)
    if not ImageTable.exists(path, storage_options):
        return pa.table({})
    table = ImageTable(path, storage_options=storage_options)
    pinned = table.pin(version)
    # An older table may lack columns that newer rows have.
    have = [field.name for field in table.at(pinned).schema().fields]
    needed = {*named, *(columns or ())}
    if not needed <= set(have):
        return pa.table({})
    return scan.rows(table, pinned, columns or have, dict(named))


def require_appendable(uri: str, base: DeltaTable, schema: pa.Schema) -> None:
    """Raise DataError for a table that cannot get rows of this schema.

    deltalake would cast values to another type, and fail at the first that it cannot cast.
    """
    stored = pa.schema(base.schema().to_arrow())
    for field in schema:
        if field.name not in stored.names:
            continue
        kind = _plain(stored.field(field.name).type)
        wider = pa.types.is_integer(kind) and pa.types.is_integer(field.type)
        if kind != _plain(field.type) and not (wider and kind.bit_width > field.type.bit_width):
            raise DataError(
                f"Column {field.name!r} of {uri} has another type",
                got=str(kind),
                rule=f"raypipe writes {field.type} into this column",
                fix="Write to another table, or change the column's type",
            )
    added = [name for name in schema.names if name not in stored.names]
    mode = protocol.mapping(base)
    if added and mode != "none":
        raise DataError(
            f"Columns cannot be added to {uri}",
            got=", ".join(added),
            rule=f"deltalake adds none to a table with column mapping ({mode})",
            fix=f"ALTER TABLE … ADD COLUMN with the engine that made it: {added[0]} "
            f"{schema.field(added[0]).type}",
        )


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without the ways in which Arrow can keep texts and bytes."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def _with_columns_of(base: DeltaTable, rows: pa.Table) -> pa.Table:
    """The rows with nulls in the columns that only the table has.

    deltalake does this itself, but not on a table with column mapping.
    """
    if protocol.mapping(base) == "none":
        return rows
    for field in pa.schema(base.schema().to_arrow()):
        if field.name not in rows.schema.names:
            rows = rows.append_column(field.name, pa.nulls(len(rows), field.type))
    return rows


def require_columns_of(
    schema: pa.Schema, base: DeltaTable, path: str, why: str, always: Collection[str] = ()
) -> None:
    """Raise DataError for a table with columns that `schema` lacks, or without one of `always`: it
    has another purpose."""
    have = {field.name for field in base.schema().fields}
    foreign = sorted(have - set(schema.names))
    lacks = [name for name in always if name not in have]
    if foreign or lacks:
        verb = why.partition(" ")[0]
        raise DataError(
            f"{path} is a table of something else: {verb} keeps its rows in a table of its own",
            got=", ".join(foreign[:5]) or f"no column {lacks[0]}",
            rule=f"Its columns are {', '.join(schema.names)}",
            fix="Name another place, or remove that table",
        )


def require_rows_of(
    schema: pa.Schema, rows: pa.Table, path: str, may_be_null: Collection[str] = ()
) -> None:
    """Raise DataError for rows that raypipe did not write: without a value, or of other types."""
    for name in rows.column_names:
        kind = _plain(rows.schema.field(name).type)
        if kind != _plain(schema.field(name).type):
            raise _foreign_row(path, f"{name} is {kind}")
        if name not in may_be_null and rows[name].null_count:
            raise _foreign_row(path, f"a row without {name}")


def require_still_there(
    path: str, base: DeltaTable | None, before: Sequence[object], anew: str
) -> None:
    """Raise DataError if there is no table, although rows were read from it `before`.

    anew: what it means to go on without them, in words.
    """
    if base is None and before:
        raise DataError(
            f"{path} is no longer a table",
            got=f"{len(before)} rows were there before",
            rule="Its store cannot be reached, or somebody deleted it",
            fix="Make the store reachable, or bring the table back from a backup, and run the "
            f"command again. If it stays deleted, the next run begins anew: {anew}",
        )


def json_of(text: str, path: str) -> dict[str, Any]:
    """The JSON object that a row of the table at `path` holds. Raises DataError for other text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _foreign_row(path, f"{text[:60]!r} is no JSON object")
    return found


def _foreign_row(path: str, got: str) -> DataError:
    return DataError(
        f"{path} has rows that raypipe did not write",
        got=got,
        rule="Nobody but raypipe adds rows to this table",
        fix="Delete these rows, or restore the table to its version before them",
    )


def newest(uri: str, storage_options: dict[str, str] | None) -> DeltaTable | None:
    """The table's newest version; None if there is no table."""
    if not _is_table(uri, storage_options):
        return None
    return ImageTable(uri, storage_options=storage_options).delta()


def _is_gone(uri: str, storage_options: dict[str, str] | None) -> bool:
    """Is there no table, as far as anybody can tell? A store that is away says nothing."""
    try:
        return not _is_table(uri, storage_options)
    except DataError:
        return False


def _is_table(uri: str, storage_options: dict[str, str] | None) -> bool:
    try:
        return DeltaTable.is_deltatable(uri, storage_options)
    except OSError:
        return False


def _landed(
    uri: str, batch: str, base: DeltaTable | None, storage_options: dict[str, str] | None
) -> DeltaTable | None:
    """The version that holds this batch, if its commit landed after `base` although deltalake
    raised; else None.
    """
    after = -1 if base is None else base.version()
    try:
        _, entries = ImageTable(uri, storage_options=storage_options).commits(after=after)
    except Exception:  # the table is not there or not reachable: the first error says more
        return None
    for entry in entries:
        if entry.get(BATCH) == batch:
            return DeltaTable(uri, version=entry["version"], storage_options=storage_options)
    return None
