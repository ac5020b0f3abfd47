"""Read of one pinned table version: planned from the log and the footers, then row group by row group, here or on a cluster.

The driver reads the log and the Parquet footers, never the images. Files that partition values or the log's statistics rule out
are not opened at all. A task opens one file and reads one row group of the columns asked for (`fragment.read`), so it holds one
row group and no more. Ray Data's own Delta reader is not used: see protocol.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raypipe.errors import DataError
from raypipe.tables import conditions, fragment, log
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment, Options, binary
from raypipe.tables.table import ImageTable, TableVersion

__all__ = [
    "Fragment",
    "Where",
    "binary",
    "dataset",
    "distributed",
    "located",
    "placed",
    "plan",
    "rows",
    "starts",
]
FILE, ROW = (
    "raypipe.file",
    "raypipe.row",
)  # columns of `placed` and `located`: a table may have its own `row`
THREADS = 8  # reading small columns waits for storage more than it computes


def plan(
    table: ImageTable, pinned: TableVersion, where: Where | None = None
) -> tuple[list[Fragment], pa.Schema]:
    """Every row group of the version that may hold a match for `where`, and the table's Arrow schema.

    Files come in the order they were written, then by name: the same whenever this version is read. With `table.sample` below
    1 all but that share of the rows count as deleted. Raises DataError for a table that cannot be read right.
    """
    files, schema = log.files(table.delta(pinned.version), table.uri, where or {})
    with ThreadPoolExecutor(THREADS) as pool:
        per_file = pool.map(
            lambda file: log.row_groups(file, schema, table.sample, table.storage_options), files
        )
        return [f for fragments in per_file for f in fragments], schema


def rows(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> pa.Table:
    """Small columns (ids, labels, splits) of a version, read here. Raises DataError for a column that is not there."""
    columns = list(dict.fromkeys(columns))  # one column may play two roles
    fragments, schema, asked = _planned(table, pinned, columns, where or {})
    found = [
        part for _, part, _ in _read_here(fragments, schema, columns, asked, table.storage_options)
    ]
    return pa.concat_tables([fragment.shown(schema, columns).empty_table(), *found])


def located(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> list[tuple[Fragment, pa.Table]]:
    """Where each row that a reader sees is kept: for every row group with one, the columns and ROW (int32), its place there.

    A fragment and a row name an image for as long as its file exists: `binary(fragment, column, storage_options)[row]`.
    """
    columns = list(dict.fromkeys(columns))  # one column may play two roles
    fragments, schema, asked = _planned(table, pinned, columns, where or {})
    out = []
    for run, found, rows_N in _read_here(fragments, schema, columns, asked, table.storage_options):
        starts = np.cumsum([0] + [f.rows for f in run])
        cuts = np.searchsorted(rows_N, starts).tolist()
        for part, start, (a, b) in zip(run, starts[:-1], itertools.pairwise(cuts), strict=True):
            if a < b:
                place = pa.array((rows_N[a:b] - start).astype(np.int32))
                out.append((part, found.slice(a, b - a).append_column(ROW, place)))
    return out


def dataset(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> ray.data.Dataset:
    """The version as a lazy Ray Data set of Arrow blocks, read by tasks anywhere on the cluster."""
    columns = list(dict.fromkeys(columns))  # one column may play two roles
    fragments, schema, asked = _planned(table, pinned, columns, where or {})
    return distributed(fragments, schema, columns, asked, table.storage_options)


def placed(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> tuple[ray.data.Dataset, list[Fragment]]:
    """As `dataset`, with where each row is kept: column FILE numbers the row group in the list, ROW is its place there."""
    columns = list(dict.fromkeys(columns))  # one column may play two roles
    fragments, schema, asked = _planned(table, pinned, columns, where or {})
    source = _Scan(fragments, schema, columns, asked, table.storage_options, placed=True)
    return ray.data.read_datasource(source, override_num_blocks=len(fragments) or 1), fragments


def starts(fragments: Sequence[Fragment]) -> list[int]:
    """The number in its file of each row group's first row. A plan has every row group of its files, in order."""
    ends: Counter[str] = Counter()
    found = []
    for part in fragments:
        found.append(ends[part.path])
        ends[part.path] += part.rows
    return found


