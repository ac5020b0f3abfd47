"""A search that a kill left unfinished on another version of the table.

`table.version: null` means the newest one. A commit between a kill and the next start, or an
OPTIMIZE that changes no row, makes the same command another search: its key has the version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raypipe.tables.table import TableVersion

MOST = 100
"""Versions back; a key takes a millisecond."""


def unfinished(
    folder: Path, config: str, key_at: Callable[[TableVersion], str], now: TableVersion
) -> str:
    """Which unfinished search differs from the one that begins in the table's version alone; "" if
    none does.

    folder: of the search that begins. config: its config.yaml. key_at: the name of its folder on
    another version. now: the version that it is of.
    """
    for file in sorted(folder.parent.glob("*/config.yaml")):
        other = file.parent
        if other == folder or (other / "result.json").exists():
            continue
        if file.read_text(encoding="utf-8") != config:
            continue
        for number in range(now.version - 1, max(-1, now.version - 1 - MOST), -1):
            if key_at(replace(now, version=number)) == other.name:
                return (
                    f"The table has changed since {other} was interrupted: this is another search, "
                    f"of version {now.version}. table.version={number} goes on with that one"
                )
    return ""
