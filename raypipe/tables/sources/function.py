"""A Python function as a source: `images: module:function` names it.

The function takes no arguments. It returns the folder of the images and an iterable of dicts, one
for each image: the path in the folder under `file_column`, and any other columns. So a data set
with a layout of its own needs no copy and no labels file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import DataError, RaypipeError, nearest, one_line
from raypipe.models import labels as meaning
from raypipe.tables import conditions, names
from raypipe.tables.sources.labels import Row, require, tell_of_split

RULE = (
    "module:function names a function without arguments that returns (folder, rows): "
    "the images' folder, and a dict for each image"
)


def rows(
    name: str,
    columns: list[str],
    where: Mapping[str, str | list[str]],
    label: str | None = None,
) -> tuple[Path, list[Row]]:
    """(the folder of the images, the rows whose columns have the values of `where`).

    label: the column of labels. A condition on it finds a class in each of its spellings. Raises
    DataError for a function that cannot be imported or called, returns something else, or has rows
    without one of the columns.
    """
    folder, found = _call(_function(name), name)
    wanted = {column: _texts(values, column == label) for column, values in where.items()}
    kept = []
    seen: set[str] = set()
    for row in found:
        seen.update(map(str, row))
        require(name, list(row), *columns, *where)
        if all(_is_one_of(row[column], texts) for column, texts in wanted.items()):
            kept.append(row)
    tell_of_split(name, sorted(seen), columns)
    return folder, kept


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise DataError("The source names no function", got=name, rule=RULE)
    try:
        module = importlib.import_module(module_name)
    except Exception as e:
        raise DataError(
            f"The module of the source cannot be imported: {one_line(e)}", got=name, rule=RULE
        ) from e
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value)]
        raise DataError(
            f"{module_name} has no function {function_name!r}",
            rule=RULE,
            fix=nearest(function_name, functions),
        )
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], name: str) -> tuple[Path, list[Row]]:
    try:
        folder, listed = function()
        # A generator runs here, not later: its errors are the function's too.
        return Path(folder), list(_dicts(listed, name))
    except RaypipeError:
        raise
    except (Exception, SystemExit) as e:
        problem = one_line(f"{type(e).__name__}: {e}")
        raise DataError(f"The function of the source failed: {problem}", got=name, rule=RULE) from e


def _dicts(listed: Any, name: str) -> Iterator[Row]:
    for row in iter(listed):
        if not isinstance(row, Mapping):
            raise DataError(
                "The function of the source returned a row that is no dict",
                got=f"{name}: {type(row).__name__}",
                rule=RULE,
            )
        yield dict(row)


def _texts(values: str | list[str], is_label: bool) -> list[str]:
    """The texts that a condition names; of a label those of its class."""
    texts = [values] if isinstance(values, str) else values
    return [same for text in texts for same in conditions.spelled(text)] if is_label else texts


def _is_one_of(value: Any, wanted: list[str]) -> bool:
    """Whether a condition like `kind=1` or `tags=a|b` means this value, as in a table."""
    if value is None:
        return False
    if isinstance(value, str):
        return value in conditions.with_tags(wanted, [value])
    if isinstance(value, list | tuple | set | frozenset):
        # Tags have no order.
        tags = meaning.BAR.join(str(tag) for tag in value)
        return names.wanted_tags(tags) in [names.wanted_tags(text) for text in wanted]
    # 1, 1.0 and "1.0" are one number; True and "true" are one truth.
    text = meaning.name(value).text
    return text is not None and text in [meaning.name(other).text for other in wanted]
