"""A search that a kill left unfinished on another version of the table.

`table.version: null` means the newest one. A commit between a kill and the next start, or an
OPTIMIZE that changes no row, makes the same command another search: its key has the version.

A search is finished when its model is registered (finished.close): after its trials a refit may
take an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from raypipe.files import is_owned
from raypipe.search import finished
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
    for file in _newest_first(folder.parent.glob("*/config.yaml")):
        other = file.parent
        if other == folder or (other / finished.BEST).exists() or is_owned(other):
            continue
        if _text(file) != config:
            continue
        for number in range(now.version - 1, max(-1, now.version - 1 - MOST), -1):
            if key_at(replace(now, version=number)) == other.name:
                return (
                    f"The table has changed since {other} was interrupted: this is another search, "
                    f"of version {now.version}. table.version={number} goes on with that one"
                )
    return ""


def _newest_first(files: Iterable[Path]) -> list[Path]:
    def age(file: Path) -> float:
        with suppress(OSError):
            return -file.stat().st_mtime
        return 0.0

    return sorted(files, key=age)


def _text(file: Path) -> str | None:
    """What a search saved; None if it is damaged or gone, which costs nobody else anything."""
    with suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8")
    return None
