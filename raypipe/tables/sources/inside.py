"""The data files of a Delta table: read as its log says, and only those in its folder.

A Delta log may name its files by absolute paths. A table that somebody else made must not make
raypipe read files of this machine. And a data file that is read without its log may be one that was
removed, or hold rows that were deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from raypipe import stores
from raypipe.errors import DataError
from raypipe.tables import log
from raypipe.tables.sources.fence import ROOTS, Fence
from raypipe.tables.table import ImageTable, TableVersion


def require(table: ImageTable, pinned: TableVersion, fence: Fence) -> None:
    """Raise DataError for a data file outside of the table and of the fence's roots.

    A shallow clone has such files: set `roots` to the table that it was cloned from.
    """
    files, _ = log.files(table.at(pinned), table.uri, {})
    folder = stores.local(table.uri)
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


def refuse_data_files(files: Iterable[Path]) -> None:
    """Raise DataError for a file that lies in the folder of a Delta table."""
    seen: set[Path] = set()
    for file in files:
        for folder in file.absolute().parents:
            if folder in seen:
                break  # and so were its parents
            seen.add(folder)
            if (folder / "_delta_log").is_dir():
                raise DataError(
                    "This file belongs to a Delta table",
                    got=str(file),
                    rule="Only the table's log knows which files and rows were removed",
                    fix=f"Set ingest.from.kind=delta and ingest.from.images={folder}",
                )


def is_hidden(name: PurePath) -> bool:
    """Whether Spark and Delta leave this path out: a part of it begins with a dot or underscore.

    Folders of partitions, like _day=1, count.
    """
    return any(part.startswith((".", "_")) and "=" not in part for part in name.parts)
