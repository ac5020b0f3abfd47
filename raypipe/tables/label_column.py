"""The label column of any table, as `raypipe ingest` would have written it for this task.

`models/labels.py` decides what a value means. So a table that is used directly has the same classes
as the table that ingest makes of it: 1.0 and 1 are the class 1, a blank is unlabelled, and NaN is
no class. Ingest can quarantine a row with such a value; here it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.models import labels
from raypipe.models.labels import Kind

_RULES = {
    "single_label": "A class is one name; rows without a label hold null",
    "multi_label": "A label is a list of tags, or a text like a|b",
    "probability": "A probability is a number from 0 to 1",
    "regression": "A label is a finite number",
}


def read(column: pa.ChunkedArray | pa.Array, kind: Kind, name: str) -> pa.Array:
    """The labels of column `name` as text, null for unlabelled rows.

    Raises DataError for a value that cannot be a label.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    # A million rows have few different labels: each is read once.
    encoded = array.cast(pa.string()).dictionary_encode()
    read_once = texts(encoded.dictionary.to_pylist(), kind, name)
    return pa.array(read_once, pa.string()).take(encoded.indices)


def texts(values: Sequence[str], kind: Kind, name: str) -> list[str | None]:
    """What the texts of column `name` mean as labels; None: unlabelled. Raises DataError."""
    return [_text(value, kind, name) for value in values]


def _text(value: str, kind: Kind, name: str) -> str | None:
    read = labels.read(kind, value)
    if not read.why:
        return read.text
    raise DataError(
        f"Column {name!r} has a value that is no label of model.task={kind}: {read.why}",
        got=value,
        rule=_RULES[kind],
        fix="Mend the column, set another model.task, or leave the rows out with table.where",
    )
