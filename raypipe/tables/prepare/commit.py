"""One commit of all files of a prepared table, and its record (prepared.py).

1. Make the table without rows, if there is none.
2. Write the record into the slot that is not in force.
3. Commit the files and the record's number. deltalake must not rebase it: then everything that the
   plan knew still holds.

If another commit comes first at any step, Moved is raised, and the caller plans again. After any
other error the newest version is asked whether the commit landed: the answer may have been lost.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from raypipe.errors import RaypipeError
from raypipe.tables import commits, prepared, storage
from raypipe.tables.commits import Moved
from raypipe.tables.prepare.parts import out_schema
from raypipe.tables.prepare.plan import Plan, Work, source_schema
from raypipe.tables.prepare.staged import Made
from raypipe.tables.prepared import NUMBER, Origin
from raypipe.tables.provenance import ADDED, commit_properties
from raypipe.tables.tags import set_property


def commit(work: Work, plan: Plan, made: list[Made]) -> DeltaTable:
    """The new version, opened. Raises Moved and DataError."""
    run = uuid.uuid4().hex
    try:
        with _errors(work):
            return _commit(work, plan, made, run)
    except Exception:
        landed = _landed(work, run)
        if landed is None:
            raise
        return landed


def _commit(work: Work, plan: Plan, made: list[Made], run: str) -> DeltaTable:
    schema = out_schema(source_schema(work))
    why = _why(work)
    base = plan.base
    if base is None:
        base = _empty(work, schema)
    origin = _origin(work, plan, base, made, run)
    set_property(base, origin.key, origin.to_json(), why)

    # As the log knows it now: `base` does not follow such a commit.
    base = DeltaTable(work.dst, version=base.version(), storage_options=work.options)
    now_ms = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = []
    for one in made:
        actions.append(AddAction(one.name, one.size, {}, now_ms, True, one.stats))
    added = sum(one.rows for one in made)
    # Its own, unless columns have changed: columns may carry properties.
    own, new = base.schema(), Schema.from_arrow(schema)
    is_same = _kinds(own) == _kinds(new)
    base.create_write_transaction(
        actions,
        "overwrite" if plan.anew else "append",
        own if is_same else _with_metadata(new, own),
        commit_properties=CommitProperties(
            custom_metadata={**(why.custom_metadata or {}), ADDED: added},
            max_commit_retries=0,
            app_transactions=[Transaction(NUMBER, origin.number)],
        ),
    )
    return DeltaTable(work.dst, version=base.version() + 1, storage_options=work.options)


def _kinds(schema: Schema) -> list[tuple[str, object]]:
    """The names and the types of columns."""
    return [(field.name, field.type) for field in schema.fields]


def _with_metadata(new: Schema, own: Schema) -> Schema:
    """Columns may hold the record, and tags: see tags.set_property."""
    held = {field.name: field.metadata for field in own.fields}
    return Schema(
        [
            Field(one.name, one.type, nullable=one.nullable, metadata=held.get(one.name))
            for one in new.fields
        ]
    )


def _why(work: Work) -> CommitProperties:
    shape = work.shape
    return commit_properties(f"prepare --side {shape.side_px}", str(work.version))


def _empty(work: Work, schema: pa.Schema) -> DeltaTable:
    """The new table, without rows."""
    columns = work.table.columns
    bounded = [
        name for name in (columns.label, columns.split, columns.source) if name in schema.names
    ]
    create_table_with_add_actions(
        work.dst,
        Schema.from_arrow(schema),
        [],
        mode="error",
        description=prepared.DESCRIPTION,
        # Statistics of images would be as large as the images.
        configuration={"delta.dataSkippingStatsColumns": ",".join(map(_quoted, bounded))},
        storage_options=work.options,
        commit_properties=_why(work),
    )
    return DeltaTable(work.dst, version=0, storage_options=work.options)


def _quoted(name: str) -> str:
    """A column as a table property names it. Unquoted, `a.b` is a field, and engines that cannot
    read the list keep statistics of all columns, or write nothing.
    """
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name}`"


def _origin(work: Work, plan: Plan, base: DeltaTable, made: list[Made], run: str) -> Origin:
    before = plan.before.rows if plan.before and not plan.anew else 0
    return Origin(
        number=prepared.number_of(base) + 1,
        uri=work.version.uri,
        version=work.version.version,
        table_id=work.version.table_id,
        line=work.line,
        side_px=work.shape.side_px,
        coding=work.shape.coding,
        quality=work.shape.quality,
        rows=before + sum(one.rows for one in made),
        run=run,
        state=work.state(work.version),
        roles=work.roles,
    )


def _landed(work: Work, run: str) -> DeltaTable | None:
    """The newest version, if this run's commit is in it although an error was raised."""
    try:
        newest = commits.newest(work.dst, work.options)
    except Exception:  # the table cannot be reached: the first error says more
        return None
    origin = None if newest is None else prepared.origin_of(newest)
    return newest if origin is not None and origin.run == run else None


@contextmanager
def _errors(work: Work) -> Iterator[None]:
    """Turn an error of deltalake into Moved or a DataError."""
    try:
        yield
    except (RaypipeError, Moved):
        raise
    except CommitFailedError as e:
        raise Moved(str(e)) from None
    except Exception as e:  # deltalake's errors share no base class
        if "already exists" in str(e):
            raise Moved(str(e)) from None
        raise storage.refusal(
            e, work.dst, "The table cannot be written", "Check that the folder can be written"
        ) from e
