"""All rows of a table as any reader sees them, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.tables import fragment, scan
from raypipe.tables.table import Columns, ImageTable


def rows_of(
    uri: str | Path, version: int | None = None, options: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    table = ImageTable(str(uri), Columns(id="nr"), storage_options=options)
    fragments, schema = scan.plan(table, table.pin(version))
    found: list[dict[str, Any]] = []
    for group in fragments:
        found += fragment.read([group], schema, schema.names, {}, options)[0].to_pylist()
    return found
