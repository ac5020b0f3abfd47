"""The rows to predict, cut into pieces: what is predicted together, and kept exactly once.

A piece is some neighbouring row groups. The cut depends on the rows alone, so a run that goes on
after a kill, or beside another, means the same rows by the same number. A commit holds several
pieces; its part is named by the first and the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypipe.tables.between import Rows
from raypipe.tables.fragment import Fragment

PIECE_ROWS = 256
"""Rows of a piece, if its row groups are smaller. A new value needs a new FORMAT of rows."""


@dataclass(frozen=True)
class Piece:
    """number: its place among the prediction's pieces. rows: how many rows it has."""

    number: int
    fragments: tuple[Fragment, ...]
    rows: int


def cut(rows: Rows) -> list[Piece]:
    """All pieces of a prediction, in order. Row groups are never cut."""
    pieces: list[Piece] = []
    group: list[Fragment] = []
    size = 0
    for one, count in zip(rows.fragments, rows.counts, strict=True):
        if group and size + count > PIECE_ROWS:
            pieces.append(Piece(len(pieces), tuple(group), size))
            group, size = [], 0
        group.append(one)
        size += count
    if group:
        pieces.append(Piece(len(pieces), tuple(group), size))
    return pieces


def part(first: int, last: int) -> str:
    """The name of a commit that holds these pieces and all between."""
    return f"{first}-{last}"


def is_part(name: str | None) -> bool:
    """Can a commit have this name?"""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", name or "")
    return found is not None and int(found[1]) <= int(found[2])


def numbers(parts: Iterable[str]) -> set[int]:
    """The pieces that are in these parts."""
    found: set[int] = set()
    for name in parts:
        first, last = name.split("-")
        found.update(range(int(first), int(last) + 1))
    return found


def neighbours(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges (first, last) without a gap."""
    ranges: list[tuple[int, int]] = []
    for number in pieces:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
