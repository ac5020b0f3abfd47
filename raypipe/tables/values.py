"""Arrow columns as Python values that keep the digits of the column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError


def python(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Like `to_pylist`, but a float of 16 or 32 bits keeps its digits: 0.1 stays 0.1.

    `to_pylist` makes 0.10000000149011612 of it. Floats inside lists are kept, too. Raises DataError
    for a time that Python cannot hold.
    """
    narrow = _narrow_float(values.type)
    try:
        items: list[Any] = values.to_pylist()
    except (OverflowError, ValueError) as e:
        raise DataError(
            f"A column of type {values.type} cannot be read: {e}",
            rule="Times are of the years 1 to 9999",
            fix="Mend these rows, or use another column",
        ) from None
    if narrow is None:
        return items
    return [_with_type(item, narrow) for item in items]


def _narrow_float(kind: pa.DataType) -> type[np.floating] | None:
    """numpy's type for floats of 16 or 32 bits, at any depth of lists; None for other types."""
    # Labels may be lists of numbers.
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    if is_list or pa.types.is_dictionary(kind):
        return _narrow_float(kind.value_type)
    if pa.types.is_float16(kind):
        return np.float16
    if pa.types.is_float32(kind):
        return np.float32
    return None


def _with_type(value: Any, narrow: type[np.floating]) -> Any:
    if isinstance(value, list):
        return [_with_type(item, narrow) for item in value]
    return narrow(value) if isinstance(value, float) else value
