"""Conditions `--where COLUMN=VALUE` and `where:`: the text becomes a value of the column's type.

Compared as text, `x=01`, `x=1.0` or a time in another format than Arrow's matched no row and gave
no error. As values, 1, 01 and 1.0 are one number; 2026-11-01, 2026-11-01T00:00:00Z and
2026-11-01 01:00+01:00 are one time. raypipe refuses a text that the column's type cannot hold
(`x=abc` for a number) and columns that do not hold single values.

A column of texts is compared as text, as every engine does: lots 1, 01 and 1.0 may be three lots.
But a label is a class, and reports call the label "1.0" the class 1 (models/labels.py): so a
condition on the column of labels finds every spelling of its class. Several tags, like a|b, have
too many spellings to list: b|a, `a | b` and a|b|a are the same tags. So they are marked (Tags), and
the texts of the column are read as tags.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Context, Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.models import labels
from raypipe.tables import names

Where = dict[str, str | list[str]]
LONGEST = 40  # digits of a whole number
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class Tags(str):
    """Tags that a column of texts is searched for, as `labels` writes them: a|b."""


def is_listed(kind: pa.DataType) -> bool:
    """Whether a column holds lists of single values, like the tags of an image."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return not pa.types.is_nested(kind.value_type)


def is_tags(kind: pa.DataType) -> bool:
    """Whether a column holds lists of texts: their order means nothing."""
    return is_listed(kind) and _is_text(kind.value_type)


def both(first: Where, second: Where, schema: pa.Schema, label: str = "") -> Where:
    """The condition that a row meets both. Raises DataError for a text that a type cannot hold.

    A dict has one entry a column, so `first | second` would forget what `first` says of it. label:
    the column of labels; see by_class.
    """
    first = by_class(first, schema, label)
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        kind = schema.field(name).type
        allowed = values(_listed(first[name]), kind, name).to_pylist()
        kept = []
        for text in _listed(second[name]):
            meant = _listed(by_class({name: text}, schema, label)[name])
            if any(value in allowed for value in values(meant, kind, name).to_pylist()):
                kept.append(text)
        joined[name] = kept
    return joined


def _listed(wanted: str | list[str]) -> list[str]:
    return [wanted] if isinstance(wanted, str) else wanted


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def values(texts: list[str], kind: pa.DataType, name: str) -> pa.Array:
    """The texts as values of the type `kind`, to compare a column with.

    For a list column these are its tags joined by bars: a|b. `name` is the column, for messages.
    Raises DataError for a text that the type cannot hold, and for types that hold no single value.
    """
    # A dictionary is a way to store values, not a type of its own.
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_tags(kind):
        return pa.array([names.wanted_tags(text) for text in texts], pa.string())
    if is_listed(kind) or _is_text(kind):
        return pa.array(texts, pa.string())
    # No value matches no row, in a column of any type.
    if not texts:
        return pa.array([], pa.string() if pa.types.is_nested(kind) else kind)

    read = _reader_of(kind)
    if read is None:
        raise DataError(
            f"Column {name!r} cannot be compared with a text",
            got=str(kind),
            rule="A condition compares names, numbers, dates, times, or tags like a|b",
            fix="Take another column",
        )
    # One text at a time, so that the message can name the one that fails.
    parsed = []
    for text in texts:
        try:
            parsed.append(pa.scalar(read(text.strip(), kind), kind))
        except (ValueError, KeyError, ArithmeticError, pa.ArrowException):
            raise DataError(
                f"No value of column {name!r} can be this",
                got=text,
                rule=f"Its type is {kind}",
                fix="Write it like the column does",
            ) from None
    return pa.array([value.as_py() for value in parsed], kind)


def by_class(where: Where, schema: pa.Schema, label: str) -> Where:
    """`where` with each spelling of the classes that it wants of a text column `label`, and with
    Tags for several tags.
    """
    if label not in where or label not in schema.names:
        return where
    kind = schema.field(label).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not _is_text(kind):
        return where
    texts = [same for text in _listed(where[label]) for same in spelled(text)]
    return {**where, label: list(dict.fromkeys(texts))}


def spelled(text: str) -> list[str]:
    """The texts of a wanted class, or the wanted tags as Tags."""
    if isinstance(text, Tags):
        return [text]
    tags = labels.read("multi_label", text).text if labels.BAR in text else None
    return [Tags(tags)] if tags else labels.spellings(text)


def with_tags(wanted: list[str], found: list[str | None]) -> list[str]:
    """`wanted`, and those of the texts `found` that mean some Tags of it."""
    tags = {text for text in wanted if isinstance(text, Tags)}
    if not tags:
        return wanted
    same = [text for text in found if labels.read("multi_label", text).text in tags]
    return [*wanted, *(text for text in same if text is not None)]


def as_text(where: Where, schema: pa.Schema, columns: set[str]) -> Where:
    """`where` with the values of `columns` rewritten as `names` writes them.

    These columns (ids, labels, splits) are read as text: for a number column, 01 becomes 1.
    """
    rewritten = dict(where)
    for name in columns & set(where):
        kind = schema.field(name).type
        # Texts stay as they are. Tags, which are texts too, would become plain ones.
        if _is_text(kind):
            continue
        parsed = values(_listed(where[name]), kind, name)
        texts = names.text(parsed).to_pylist()
        # A label is a list of tags whatever their type: [2, 1] is the label 1|2.
        if is_listed(kind):
            texts = [names.wanted_tags(text) for text in texts]
        rewritten[name] = texts
    return rewritten


# Readers: text -> value of a type. They raise ValueError, KeyError or ArithmeticError.


def _whole(text: str, kind: pa.DataType) -> int:
    number = Decimal(text)
    # int() of 1e999999999 would not end, so the digits are counted first.
    if number.adjusted() > LONGEST or number != number.to_integral_value():
        raise ValueError("not whole")
    return int(number)


def _decimal(text: str, kind: pa.DataType) -> Decimal:
    # A column of two digits cannot hold 0.125: no row could match.
    exact = Decimal(text)
    # Columns have up to 76 digits, and Python counts with 28.
    rounded = exact.quantize(Decimal(1).scaleb(-kind.scale), context=Context(prec=76))
    if rounded != exact:
        raise InvalidOperation
    return rounded


def _truth(text: str, kind: pa.DataType) -> bool:
    return _TRUTH[text.lower()]


def _moment(text: str) -> datetime:
    # Python 3.10 does not know the letter Z for UTC.
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _date(text: str, kind: pa.DataType) -> date:
    # A date column holds days: a text with a time of day matches none.
    moment = _moment(text)
    midnight = datetime.combine(moment.date(), datetime.min.time(), moment.tzinfo)
    if moment != midnight:
        raise ValueError("not a day")
    return moment.date()


def _time(text: str, kind: pa.DataType) -> datetime:
    """A time without a zone counts as UTC."""
    moment = _moment(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    moment = moment.astimezone(timezone.utc)
    return moment if kind.tz else moment.replace(tzinfo=None)


# The first test that accepts a type gives its reader.
_READERS: list[tuple[Callable[[pa.DataType], bool], Callable[[str, Any], Any]]] = [
    (pa.types.is_integer, _whole),
    (pa.types.is_floating, lambda text, kind: float(text)),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_boolean, _truth),
    (pa.types.is_date, _date),
    (pa.types.is_timestamp, _time),
]


def _reader_of(kind: pa.DataType) -> Callable[[str, Any], Any] | None:
    """The reader for a type; None for a type that has no single values."""
    for is_of_type, reader in _READERS:
        if is_of_type(kind):
            return reader
    return None
