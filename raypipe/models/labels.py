"""What a value means as a label. One place decides, by task, for every source and every table.

A source passes what it holds: the text of a CSV cell or a folder's name, a number, a boolean, a
list. `read` returns the label as a table keeps it, or None for "unlabelled", or the reason why the
value cannot be a label. It never guesses: where two sources would read a value differently, it
returns a reason, and ingest quarantines the row.

Kind           Labels                                     Unlabelled
single_label   one name: text, a whole number, a boolean  blank or null
multi_label    a list of names, or a text like a|b        null ([] and blank: an image without tags)
probability    a number from 0 to 1                       blank or null
regression     a finite number                            blank or null

The same value means the same in every source. A CSV has only text, so text means what the typed
value means: 1, 1.0 and "1.0" are the class 1; true and "True" are the class true. 01, 1.00 and 2.10
are text and stay as they are. Accents are composed (NFC): macOS and Linux write é with different
code points.
"""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Literal, NamedTuple
from uuid import UUID

import numpy as np

Kind = Literal["single_label", "multi_label", "probability", "regression"]
NUMERIC: tuple[Kind, ...] = ("probability", "regression")
BAR = "|"  # between the tags of one image

# How pandas writes a whole number of a column with gaps.
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)\.0")
# Stricter than float(), which also takes 1_000 and inf.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# How Python, numpy and JSON write a list.
_LIST = re.compile(r"\[.*\]|\{.*\}|\(\s*['\"].*\)", re.DOTALL)

_LARGEST = float(np.finfo(np.float32).max)  # targets are float32
_EXPONENT_FROM = 1e16  # from there on Python writes a float with an exponent
_REAL = (float, Decimal, np.floating)
# Values whose text is what they are; a function as a source may return anything.
_HAS_TEXT = (str, date, time, timedelta, np.datetime64, np.timedelta64, UUID, PurePath)


class Label(NamedTuple):
    """text: as the table keeps it; None: unlabelled. why: the value cannot be a label."""

    text: str | None
    why: str = ""


def read(kind: Kind, value: Any) -> Label:
    """The label that this value means for this kind of task."""
    value = _normalised(value)
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
    """One class, tag or split: the value's text. A blank text is no name."""
    value = _normalised(value)
    if value is None:
        return Label(None)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            return Label(None, f"{_shown(value)} is not UTF-8")
    if isinstance(value, list | dict):
        return Label(None, f"{_shown(value)} is not one name")
    # bool first: for Python it is an int, too.
    if isinstance(value, bool):
        return Label(str(value).lower())
    if isinstance(value, int):
        return Label(str(value))
    if isinstance(value, _REAL):
        if not math.isfinite(value):
            return Label(None, f"{value} is not a name")
        return Label(_digits(value))
    if isinstance(value, _HAS_TEXT):
        # A time that is none, as pandas has for a gap, is not equal to itself.
        if value != value:
            return Label(None, f"{value} is not a name")
        return _text(str(value))
    # The text of any other object may hold its address: a new class in every run.
    return Label(None, f"a value of type {type(value).__name__} is no name")


def spellings(text: str) -> list[str]:
    """This text and the others that name the same class: 1 and 1.0; true, True and TRUE."""
    class_name = name(text).text
    if class_name is None:
        return [text]
    # macOS writes accents as marks of their own.
    same = [text, class_name, unicodedata.normalize("NFD", class_name)]
    if _WHOLE.fullmatch(f"{class_name}.0"):
        same.append(f"{class_name}.0")
    if class_name == "0":
        same.append("-0.0")
    if class_name in ("true", "false"):
        same += [class_name.title(), class_name.upper()]
    return list(dict.fromkeys(same))


def _normalised(value: Any) -> Any:
    """Arrays, tuples and sets as lists; numpy's whole numbers and booleans as Python's.

    float32 stays, because it has its own shortest digits.
    """
    if isinstance(value, np.ndarray | tuple | set | frozenset):
        return list(value)
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, Decimal) and value.is_nan():
        return math.nan  # a signaling NaN raises wherever it is compared
    return value


