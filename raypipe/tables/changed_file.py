"""Write one Parquet file of a table again, without some rows or with other values in them.

The new file has the row groups, compression and encodings of the old one. It is copied row group by
row group, so memory holds one row group.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe import stores
from raypipe.tables import fragment, log
from raypipe.tables.changes import Change
from raypipe.tables.table import ImageTable

# Characters of the longest text whose bounds go into the statistics: an id is a hash of 64.
LONGEST = 64


class NewFile:
    """The address of a new file. It lies at the table's root: the log has its partition values, so
    no folder needs them.
    """

    def __init__(self, table: ImageTable, name: str) -> None:
        options = table.storage_options or {}
        self.remote = fragment.remote(table.uri, tuple(sorted(options.items())))
        if self.remote is None:
            folder = stores.local(table.uri)
            self.path = str(Path(folder, name))
        else:
            self.path = name

    def size(self) -> int:
        """Bytes of the written file."""
        if self.remote is None:
            return Path(self.path).stat().st_size
        return int(self.remote.get_file_info(self.path).size)

    def remove(self) -> None:
        """Delete the file. Raises OSError when the store refuses."""
        if self.remote is None:
            Path(self.path).unlink(missing_ok=True)
        else:
            self.remote.delete_file(self.path)


class Statistics:
    """Rows, nulls and bounds of what was written, for the log."""

    def __init__(self) -> None:
        self.rows = 0
        self.nulls: Counter[str] = Counter()
        self.low: dict[str, Any] = {}
        self.high: dict[str, Any] = {}

    def add(self, rows: pa.Table) -> None:
        """Count these rows, and the nulls and bounds of their text and integer columns."""
        self.rows += len(rows)
        for field in rows.schema:
            is_text = pa.types.is_string(field.type)
            is_number = pa.types.is_integer(field.type)
            if is_text or is_number:
                self._add_column(field.name, rows[field.name])

    def _add_column(self, name: str, values: pa.ChunkedArray) -> None:
        self.nulls[name] += values.null_count
        bounds = pc.min_max(values).as_py()
        low, high = bounds["min"], bounds["max"]
        # No row, or only nulls: there are no bounds.
        if low is None:
            return
        if name not in self.low:
            self.low[name] = low
            self.high[name] = high
        self.low[name] = min(low, self.low[name])
        self.high[name] = max(high, self.high[name])

    def as_json(self, bounds: bool) -> str:
        """The statistics in the log's format.

        Without `bounds` only the number of rows: with column mapping a file has other column names
        than the log.
        """
        stats: dict[str, Any] = {"numRecords": self.rows}
        if bounds:
            stats["minValues"] = {}
            stats["maxValues"] = {}
            for name, low in self.low.items():
                high = self.high[name]
                longest = max(len(str(low)), len(str(high)))
                if longest <= LONGEST:
                    stats["minValues"][name] = low
                    stats["maxValues"][name] = high
            stats["nullCount"] = dict(self.nulls)
        return json.dumps(stats)


def copy(table: ImageTable, file: log.File, change: Change, out: NewFile) -> Statistics:
    """Write the rows of `file` to `out` with the change made. Raises DataError when a file cannot
    be read.
    """
    opened = fragment.open_file(file.uri, file.path, table.storage_options)
    schema = _without_views(opened.schema_arrow)
    settings = _settings(opened.metadata)
    statistics = Statistics()
    start = 0  # the number of the row group's first row in the file
    with pq.ParquetWriter(out.path, schema, filesystem=out.remote, **settings) as target:
        for group in range(opened.metadata.num_row_groups):
            # Only this reads the old file: a full disk is no fault of it.
            with fragment.reading(file.uri, file.path):
                rows = opened.read_row_group(group, use_threads=False).cast(schema)
            changed = _changed(rows, change, start)
            start += len(rows)
            statistics.add(changed)
            # A row group of which no row is left is not written.
            if len(changed):
                target.write_table(changed, row_group_size=len(changed))
    return statistics


def set_values(rows: pa.Table, name: str, values: dict[int, str | None]) -> pa.Table:
    """The rows with other values in column `name`, given by row number in this table."""
    if not values:
        return rows
    field = rows.schema.field(name)
    column = rows[name].to_pylist()
    for row, value in values.items():
        column[row] = value
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, field, pa.array(column, field.type))


def _changed(rows: pa.Table, change: Change, start: int) -> pa.Table:
    """One row group with its part of the change made; `start` is the number of its first row in the
    file.
    """
    here = range(start, start + len(rows))  # the numbers of these rows in the file
    for name, values in change.values.items():
        new = {}
        for row, value in values.items():
            if row in here:
                new[row - start] = value
        rows = set_values(rows, name, new)

    gone = [row - start for row in change.gone if row in here]
    if not gone:
        return rows
    keep_N = np.ones(len(rows), bool)
    keep_N[gone] = False
    return rows.filter(pa.array(keep_N))


def _settings(footer: pq.FileMetaData) -> dict[str, Any]:
    """The arguments of ParquetWriter that write columns as this file has them."""
    columns = []
    if footer.num_row_groups:
        columns = [footer.row_group(0).column(i) for i in range(footer.num_columns)]
    compression = {}
    for column in columns:
        # pyarrow reads the name UNCOMPRESSED and writes it as NONE.
        name = "NONE" if column.compression == "UNCOMPRESSED" else column.compression
        compression[column.path_in_schema] = name
    return {
        "compression": compression or "NONE",
        "use_dictionary": [c.path_in_schema for c in columns if c.has_dictionary_page],
        "write_statistics": [c.path_in_schema for c in columns if c.is_stats_set],
    }


def _without_views(schema: pa.Schema) -> pa.Schema:
    """The schema with string and binary views as plain types: deltalake's rewrites store views,
    Arrow cannot filter them.
    """

    def without(kind: pa.DataType) -> pa.DataType:
        # At this level, then at every level inside.
        if pa.types.is_string_view(kind):
            kind = pa.string()
        elif pa.types.is_binary_view(kind):
            kind = pa.binary()
        return fragment.with_fields(kind, lambda f: f.with_type(without(f.type)))

    return pa.schema([f.with_type(without(f.type)) for f in schema])
