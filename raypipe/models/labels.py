"""What a label is: the one place that decides, by task, for every source and every table.

A source hands over what it holds: the text of a CSV cell or a folder's name, a number, a boolean, a list. `read` answers
with the label as a table keeps it, with "unlabelled" (None), or with the reason why nobody can tell. It never guesses: what
two sources would have to read differently is a reason, and ingest quarantines the row.

single_label   one name: text, a whole number, a boolean          blank or null: unlabelled
multi_label    a list of names, or a text like a|b                null: unlabelled; [] and blank: an image without tags
probability    a number from 0 to 1                               blank or null: unlabelled
regression     a finite number                                    blank or null: unlabelled

The same value reads the same wherever it stood. A CSV has only text, so the text says as much as the typed value: 1, 1.0
and "1.0" are the class 1; true and "True" are the class true; 01, 1.00 and 2.10 are text and stay what they are. Accents
are composed (NFC): macOS and Linux write é with different code points.
"""

from __future__ import annotations

import math
import re
import unicodedata
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["single_label", "multi_label", "probability", "regression"]
NUMERIC: tuple[Kind, ...] = ("probability", "regression")
BAR = "|"  # between the tags of one image

_WHOLE = re.compile(
    r"-?(?:0|[1-9][0-9]*)\.0"
)  # how pandas writes a whole number of a column with gaps
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
)  # float() also takes 1_000 and inf
_LIST = re.compile(
    r"\[.*\]|\{.*\}|\(\s*['\"].*\)", re.DOTALL
)  # how Python, numpy and JSON write a list
_LARGEST = float(np.finfo(np.float32).max)  # targets are float32
_REAL = (float, Decimal, np.floating)


class Label(NamedTuple):
    """`text` as the table keeps it, None for unlabelled. `why`: the value cannot be a label, and text is None."""

    text: str | None
    why: str = ""


def read(kind: Kind, value: Any) -> Label:
    """The label that this value means for this kind of task."""
    value = _plain(value)
    if value is None:
        return Label(None)
    if kind in NUMERIC:
        return _number(kind, value)
    if kind == "multi_label":
        return _tags(value)
    if isinstance(value, list):
        return Label(None, f"{_shown(value)} is a list; model.task=multi_label reads lists")
    return name(value)


def name(value: Any) -> Label:
    """One class, tag or split: what its text says; blank is none."""
    value = _plain(value)
    if value is None:
        return Label(None)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            return Label(None, f"{_shown(value)} is not UTF-8")
    if isinstance(value, list | dict):
        return Label(None, f"{_shown(value)} is not one name")
    if isinstance(value, bool):
        return Label(str(value).lower())
    if isinstance(value, int):
        return Label(str(value))
    if isinstance(value, _REAL):
        return (
            Label(_digits(value)) if math.isfinite(value) else Label(None, f"{value} is not a name")
        )
    return _text(str(value))


def _plain(value: Any) -> Any:
    """Arrays and tuples as lists, numpy's whole numbers and booleans as Python's; float32 stays, for its own digits."""
    if isinstance(value, np.ndarray | tuple | set | frozenset):
        return list(value)
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, Decimal) and value.is_nan():
        return math.nan  # a signaling NaN raises wherever it is compared
    return value


def _text(text: str) -> Label:
    text = unicodedata.normalize("NFC", text.strip())
    if not text:
        return Label(None)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, or a file name that is not UTF-8
        return Label(None, f"{_shown(text)} is not valid Unicode")
    if "\0" in text:
        return Label(None, f"{_shown(text)} holds a null character")
    if text.lower() in ("nan", "inf", "-inf"):
        return Label(None, f"{text} is how a number that is none is written, not a name")
    if _LIST.fullmatch(text):
        return Label(
            None,
            f"{_shown(text)} looks like a list that was written as text; write the tags as a|b",
        )
    if _WHOLE.fullmatch(text):
        return Label("0" if text == "-0.0" else text[:-2])
    return Label(text.lower() if text in ("True", "TRUE", "False", "FALSE") else text)


def _digits(number: Any) -> str:
    """The shortest text that reads as the same number in its own precision; a whole number has no point."""
    if isinstance(number, Decimal):
        return format(
            number.to_integral_value()
            if number == number.to_integral_value()
            else number.normalize(),
            "f",
        )
    if (
        float(number).is_integer() and abs(float(number)) < 1e16
    ):  # from there on Python writes an exponent
        return str(int(number))
    return str(number)


def _number(kind: Kind, value: Any) -> Label:
    if isinstance(value, str | bytes):
        text = (
            value if isinstance(value, str) else value.decode("utf-8-sig", errors="replace")
        ).strip()
        if not text:
            return Label(None)
        if not _NUMBER.fullmatch(text):
            return Label(None, f"{_shown(text)} is not a number")
        value = float(text)
    if isinstance(value, bool) or not isinstance(value, (int, *_REAL)):
        return Label(None, f"{_shown(value)} is not a number")
    if not abs(float(value) if isinstance(value, _REAL) else value) <= _LARGEST:  # NaN neither
        return Label(None, f"{_shown(value)} is not a finite number of 32 bits")
    number: Any = float(value) if isinstance(value, int | Decimal) else value
    if kind == "probability" and not 0 <= number <= 1:
        return Label(
            None, f"{_digits(number)} is not from 0 to 1; model.task=regression reads other numbers"
        )
    return Label(_digits(number))


def _tags(value: Any) -> Label:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            return Label(None, f"{_shown(value)} is not UTF-8")
    if isinstance(value, str):
        if _LIST.fullmatch(value.strip()):
            return Label(
                None,
                f"{_shown(value)} looks like a list that was written as text; write the tags as a|b",
            )
        return _joined(value.split(BAR))
    return _joined(value) if isinstance(value, list) else _tag(value)


def _tag(value: Any) -> Label:
    """A value that is no list and no text is one tag; true is a tag, as it is in a CSV."""
    tag = name(value)
    return _joined([tag.text]) if tag.text is not None else tag


def _joined(parts: list[Any]) -> Label:
    """Sorted tags between bars, each once. Blank ones are none, as in a||b."""
    if any(isinstance(part, bool | np.bool_) for part in parts) or _repeats_a_number(parts):
        return Label(
            None,
            f"{_shown(parts)} looks like one number a class; a list of tags names those that are set",
        )
    found = set()
    for part in parts:
        if part is None:
            return Label(None, "a list of tags holds a null")
        tag = name(part)
        if tag.why:
            return tag
        if BAR in (tag.text or ""):
            return Label(None, f"the tag {_shown(tag.text)} holds the bar that stands between tags")
        if tag.text:
            found.add(tag.text)
    return Label(BAR.join(sorted(found)))


def _repeats_a_number(parts: list[Any]) -> bool:
    """As [0, 1, 0] does, which means the second of three classes and not the tags 0 and 1."""
    held: list[Any] = [part for part in parts if isinstance(part, int | float | np.number)]
    numbers = [float(number) for number in held if abs(number) <= _LARGEST]
    return len(set(numbers)) < len(numbers)


def _shown(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
