"""Append once: on top of the version that was looked at, or not at all.

delta-rs rebases an append onto whatever others committed meanwhile, and two first writers both succeed (measured: 4,000 rows of
2,000). Here a commit may not be rebased: when the table moved, `Moved` says so and the caller looks again at what it holds. An
error after a commit that went through (a lost answer) is recognised by the batch id in the commit's metadata.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from raypipe.errors import DataError
from raypipe.tables import scan, storage
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable, resolve

BATCH = "raypipe.batch"
TRIES = 50  # at being first; each lost one means that somebody else's commit went through


class Moved(Exception):
    """Somebody else committed first; nothing was written."""


def append_once(
    uri: str,
    rows: pa.Table,
    base: DeltaTable | None,
    why: CommitProperties,
    configuration: dict[str, str | None] | None = None,
    storage_options: dict[str, str] | None = None,
) -> DeltaTable:
    """The table with `rows` in one commit after `base` (None: the table is made). Columns it lacks are added.

    Raises Moved when `base` is not the newest any more, DataError when the table cannot be written.
    """
    # Not a hash of the rows: a rival's commit of the same images may hold other labels.
    batch = uuid.uuid4().hex
    properties = CommitProperties(
        custom_metadata={**(why.custom_metadata or {}), BATCH: batch}, max_commit_retries=0
    )
    merge = base is not None and not {f.name for f in base.schema().fields} >= set(
        rows.schema.names
    )
    try:
        write_deltalake(
            uri if base is None else base,
            rows.combine_chunks(),  # rows of a chunked table come out in another order each time (measured: 15 of 15)
            mode="append"
            if base
            else "error",  # append would join a table that somebody made since
            schema_mode="merge" if merge else None,
            configuration=configuration if base is None else None,
            writer_properties=writer_properties(),
            storage_options=storage_options,
            commit_properties=properties,
        )
    except Exception as e:
        if (landed := _find(uri, batch, base, storage_options)) is not None:
            return landed
        if isinstance(e, CommitFailedError) or (base is None and _is_table(uri, storage_options)):
            raise Moved(str(e)) from None
        # The second when its folder cannot be made.
        if isinstance(e, (OSError, TableNotFoundError)) or storage.cause(e, uri):
            raise storage.refusal(
                e, uri, "The table cannot be written", "Check that the folder can be written"
            ) from e
        raise
    # The first version, not the newest: what others wrote since was not looked at yet.
    return base if base is not None else DeltaTable(uri, version=0, storage_options=storage_options)


def rows_once(
    uri: str,
    schema: pa.Schema,
    named: dict[str, str],
    make: Callable[[], pa.Table],
    why: str,
    storage_options: dict[str, str] | None = None,
    columns: list[str] | None = None,
) -> pa.Table:
    """The rows of the table at `uri` whose columns have the values `named`, with these `columns` (null: all). Where there are
    none, those that `make` gives, appended once: of two that make the same rows at once, the second gets the first's.

    Raises DataError as tables do, and for a table with columns that `schema` lacks: it is for something else.
    """
    path, made = resolve(uri), None
    for tried in range(TRIES):
        base = _newest(path, storage_options)
        if base is not None and (
            foreign := sorted({f.name for f in base.schema().fields} - set(schema.names))
        ):
            raise DataError(
                f"{path} is a table of something else: {why.partition(' ')[0]} keeps its rows in a table of its own",
                got=", ".join(foreign[:5]),
                rule=f"Its columns are {', '.join(schema.names)}",
                fix="Name another place, or remove that table",
            )
        if base is not None and len(
            found := rows_named(path, named, columns, storage_options, base.version())
        ):
            return found
        made = make() if made is None else made
        try:
            append_once(path, made, base, commit_properties(why), storage_options=storage_options)
            return made.select(columns) if columns else made
        except Moved:
            time.sleep(random.uniform(0, 0.02 * min(tried + 1, 10)))
    raise DataError(
        f"Others keep writing to {path}", got=f"{TRIES} tries", fix="Run again when they are done"
    )


def rows_named(
    uri: str,
    named: dict[str, str],
    columns: list[str] | None = None,
    storage_options: dict[str, str] | None = None,
    version: int | None = None,
) -> pa.Table:
    """The rows whose columns have the values `named`; none where there is no table, or where it has not these columns, as one
    that an earlier raypipe made."""
    path = resolve(uri)
    if not ImageTable.exists(path, storage_options):
        return pa.table({})
    table = ImageTable(path, storage_options=storage_options)
    pinned = table.pin(version)
    have = [f.name for f in table.delta(pinned.version).schema().fields]
    if not {*named, *(columns or ())} <= set(have):
        return pa.table({})
    return scan.rows(table, pinned, columns or have, dict(named))


def _newest(uri: str, storage_options: dict[str, str] | None) -> DeltaTable | None:
    return (
        ImageTable(uri, storage_options=storage_options).delta()
        if _is_table(uri, storage_options)
        else None
    )


def _is_table(uri: str, storage_options: dict[str, str] | None) -> bool:
    try:
        return DeltaTable.is_deltatable(uri, storage_options)
    except OSError:
        return False


def _find(
    uri: str, batch: str, base: DeltaTable | None, storage_options: dict[str, str] | None
) -> DeltaTable | None:
    """The version that holds our batch already."""
    try:
        _, since = ImageTable(uri, storage_options=storage_options).commits(
            after=-1 if base is None else base.version()
        )
        landed = [e["version"] for e in since if e.get(BATCH) == batch]
    except Exception:  # the table is not there or not reachable: the first error says more
        return None
    return DeltaTable(uri, version=landed[0], storage_options=storage_options) if landed else None
