"""`table.sample`: a share of the rows, chosen by what a row is and not by where it lies.

A row is in the sample if a hash of its id lies below the share. So an optimized, cleaned or copied
table has the same sample, and a larger share holds every row of a smaller one. A row without an id
is known by the bytes of its image; without an image column by all its columns.
Cost: the id column is read when a read is planned. Tables without ids have their images read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from raypipe.tables import fragment
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import ImageTable


def sampled(groups: Sequence[Fragment], schema: pa.Schema, table: ImageTable) -> list[Fragment]:
    """The row groups of one file; rows outside of the sample count as deleted."""
    share = table.sample
    if share >= 1:
        return list(groups)

    ids = _id_column(schema, table.columns.id)
    chosen = []
    for group in groups:
        keys: list[str | None] = [None] * group.rows
        visible = np.arange(0)
        if ids is not None:
            as_text = schema.set(schema.get_field_index(ids.name), ids)
            rows, visible = fragment.read([group], as_text, [ids.name], {}, table.storage_options)
            for number, image_id in zip(visible, rows[ids.name].to_pylist(), strict=True):
                keys[number] = image_id
        # Images are read only for row groups with a row that has no id.
        if ids is None or any(keys[number] is None for number in visible):
            keys = _with_content(keys, group, schema, table)

        keep_N = np.array([key is not None and _position(key) < share for key in keys], bool)
        # A row that is deleted already has no key.
        chosen.append(replace(group, deleted=b"" if keep_N.all() else _bits(~keep_N)))
    return chosen


def _id_column(schema: pa.Schema, name: str) -> pa.Field | None:
    """The id column, to be read as text; None where the table has none that names a row."""
    if name not in schema.names or pa.types.is_nested(schema.field(name).type):
        return None
    return schema.field(name).with_type(pa.string())


def _with_content(
    keys: list[str | None], group: Fragment, schema: pa.Schema, table: ImageTable
) -> list[str | None]:
    """The keys, with the image or all columns in the place of an id that is missing."""
    image = table.columns.image
    names = [image] if image in schema.names else schema.names
    rows, visible = fragment.read([group], schema, names, {}, table.storage_options)
    known = list(keys)
    for number, row in zip(visible, rows.to_pylist(), strict=True):
        if known[number] is None:
            known[number] = _content(row)
    return known


def _content(row: dict[str, object]) -> str:
    # Null columns are left out: a column that is added later changes no row.
    digest = hashlib.sha256()
    for name, value in sorted(row.items()):
        if value is not None:
            digest.update(f"{name}=".encode("utf-8", "replace"))
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return digest.hexdigest()


def _position(key: str) -> float:
    """A number in [0, 1) that depends on the key alone, and on nothing that splits depend on."""
    digest = hashlib.sha256(b"sample:" + key.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _bits(deleted_N: np.ndarray) -> bytes:
    return np.packbits(deleted_N).tobytes()
