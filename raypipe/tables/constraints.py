"""What a table demands of its rows: CHECK constraints, NOT NULL columns, generated columns.

deltalake checks them when it writes rows. It does not when files are swapped, as `rewrite` does: a
new label would break a constraint without a word. So changed rows are checked here, before anything
is written. Only the columns that an expression names are read, and the engine that deltalake brings
evaluates it.
Source: the Delta protocol, sections "CHECK Constraints", "Column Invariants", "Generated Columns".
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from raypipe.errors import DataError, one_line
from raypipe.stores import message_of

CHECK = "delta.constraints."
APPEND_ONLY = "delta.appendOnly"
# Column names keep their capitals.
_AS_WRITTEN = {"datafusion.sql_parser.enable_ident_normalization": "false"}
# How deltalake says that rows break a constraint, or that a column may not be null.
_BROKEN = re.compile(r"failed validation check|non-nullable|Invariant")


def require_changeable(delta: DeltaTable, uri: str) -> None:
    """Raise DataError for a table whose rows may only be added."""
    if (delta.metadata().configuration.get(APPEND_ONLY) or "").lower() == "true":
        raise DataError(
            f"Rows of {uri} may not be changed or dropped",
            got=f"{APPEND_ONLY}=true",
            rule="Its owner allows new rows only",
            fix=f"ALTER TABLE … SET TBLPROPERTIES ('{APPEND_ONLY}' = 'false')",
        )


def needed(delta: DeltaTable, changed: Iterable[str]) -> list[str]:
    """The columns that `require` needs to judge a change of these columns; none if nothing asks."""
    have = [field.name for field in delta.schema().fields]
    changed = set(changed)
    names: set[str] = set()
    for expression in _expressions(delta).values():
        mentioned = {name for name in have if _mentions(expression, name)}
        if mentioned & changed:
            names |= mentioned
    names |= changed & _not_null(delta)
    return [name for name in have if name in names]


def require(delta: DeltaTable, uri: str, rows: pa.Table, changed: Iterable[str]) -> None:
    """Raise DataError unless these rows, which hold the `needed` columns, may be in the table.

    A constraint that is null for a row is broken, as Delta has it.
    """
    changed = set(changed)
    for name in sorted(changed & _not_null(delta)):
        if rows[name].null_count:
            raise DataError(
                f"Column {name!r} of {uri} may not be null",
                got=f"{rows[name].null_count} rows",
                rule="The column is NOT NULL; nothing was written",
                fix="Give these rows a value, or ALTER TABLE … ALTER COLUMN … DROP NOT NULL",
            )
    asked = {}
    for name, expression in _expressions(delta).items():
        if any(_mentions(expression, column) for column in changed):
            asked[name] = expression
    if not asked or not len(rows):
        return

    # deltalake's engine reads tables only: the rows become one for a moment.
    with tempfile.TemporaryDirectory() as folder:
        write_deltalake(folder, rows)
        engine = QueryBuilder(_AS_WRITTEN).register("changed", DeltaTable(folder))
        for name, expression in asked.items():
            _require_one(engine, uri, name, expression)


def refusal(error: Exception, delta: DeltaTable | None, uri: str) -> DataError | None:
    """The error for rows that deltalake refused because of a constraint; None for other errors."""
    if not _BROKEN.search(str(error)):
        return None
    rules = [f"{name}: {text}" for name, text in (_expressions(delta) if delta else {}).items()]
    if delta is not None:
        rules += [f"{name} is NOT NULL" for name in sorted(_not_null(delta))]
    return DataError(
        f"New rows break a constraint of {uri}",
        # Without deltalake's preview of the rows, which shows whole images.
        got=one_line(message_of(error).partition("Preview")[0]),
        rule=f"{'; '.join(rules)}; nothing of this commit was written",
        fix="Mend the source, or ALTER TABLE … DROP CONSTRAINT",
    )


def _require_one(engine: QueryBuilder, uri: str, name: str, expression: str) -> None:
    query = f"SELECT count(*) AS broken FROM changed WHERE ({expression}) IS NOT TRUE"
    try:
        broken = pa.table(engine.execute(query).read_all())["broken"][0].as_py()
    except Exception as e:  # deltalake's errors share no base class
        raise DataError(
            f"Constraint {name!r} of {uri} cannot be checked: {one_line(message_of(e))}",
            got=expression,
            rule="Rows that may break a constraint are not written",
            fix="Change the rows with the engine that knows it, or drop the constraint",
        ) from None
    if broken:
        raise DataError(
            f"The change would break constraint {name!r} of {uri}",
            got=f"{broken} rows",
            rule=f"{expression}; nothing was written",
            fix="Mend the new values, or ALTER TABLE … DROP CONSTRAINT",
        )


def _expressions(delta: DeltaTable) -> dict[str, str]:
    """What must be true for every row, by name: constraints, invariants, generated columns."""
    expressions = {}
    for key, value in delta.metadata().configuration.items():
        if key.startswith(CHECK) and value:
            expressions[key.removeprefix(CHECK)] = value
    for field in delta.schema().fields:
        invariant = field.metadata.get("delta.invariants")
        if invariant:
            expressions[field.name] = json.loads(str(invariant))["expression"]["expression"]
        generated = field.metadata.get("delta.generationExpression")
        if generated:
            column = f'"{field.name}"'
            expressions[field.name] = f"{column} IS NOT DISTINCT FROM ({generated})"
    return expressions


def _not_null(delta: DeltaTable) -> set[str]:
    return {field.name for field in delta.schema().fields if not field.nullable}


def _mentions(expression: str, column: str) -> bool:
    """Whether an expression may be about a column; a column of the same name in a text counts."""
    return bool(re.search(rf"(?<!\w){re.escape(column)}(?!\w)", expression, re.IGNORECASE))
