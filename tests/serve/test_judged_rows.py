"""What slices and groups are made of keeps apart what the table keeps apart."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from raypipe.serve import evaluation, judged_rows

LONG = 2**60  # next to it, a float64 tells numbers apart that differ by 256


@pytest.mark.parametrize(
    "column",
    [
        pa.array([LONG, LONG + 1, None]),
        pa.array([Decimal(LONG), Decimal(LONG + 1), None], pa.decimal128(20, 0)),
    ],
    ids=["long", "decimal"],
)
def test_long_numbers_name_groups_and_slices(column: pa.Array) -> None:
    """They ended an evaluation in a traceback, or two parts were one."""
    values = pa.chunked_array([column])
    expected = [str(LONG), str(LONG + 1), None]
    named = evaluation._values(judged_rows._slice_values(values)).tolist()
    assert [None if name is None else str(name) for name in named] == expected
    assert evaluation._values(judged_rows._texts(values)).tolist() == expected


def test_short_numbers_stay_numbers_and_nan_is_no_group() -> None:
    for kind in (pa.int32(), pa.int64(), pa.float64(), pa.decimal128(10, 2)):
        values = pa.chunked_array([pa.array([1.0, None, 3.0]).cast(kind)])
        found = evaluation._values(judged_rows._slice_values(values))
        assert found.dtype.kind == "f" and found[[0, 2]].tolist() == [1, 3]
    numbers = pa.chunked_array([pa.array([0.5, float("nan"), None])])
    assert judged_rows._texts(numbers).to_pylist() == ["0.5", None, None]
