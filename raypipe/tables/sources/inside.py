"""A Delta table's log names its data files, also by absolute paths: a table somebody else made must not name ours."""

from __future__ import annotations

from urllib.parse import unquote

from raypipe.errors import DataError
from raypipe.tables import log
from raypipe.tables.sources.fence import ROOTS, Fence
from raypipe.tables.table import ImageTable, TableVersion


def require(table: ImageTable, pinned: TableVersion, fence: Fence) -> None:
    """Raise DataError for a data file outside of the table's folder that no root of the fence holds (a shallow clone's)."""
    files, _ = log.files(table.delta(pinned.version), table.uri, {})
    if "://" not in table.uri or table.uri.startswith("file://"):
        place = unquote(table.uri.removeprefix("file://")) if "://" in table.uri else table.uri
        own = Fence(place, fence.roots, fence.max_bytes)
        for file in files:
            own.require(file.path, f"A file of {pinned}")
        return
    for file in files:
        address = f"{file.uri.rstrip('/')}/{file.path}"
        if file.uri != table.uri and not any(
            address.startswith(root.rstrip("/") + "/") for root in fence.roots
        ):
            raise DataError(
                f"A file of {pinned} leads out of the table",
                got=address,
                rule="A table's files lie below it",
                fix=ROOTS,
            )
