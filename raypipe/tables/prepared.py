"""What a prepared table says about itself: the version that it was made from, and how.

The record is a table property, so it travels with the table and outlives the commits that a log
forgets. A property and rows cannot be in one commit. So the property is written first, in one of
two slots, and the commit of the rows points at it: its transaction number is the record's number.
A record without such a commit means nothing; the next one replaces it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

import pyarrow as pa
from deltalake import DeltaTable

DESCRIPTION = "Made by raypipe table prepare"
PREFIX = "raypipe.prepared."
NUMBER = "raypipe.prepared"  # application id of the commits' transaction numbers
ORIGINAL = "original_sha256"  # the column with the hash of the source's bytes
SLOTS = 2  # the record in force, and the one that comes next


@dataclass(frozen=True)
class Origin:
    """Where the rows of a prepared table come from.

    uri, version, table_id: of the source. state: of its rows (prepare.plan); "" where an earlier
    raypipe wrote the record. line: hash of all settings and of the source table; two
    records of one line differ by version only. run: names the process that wrote the record.
    roles: hash of the columns that chose the rows; "" as of state.
    """

    number: int
    uri: str
    version: int
    table_id: str
    line: str
    side_px: int
    coding: str
    quality: int
    rows: int
    run: str
    state: str = ""
    roles: str = ""

    def __str__(self) -> str:
        return f"{self.uri}@v{self.version}"

    @property
    def key(self) -> str:
        """The name of the property that holds this record."""
        return f"{PREFIX}{self.number % SLOTS}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def number_of(delta: DeltaTable) -> int:
    """The number of the last record whose rows are in this version; -1: there is none."""
    number = delta.transaction_version(NUMBER)
    return -1 if number is None else int(number)


def origin_of(delta: DeltaTable) -> Origin | None:
    """The record in force; None for a table that is not prepared, and after a RESTORE, which brings
    back the rows of an earlier record and not its number, or the record without its rows.
    """
    properties = _properties(delta)
    # Most tables have no such property: nothing else is read of them.
    if not properties:
        return None
    number = number_of(delta)
    origins: list[Origin] = []
    for text in properties:
        # One of a later raypipe, or one that was edited, says nothing.
        with suppress(ValueError, TypeError):
            origins.append(Origin(**json.loads(text)))
    mine = next((one for one in origins if one.number == number), None)
    if mine is None:
        return None
    # RESTORE to the commit between a record and its rows brings back the rows before it.
    counts = pa.table(delta.get_add_actions())["num_records"].to_pylist()
    rows = mine.rows if None in counts else sum(counts)
    is_earlier = not rows or any(one.rows == rows for one in origins if one is not mine)
    return None if rows != mine.rows and is_earlier else mine


def is_prepared(delta: DeltaTable) -> bool:
    """Did `raypipe table prepare` make this table, or begin to?"""
    return delta.metadata().description == DESCRIPTION or bool(_properties(delta))


def _properties(delta: DeltaTable) -> list[str]:
    # Columns keep them where the table itself cannot (tags.set_property).
    holders = [dict(delta.metadata().configuration)]
    holders += [dict(column.metadata) for column in delta.schema().fields]
    found: list[str] = []
    for properties in holders:
        found += [str(text) for name, text in properties.items() if name.startswith(PREFIX)]
    return found
