"""The data files of a foreign Delta table must lie in its folder.

A Delta log may name its files by absolute paths. A table that somebody else made must not make
raypipe read files of this machine.
"""

from __future__ import annotations

from raypipe.errors import DataError
from raypipe.tables import fragment, log
from raypipe.tables.sources.fence import ROOTS, Fence
from raypipe.tables.table import ImageTable, TableVersion


def require(table: ImageTable, pinned: TableVersion, fence: Fence) -> None:
    """Raise DataError for a data file outside of the table and of the fence's roots.

    A shallow clone has such files: set `roots` to the table that it was cloned from.
    """
    files, _ = log.files(table.delta(pinned.version), table.uri, {})
    folder = fragment.local(table.uri)
    if "://" not in folder:
        own = Fence(folder, fence.roots, fence.max_bytes)
        for file in files:
            own.require(file.path, f"A file of {pinned}")
        return

    # In an object store there are no links: comparing addresses is enough.
    roots = [root.rstrip("/") + "/" for root in fence.roots]
    for file in files:
        address = f"{file.uri.rstrip('/')}/{file.path}"
        is_own = file.uri == table.uri
        if not is_own and not any(address.startswith(root) for root in roots):
            raise DataError(
                f"A file of {pinned} leads out of the table",
                got=address,
                rule="A table's files lie below it",
                fix=ROOTS,
            )