def _text(text: str) -> Label:
    """A name that is given as text."""
    text = unicodedata.normalize("NFC", text.strip())
    if not text:
        return Label(None)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, or a file name that is not UTF-8.
        return Label(None, f"{_shown(text)} is not valid Unicode")
    if "\0" in text:
        return Label(None, f"{_shown(text)} holds a null character")
    if text.lower() in ("nan", "inf", "-inf"):
        return Label(None, f"{text} is how a number that is none is written, not a name")
    if _LIST.fullmatch(text):
        return Label(None, _list_as_text(text))
    # The same text as the typed value would have.
    if _WHOLE.fullmatch(text):
        return Label("0" if text == "-0.0" else text.removesuffix(".0"))
    if text in ("True", "TRUE", "False", "FALSE"):
        return Label(text.lower())
    return Label(text)


def _list_as_text(value: str) -> str:
    return f"{_shown(value)} looks like a list that was written as text; write the tags as a|b"


def _digits(number: Any) -> str:
    """The shortest text of the same number in its own precision; a whole number has no point."""
    if isinstance(number, Decimal):
        whole = number.to_integral_value()
        return format(whole if number == whole else number.normalize(), "f")
    as_float = float(number)
    if as_float.is_integer() and abs(as_float) < _EXPONENT_FROM:
        return str(int(number))
    return str(number)


def _number(kind: Kind, value: Any) -> Label:
    """A probability, or the number of a regression, as its shortest text; else why it is none."""
    # First a text becomes a float, if it is written as a number.
    if isinstance(value, bytes):
        value = value.decode("utf-8-sig", errors="replace")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return Label(None)
        if not _NUMBER.fullmatch(text):
            return Label(None, f"{_shown(text)} is not a number")
        value = float(text)
    # bool is an int for Python, but a boolean is no number here.
    if isinstance(value, bool) or not isinstance(value, (int, *_REAL)):
        return Label(None, f"{_shown(value)} is not a number")

    # A whole number is compared as it is, because it may be too large for a float.
    size = abs(float(value)) if isinstance(value, _REAL) else abs(value)
    # Not `size > _LARGEST`: NaN is neither above nor below.
    if not size <= _LARGEST:
        return Label(None, f"{_shown(value)} is not a finite number of 32 bits")

    # The float that the same number in a CSV would be. float32 stays: its 0.1 has shorter digits.
    number: Any = float(value) if isinstance(value, int | Decimal) else value
    if kind == "probability" and not 0 <= number <= 1:
        return Label(
            None, f"{_digits(number)} is not from 0 to 1; model.task=regression reads other numbers"
        )
    return Label(_digits(number))


def _tags(value: Any) -> Label:
    """The tags of one image, from a list, a text with bars, or a single value."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            return Label(None, f"{_shown(value)} is not UTF-8")
    if isinstance(value, str):
        if _LIST.fullmatch(value.strip()):
            return Label(None, _list_as_text(value))
        return _joined(value.split(BAR))
    if isinstance(value, list):
        return _joined(value)

    # A number or a boolean is one tag, as it is in a CSV.
    tag = name(value)
    return _joined([tag.text]) if tag.text is not None else tag


def _joined(parts: list[Any]) -> Label:
    """Sorted tags between bars, each once. Blank parts are left out, as in a||b."""
    has_boolean = any(isinstance(part, bool | np.bool_) for part in parts)
    if has_boolean or _repeats_a_number(parts):
        return Label(
            None,
            f"{_shown(parts)} looks like one number a class; "
            "a list of tags names those that are set",
        )
    # The first part that is no tag makes the whole label unusable.
    tags: set[str] = set()
    for part in parts:
        if part is None:
            return Label(None, "a list of tags holds a null")
        tag = name(part)
        if tag.why:
            return tag
        if tag.text is None:
            continue
        if BAR in tag.text:
            return Label(None, f"the tag {_shown(tag.text)} holds the bar that stands between tags")
        tags.add(tag.text)
    return Label(BAR.join(sorted(tags)))


def _repeats_a_number(parts: list[Any]) -> bool:
    """True for [0, 1, 0]: it means the second of three classes, and not the tags 0 and 1."""
    numbers: list[float] = []
    for part in parts:
        if not isinstance(part, int | float | np.number):
            continue
        number: Any = part
        if abs(number) <= _LARGEST:
            numbers.append(float(number))
    return len(set(numbers)) < len(numbers)


def _shown(value: Any) -> str:
    """The value in a message: at most 80 characters, unprintable ones escaped."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
