"""Ids, labels, splits and tags as text: the same text wherever a value is read or compared.

A number is the text that ingest makes of it (`models/labels.py`): 1.0 is "1", as 1 is. Arrow writes
1e15 and the decimal 2.00 in other ways, so a table would have had other classes than its ingest.
A list of tags has no order: its text is the sorted tags, each once, with bars between.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.models import labels
from raypipe.models.labels import BAR
from raypipe.tables.values import python


def text(values: pa.Array) -> pa.Array:
    """Single values as text; null stays null. Raises pyarrow's errors."""
    kind = values.type
    has_own_digits = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not has_own_digits and not pa.types.is_timestamp(kind):
        return values.cast(pa.string())

    # A column has few different labels: each is written once.
    encoded = values.dictionary_encode()
    texts = [_text(value) for value in python(encoded.dictionary)]
    return pa.array(texts, pa.string()).take(encoded.indices)


def _text(value: object) -> str:
    # NaN is no name. As text it is refused by whoever needs a label.
    return labels.name(value).text or str(value)


def tags(lists: pa.Array) -> pa.Array:
    """Lists of single values as text. Two lists with the same values have the same text.

    Null for a null, and for a list that holds one.
    """
    items = text(pc.list_flatten(lists))
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    parents = pa.array(np.repeat(np.arange(len(lists)), lengths))

    # One row for each tag of each list, sorted within the list.
    pairs = pa.table({"list": parents, "item": items}).group_by(["list", "item"]).aggregate([])
    pairs = pairs.sort_by([("list", "ascending"), ("item", "ascending")])
    counts = np.bincount(pairs["list"].to_numpy(), minlength=len(lists))
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    ordered = pa.ListArray.from_arrays(
        pa.array(ends), pairs["item"].combine_chunks(), mask=lists.is_null()
    )
    return pc.binary_join(ordered, BAR)


def wanted_tags(condition: str) -> str:
    """The text of the tags that a condition like b|a names, as `tags` writes them: a|b."""
    parts = [part.strip() for part in condition.split(BAR)]
    return BAR.join(sorted({part for part in parts if part}))
