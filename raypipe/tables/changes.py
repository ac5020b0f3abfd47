"""Which rows of a version change, and how: the values that `rewrite` and its parts hand to each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """One row of one version: its file, as `Fragment.file` names it, and the row's number in that
    file.
    """

    file: str
    row: int


@dataclass
class Change:
    """What changes in one file: the rows to drop, and new values of text columns by row number."""

    gone: set[int] = field(default_factory=set)
    values: dict[str, dict[int, str | None]] = field(default_factory=dict)


Changes = Mapping[str, Change]  # by file