def distributed(
    fragments: list[Fragment],
    schema: pa.Schema,
    columns: Sequence[str],
    where: Where,
    storage_options: Options,
) -> ray.data.Dataset:
    """The rows of planned fragments as a lazy Ray Data set, one read task a row group."""
    source = _Scan(fragments, schema, columns, where, storage_options)
    return ray.data.read_datasource(source, override_num_blocks=len(fragments) or 1)


class _Scan(Datasource):
    """A Ray Data source: one read task a fragment."""

    def __init__(
        self,
        fragments: list[Fragment],
        schema: pa.Schema,
        columns: Sequence[str],
        where: Where,
        storage_options: Options,
        placed: bool = False,
    ) -> None:
        super().__init__()
        self._fragments, self._args, self._placed = (
            fragments,
            (schema, columns, where, storage_options),
            placed,
        )

    def get_name(self) -> str:
        return "DeltaImages"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(f.bytes for f in self._fragments)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        schema, columns, where, options = self._args
        shown, placed = fragment.shown(schema, columns), self._placed
        if placed:
            shown = shown.append(pa.field(FILE, pa.int32())).append(pa.field(ROW, pa.int32()))

        def task(number: int, part: Fragment) -> ReadTask:
            def read() -> Iterable[pa.Table]:
                found, rows_N = fragment.read([part], schema, columns, where, options)
                if placed:
                    found = found.append_column(
                        FILE, pa.array(np.full(len(rows_N), number, np.int32))
                    )
                    found = found.append_column(ROW, pa.array(rows_N.astype(np.int32)))
                yield found

            known = part.rows if not where and not part.deleted else None
            return ReadTask(
                read,
                BlockMetadata(num_rows=known, size_bytes=part.bytes, exec_stats=None),
                schema=shown,
            )

        return [task(number, part) for number, part in enumerate(self._fragments)]


def _read_here(
    fragments: list[Fragment],
    schema: pa.Schema,
    columns: Sequence[str],
    where: Where,
    storage_options: Options,
) -> Iterator[tuple[list[Fragment], pa.Table, np.ndarray]]:
    # Small columns of a whole file at once; images stay one row group at a time.
    large = any(pa.types.is_binary(schema.field(c).type) for c in columns)
    runs = (
        [[f] for f in fragments]
        if large
        else [list(g) for _, g in itertools.groupby(fragments, key=lambda f: f.path)]
    )

    def read(run: list[Fragment]) -> tuple[list[Fragment], pa.Table, np.ndarray]:
        return run, *fragment.read(run, schema, columns, where, storage_options)

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(read, runs)


def _planned(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where
) -> tuple[list[Fragment], pa.Schema, Where]:
    """The row groups, the schema with names as text, and the conditions as that schema's columns are to be asked."""
    table.require(table.delta(pinned.version), *columns, *where)
    if taken := {FILE, ROW} & set(columns):
        rule = "These names are for where a row is kept"
        raise DataError(
            f"Column {min(taken)!r} of {table.uri} cannot be read", rule=rule, fix="Rename it"
        )
    fragments, schema = plan(table, pinned, where)
    c = table.columns
    for name in {c.id, c.label, c.split} & {*columns, *where}:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) and not (name == c.label and conditions.is_listed(kind)):
            raise DataError(
                f"Column {name!r} of {table.uri} cannot name anything",
                got=str(kind),
                rule="One value a row",
            )
    # Ids, labels and splits are names, whatever type a table keeps them in: label 3 is the class "3", labels [a, b] are a|b.
    named = {c.id, c.label, c.split}
    where = conditions.as_text(where, schema, named)
    return (
        fragments,
        pa.schema([f.with_type(pa.string()) if f.name in named else f for f in schema]),
        where,
    )
