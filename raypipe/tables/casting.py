"""Values as a Parquet file stores them -> values in the types of the table.

A file may differ from its table in three ways. Columns and fields of structs may have another name
(column mapping: the table's schema carries the id or the physical name). Fields that were added
later are missing. Types that other engines write differ: string views, large lists, INT96 times,
numbers that were widened since.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.tables import names
from raypipe.tables.conditions import is_listed

# Keys in a field's metadata: of the table's schema (Delta), and of a file's schema (Parquet).
PHYSICAL_NAME = b"delta.columnMapping.physicalName"
FIELD_ID = b"delta.columnMapping.id"
PARQUET_FIELD_ID = b"PARQUET:field_id"


def is_mapped(schema: pa.Schema) -> bool:
    """Has the table column mapping?"""
    return any(field.metadata for field in schema)


def physical_name(field: pa.Field) -> str:
    """How the files and the log call a column of the table."""
    mapped = (field.metadata or {}).get(PHYSICAL_NAME)
    return field.name if mapped is None else str(mapped.decode())


def conform(values: pa.Array, field: pa.Field) -> pa.Array:
    """Stored values in the type of the table's `field`.

    Fields of structs are matched by id or name, at every depth. Missing ones become null. A label
    with several tags becomes the text a|b. Raises DataError or pyarrow's errors.
    """
    want, have = field.type, values.type
    # For nested types an equal type proves nothing: a rename may have swapped two fields.
    if have == want and not pa.types.is_nested(want):
        return values
    if pa.types.is_null(have):
        return pa.nulls(len(values), want)
    if pa.types.is_struct(want):
        return _conform_struct(values, want)
    if pa.types.is_map(want):
        return _conform_map(values, want)
    if pa.types.is_list(want):
        return _conform_list(values, want)
    if pa.types.is_string(want) and is_listed(have):
        return _tags(values, field.name)
    if pa.types.is_string(want):
        return names.text(values)
    # Delta's timestamps are microseconds: finer ones are cut.
    options = pc.CastOptions(want, allow_time_truncate=True)
    return pc.cast(values, options=options)


def _conform_struct(values: pa.StructArray, want: pa.StructType) -> pa.StructArray:
    children = []
    for field in want:
        index = position(values.type, field)
        missing = index < 0
        child = pa.nulls(len(values), field.type) if missing else values.field(index)
        children.append(conform(child, field))

    return pa.StructArray.from_arrays(
        children,
        fields=list(want),
        mask=values.is_null(),
    )


def _conform_map(values: pa.MapArray, want: pa.MapType) -> pa.MapArray:
    keys = conform(values.keys, want.key_field)
    items = conform(values.items, want.item_field)
    return pa.MapArray.from_arrays(
        pa.array(values.offsets.to_numpy()),
        keys,
        items,
        type=want,
        mask=values.is_null(),
    )


def _conform_list(values: pa.Array, want: pa.ListType) -> pa.ListArray:
    # Large lists, list views and lists of fixed size become plain lists first.
    if not pa.types.is_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))

    return pa.ListArray.from_arrays(
        pa.array(values.offsets.to_numpy()),
        conform(values.values, want.value_field),
        type=want,
        mask=values.is_null(),
    )


def _tags(values: pa.Array, name: str) -> pa.Array:
    """Lists of tags as texts like a|b.

    The tags are sorted: [b, a] and [a, b] are one label. Raises DataError for a null in a list,
    because the whole row would become unlabelled without a message, and for a bar in a tag, because
    it would become two tags.
    """
    items = names.text(values.flatten())
    inner = values.type.value_type
    is_text = pa.types.is_string(inner) or pa.types.is_large_string(inner)

    # Lists like [0, 1, 0] repeat a number; a list of tags never does. Truths are no names.
    repeats = not is_text and _has_repeats(pc.list_parent_indices(values), items)
    if repeats or (pa.types.is_boolean(inner) and len(items)):
        raise DataError(
            f"A list in column {name!r} holds one number a class",
            rule="A list of tags names those that are set: [1], and not [0, 1, 0]",
            fix="Write the tags' names, or a|b",
        )

    has_bar = pc.match_substring(items, "|")
    is_nan = pc.equal(items, "nan")
    wrong = items.filter(pc.or_(has_bar, is_nan))
    if items.null_count or len(wrong):
        raise DataError(
            f"A list in column {name!r} cannot be read as tags",
            got="a null in a list" if items.null_count else wrong[0].as_py(),
            rule="A tag is a name without the bar that stands between tags",
            fix="Mend the rows, or leave them out with table.where",
        )
    return names.tags(values)


def _has_repeats(parents: pa.Array, items: pa.Array) -> bool:
    """Whether a list has an item twice. `parents` gives the list that each item is in."""
    pairs = pa.table({"list": parents, "item": items})
    distinct = pairs.group_by(["list", "item"]).aggregate([])
    return len(distinct) < len(pairs)


def position(stored: pa.StructType | pa.Schema, field: pa.Field) -> int:
    """The place in a file's schema of a field of the table; -1 when the file lacks it.

    Matched by the field's id, else by its physical name, else by its own name.
    """
    metadata: dict[bytes, Any] = field.metadata or {}
    stored_fields = list(stored)
    if FIELD_ID in metadata:
        ids = [(other.metadata or {}).get(PARQUET_FIELD_ID) for other in stored_fields]
        return _index(ids, metadata[FIELD_ID])
    name = field.name
    if PHYSICAL_NAME in metadata:
        name = metadata[PHYSICAL_NAME].decode()
    return _index([other.name for other in stored_fields], name)


def _index(values: list[Any], value: Any) -> int:
    return values.index(value) if value in values else -1
