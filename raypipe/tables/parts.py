"""A table that is filled in parts, each of them once: by one process, by several at once, by one
that goes on after a kill.

All rows of a part have the same values in some columns, `constant`, which name the part. A part is
one commit, so it is there as a whole or not at all. Which parts are there is told by the log: a
file whose least and greatest value are equal holds that value alone. Only files that somebody has
merged (OPTIMIZE), or deleted from, are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Transaction, WriterProperties

from raypipe.tables import commits, fragment, log, scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable, TableVersion

# parquet cuts texts of the statistics after 64 bytes: a longer one may have been cut.
MOST_BYTES = 63
# Rows of numbers and short texts; groups of 128, as for images, take ten times as long to write.
LAYOUT = WriterProperties(compression="SNAPPY", max_row_group_size=8192)
Counts = Counter[tuple[Any, ...]]


class PartTable:
    """The table at `uri`, which may not exist yet.

    `schema` has its columns, of which each version of raypipe has written `always`. Raises
    DataError for a table with other columns, or without these.
    """

    def __init__(
        self,
        uri: str,
        schema: pa.Schema,
        constant: Sequence[str],
        why: str,
        storage_options: dict[str, str] | None = None,
        always: Sequence[str] = (),
    ) -> None:
        self.uri = resolve(uri)
        self._always = tuple(always)
        self.schema, self.constant, self.why = schema, tuple(constant), why
        self.options = storage_options
        self._base: DeltaTable | None = None
        self.refresh()

    def refresh(self) -> None:
        """Open the newest version."""
        self._base = commits.newest(self.uri, self.options)
        if self._base is not None:
            commits.require_columns_of(self.schema, self._base, self.uri, self.why, self._always)

    @property
    def version(self) -> TableVersion | None:
        """The version that was opened or written last; None if there is no table."""
        if self._base is None:
            return None
        return TableVersion(self.uri, self._base.version(), str(self._base.metadata().id))

    def counts(self) -> Counts:
        """How many rows there are of each part of the opened version: (value, …) -> rows."""
        if self._base is None:
            return Counter()
        table = ImageTable(self.uri, storage_options=self.options)
        return counts(table, table.pin(self._base.version()), self.constant)

    def noted(self, name: str) -> int | None:
        """A number that `note` has kept under this name."""
        return None if self._base is None else self._base.transaction_version(name)

    def note(self, numbers: dict[str, int]) -> bool:
        """Keep numbers by name in the log, in a commit without rows; else as `add`."""
        return self._commit(self.schema.empty_table(), numbers)

    def add(self, rows: pa.Table) -> bool:
        """Commit rows directly on the opened version.

        False if somebody else has committed since: nothing is written, the newest version is
        opened, and the caller looks what is there now.
        """
        return self._commit(rows, {})

    def _commit(self, rows: pa.Table, numbers: dict[str, int]) -> bool:
        # Statistics of other columns are of no use here.
        properties: dict[str, str | None] = {
            "delta.dataSkippingStatsColumns": ",".join(self.constant)
        }
        why = commit_properties(self.why)
        # Checkpoints keep them, when the commit itself is cleaned up.
        why.app_transactions = [Transaction(name, number) for name, number in numbers.items()]
        try:
            self._base = append_once(
                self.uri, rows, self._base, why, properties, self.options, LAYOUT
            )
        except Moved:
            self.refresh()
            return False
        return True


def counts(table: ImageTable, pinned: TableVersion, columns: Sequence[str]) -> Counts:
    """How many rows of a version have each combination of values in `columns`.

    Nothing for a table that lacks one of them: an earlier raypipe made it.
    """
    delta = table.at(pinned)
    if not {*columns} <= {field.name for field in delta.schema().fields}:
        return Counter()
    masked = log.deletion_masks(delta)
    placed = log.Places(delta.table_uri)
    found: Counts = Counter()
    mixed: set[str] = set()  # files that must be read
    for entry in pa.table(delta.get_add_actions(flatten=True)).to_pylist():
        values = None if masked else _constant(entry, columns)
        if values is None:
            mixed.add(placed.name(entry["path"]))
        else:
            found[values] += entry["num_records"]
    if mixed:
        found += _read_counts(table, pinned, columns, mixed)
    return found


def _constant(entry: dict[str, Any], columns: Sequence[str]) -> tuple[Any, ...] | None:
    """The one value that each of the columns has in a file; None where the log does not tell."""
    rows = entry.get("num_records")
    if rows is None:
        return None
    values: list[Any] = []
    for name in columns:
        low, high = entry.get(f"min.{name}"), entry.get(f"max.{name}")
        nulls = entry.get(f"null_count.{name}")
        if nulls == rows:
            values.append(None)
            continue
        is_cut = isinstance(low, str) and len(low.encode()) > MOST_BYTES
        if nulls != 0 or low is None or low != high or is_cut:
            return None
        values.append(low)
    return tuple(values)


def _read_counts(
    table: ImageTable, pinned: TableVersion, columns: Sequence[str], paths: set[str]
) -> Counts:
    """The same from the columns themselves, one row group at a time."""
    groups, schema = scan.plan(table, pinned, only=paths)
    options = table.storage_options
    found: Counts = Counter()
    for group in groups:
        rows, _ = fragment.read([group], schema, columns, {}, options)
        # One row for each combination of values, with their number.
        grouped = rows.group_by(list(columns))
        counted = grouped.aggregate([([], "count_all")])
        for row in counted.to_pylist():
            values = tuple(row[name] for name in columns)
            found[values] += row["count_all"]
    return found
