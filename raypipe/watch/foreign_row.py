"""Rows that something else than this raypipe wrote into one of its tables: one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from raypipe.errors import DataError


@contextmanager
def refused(table: str, name: str, row: Mapping[str, Any]) -> Iterator[None]:
    """Turn what goes wrong in reading such a row into a DataError.

    table: what the table holds, as "decisions". name: of a row, as "decision".
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise DataError(
            f"The table of {table} has a row that this raypipe did not write",
            got=f"{name} {row.get('key')}: {type(e).__name__}",
            rule="Nobody but raypipe adds rows to this table; a newer one may say more",
            fix="Install the raypipe that wrote it, or restore the table to its version before it",
        ) from None
