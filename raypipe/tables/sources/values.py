"""Arrow columns as Python values that still say what the column said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def python(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """As `to_pylist`, but a float of 16 or 32 bits keeps its own digits: 0.1 stays 0.1, also inside lists."""
    own = _digits(values.type)
    return [_narrow(value, own) for value in values.to_pylist()] if own else values.to_pylist()  # type: ignore[no-any-return]


def _digits(kind: pa.DataType) -> type[np.floating] | None:
    """numpy's type for floats that Python's 64 bits would write with more digits than they have."""
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _digits(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return _digits(kind.value_type)
    return (
        np.float16
        if pa.types.is_float16(kind)
        else np.float32
        if pa.types.is_float32(kind)
        else None
    )


def _narrow(value: Any, own: type[np.floating]) -> Any:
    if isinstance(value, list):
        return [_narrow(item, own) for item in value]
    return own(value) if isinstance(value, float) else value
