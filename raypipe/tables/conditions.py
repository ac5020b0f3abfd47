"""`--where COLUMN=VALUE` and `where:`: a text means what the column's type reads it as, or it is refused.

Compared as text, `x=01`, `x=1.0` or a time in another form than Arrow's found no row and said nothing. So the text becomes
a value of the column's type: 1, 01 and 1.0 are one number, 2026-11-01, 2026-11-01T00:00:00Z and 2026-11-01 01:00+01:00 one
time. What a column cannot hold (`x=abc` of a number) and columns that hold no single value are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError

Where = dict[str, str | list[str]]
LONGEST = 40  # digits of a whole number
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def is_listed(kind: pa.DataType) -> bool:
    """A list of single values, like the tags of an image."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not pa.types.is_nested(
        kind.value_type
    )


def values(texts: list[str], kind: pa.DataType, name: str) -> pa.Array:
    """The texts as values that a column of this type is compared with. Raises DataError for one that it cannot hold."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if (
        is_listed(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    ):
        return pa.array(texts, pa.string())  # of a list: its tags with bars between them, a|b
    if not texts:
        return pa.array([], pa.string() if pa.types.is_nested(kind) else kind)
    read = next((reader for fits, reader in _READERS if fits(kind)), None)
    if read is None:
        raise DataError(
            f"Column {name!r} cannot be compared with a text",
            got=str(kind),
            rule="A condition compares names, numbers, dates, times, or tags like a|b",
            fix="Take another column",
        )
    found = []
    for text in texts:
        try:
            found.append(pa.scalar(read(text.strip(), kind), kind))
        except (ValueError, KeyError, ArithmeticError, pa.ArrowException):
            raise DataError(
                f"No value of column {name!r} can be this",
                got=text,
                rule=f"Its type is {kind}",
                fix="Write it like the column does",
            ) from None
    return pa.array([f.as_py() for f in found], kind)


def as_text(where: Where, schema: pa.Schema, columns: set[str]) -> Where:
    """Conditions on columns that are read as text (ids, labels, splits), written as Arrow writes the column's own type."""
    out = dict(where)
    for name in columns & set(where):
        kind, wanted = schema.field(name).type, where[name]
        read = values([wanted] if isinstance(wanted, str) else wanted, kind, name)
        out[name] = read.cast(pa.string()).to_pylist()
    return out


def _whole(text: str, kind: pa.DataType) -> int:
    found = Decimal(text)
    if (
        found.adjusted() > LONGEST or found != found.to_integral_value()
    ):  # int() of 1e999999999 would not end
        raise ValueError("not whole")
    return int(found)


def _decimal(text: str, kind: pa.DataType) -> Decimal:
    found = Decimal(text).quantize(Decimal(1).scaleb(-kind.scale))
    if found != Decimal(text):
        raise InvalidOperation
    return found


def _truth(text: str, kind: pa.DataType) -> bool:
    return _TRUTH[text.lower()]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _date(text: str, kind: pa.DataType) -> date:
    found = _moment(text)
    if found != datetime.combine(found.date(), datetime.min.time(), found.tzinfo):
        raise ValueError("not a day")
    return found.date()


def _time(text: str, kind: pa.DataType) -> datetime:
    found = _moment(text)
    utc = found.astimezone(timezone.utc) if found.tzinfo else found.replace(tzinfo=timezone.utc)
    return utc if kind.tz else utc.replace(tzinfo=None)


_READERS: list[tuple[Callable[[pa.DataType], bool], Callable[[str, Any], Any]]] = [
    (pa.types.is_integer, _whole),
    (pa.types.is_floating, lambda text, kind: float(text)),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_boolean, _truth),
    (pa.types.is_date, _date),
    (pa.types.is_timestamp, _time),
]
