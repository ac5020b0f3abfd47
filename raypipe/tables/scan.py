"""Distributed read of one pinned table version: tasks of a few row groups each.

The driver reads the log and the Parquet footers, never the data. A task opens one file, reads only its row groups and the
columns asked for, filters rows, and restores partition columns. Ray Data's own reader is not used: see protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, PyFileSystem
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raypipe.errors import DataError
from raypipe.tables import protocol
from raypipe.tables.table import ImageTable, TableVersion

Where = dict[str, str | list[str]]


@dataclass(frozen=True)
class Fragment:
    """Some row groups of one file, with the partition values that the file itself does not hold."""

    uri: str
    path: str
    row_groups: tuple[int, ...]
    rows: int
    bytes: int
    partition: tuple[tuple[str, str | None], ...]


def plan(table: ImageTable, pinned: TableVersion) -> tuple[list[Fragment], pa.Schema]:
    """Every row group of the version as a fragment of its own, in log order, and the table's Arrow schema."""
    delta = table.delta(pinned.version)
    protocol.preflight(delta)  # the pinned version may use a feature that the newest no longer does
    schema = pa.schema(delta.schema().to_arrow())
    files = _files(delta)
    filesystem = _filesystem(table.uri, table.storage_options)

    def footer_of(path: str) -> pq.FileMetaData:
        try:
            with pq.ParquetFile(path, filesystem=filesystem) as file:
                return file.metadata
        except FileNotFoundError:
            raise DataError(
                f"{pinned} lacks a file that its log names",
                got=path,
                rule="VACUUM removes the files of old versions",
                fix="Pin a newer version",
            ) from None

    with ThreadPoolExecutor(8) as pool:
        footers = pool.map(lambda f: footer_of(f[0]), files)
        fragments = [
            Fragment(table.uri, path, (g,), footer.row_group(g).num_rows, footer.row_group(g).total_byte_size, partition)
            for (path, partition), footer in zip(files, footers, strict=True)
            for g in range(footer.num_row_groups)
        ]
    return fragments, schema


def read_fragment(
    fragment: Fragment, schema: pa.Schema, where: Where, storage_options: dict[str, str] | None
) -> Iterator[pa.Table]:
    """The fragment's rows that match `where`, one table a row group, with exactly the columns and types of `schema`."""
    partition = dict(fragment.partition)
    with pq.ParquetFile(fragment.path, filesystem=_filesystem(fragment.uri, storage_options)) as file:
        stored = set(file.schema_arrow.names)
        wanted = [n for n in dict.fromkeys([*schema.names, *where]) if n in stored and n not in partition]
        for group in fragment.row_groups:
            rows = file.read_row_group(group, columns=wanted, use_threads=False)
            for name in {*schema.names, *where} - set(wanted):  # partition value, or a column added after this file was written
                value = partition.get(name)
                rows = rows.append_column(name, pa.nulls(len(rows)) if value is None else pa.array([value] * len(rows)))
            # Rewritten files say string_view, for which Arrow has no filter kernel yet: take the table's own types first.
            rows = rows.cast(
                pa.schema([schema.field(n) if n in schema.names else pa.field(n, pa.string()) for n in rows.column_names])
            )
            for name, values in where.items():
                options = pa.array([values] if isinstance(values, str) else values, pa.string())
                rows = rows.filter(pc.is_in(rows[name].cast(pa.string()), value_set=options))
            yield rows.select(schema.names)


def rows(table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None) -> pa.Table:
    """Small columns (ids, labels, splits) of a version, read here. Raises DataError for a column that is not there."""
    fragments, schema = _planned(table, pinned, columns, where or {})
    parts = [part for f in fragments for part in read_fragment(f, schema, where or {}, table.storage_options)]
    return pa.concat_tables(parts) if parts else schema.empty_table()


def dataset(table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None) -> ray.data.Dataset:
    """The version as a lazy Ray Data set of Arrow blocks, read by tasks anywhere on the cluster."""
    fragments, schema = _planned(table, pinned, columns, where or {})
    return ray.data.read_datasource(
        _Scan(fragments, schema, where or {}, table.storage_options), override_num_blocks=len(fragments) or 1
    )


class _Scan(Datasource):
    """A Ray Data source: one read task a fragment."""

    def __init__(
        self, fragments: list[Fragment], schema: pa.Schema, where: Where, storage_options: dict[str, str] | None
    ) -> None:
        super().__init__()
        self._args = fragments, schema, where, storage_options

    def get_name(self) -> str:
        return "DeltaImages"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(f.bytes for f in self._args[0])

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        fragments, schema, where, options = self._args

        def task(fragment: Fragment) -> ReadTask:
            def read() -> Iterable[pa.Table]:
                return read_fragment(fragment, schema, where, options)

            known = fragment.rows if not where else None
            return ReadTask(read, BlockMetadata(num_rows=known, size_bytes=fragment.bytes, exec_stats=None), schema=schema)

        return [task(f) for f in fragments]


def _planned(table: ImageTable, pinned: TableVersion, columns: list[str], where: Where) -> tuple[list[Fragment], pa.Schema]:
    table.require(table.delta(pinned.version), *columns, *where)
    fragments, schema = plan(table, pinned)
    c = table.columns
    for name in {c.id, c.label, c.split, *where} & {*columns, *where}:
        if pa.types.is_nested(schema.field(name).type):
            raise DataError(
                f"Column {name!r} of {table.uri} cannot name anything", got=str(schema.field(name).type), rule="One value a row"
            )
    # Ids, labels and splits are names, whatever type a table keeps them in: label 3 is the class "3".
    names = {c.id, c.label, c.split}
    return fragments, pa.schema([pa.field(n, pa.string()) if n in names else schema.field(n) for n in columns])


def _files(delta: DeltaTable) -> list[tuple[str, tuple[tuple[str, str | None], ...]]]:
    names = delta.metadata().partition_columns
    actions = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    root = delta.table_uri.rstrip("/").removeprefix("file://")
    local = "://" not in root
    # The log holds paths percent-encoded: a partition value with a blank or a colon would not be found otherwise.
    return [
        (
            f"{root}/{unquote(a['path'])}" if local else unquote(a["path"]),
            tuple((n, None if a.get(f"partition.{n}") is None else str(a[f"partition.{n}"])) for n in names),
        )
        for a in actions
    ]


def _filesystem(uri: str, storage_options: dict[str, str] | None) -> FileSystem | None:
    if "://" not in uri or uri.startswith("file://"):
        return None
    return PyFileSystem(DeltaStorageHandler(uri, storage_options))
