"""Read one pinned table version, here or on a Ray cluster, one row group at a time.

How a read goes:
1. Plan, on the driver: read the log and the Parquet footers, once for a version (snapshot.py), and
   never images. Files that partition values or the log's statistics rule out are not opened.
2. Read: `fragment.read` opens one file and reads the requested columns of one row group. A task
   therefore holds one row group in memory and no more.
3. Small columns of a whole file are read together, by threads of this process.

Ray Data's own Delta reader is not used; protocol.py says why.
Names: arrays with the suffix _N have one entry a row.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raypipe.errors import DataError
from raypipe.tables import conditions, fragment, sample
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment, Options, binary
from raypipe.tables.table import ImageTable, TableVersion

__all__ = [
    "Fragment",
    "Where",
    "binary",
    "counted",
    "dataset",
    "distributed",
    "each",
    "located",
    "numbered",
    "placed",
    "plan",
    "rows",
    "starts",
    "with_names",
]
# Columns of `placed` and `located`. The prefix keeps them apart from a table's own `row`.
FILE = "raypipe.file"
ROW = "raypipe.row"
THREADS = 8  # reading small columns waits for storage more than it computes
AT_ONCE = 20_000  # rows of small files that a thread reads, before it asks for more
AHEAD = 4 * THREADS  # such reads that are started before the first one's result is used


# Row groups, their rows, and the rows' physical numbers.
_Part = tuple[list[Fragment], pa.Table, np.ndarray]


@dataclass(frozen=True)
class _Read:
    """What to read: row groups, columns in the types of `schema`, rows that match `where`."""

    fragments: list[Fragment]
    schema: pa.Schema
    columns: list[str]
    where: Where
    storage_options: Options = field(repr=False)  # may hold secrets

    def read(self, run: Sequence[Fragment]) -> tuple[pa.Table, np.ndarray]:
        """The matching rows of neighbouring row groups, and their physical numbers."""
        return fragment.read(run, self.schema, self.columns, self.where, self.storage_options)


def plan(
    table: ImageTable,
    pinned: TableVersion,
    where: Where | None = None,
    only: Collection[str] | None = None,
) -> tuple[list[Fragment], pa.Schema]:
    """Every row group of the version that may hold a match for `where`, and the table's schema.

    Files come in the order they were written, then by name: the same order at every read. With
    `table.sample` below 1, the rows outside of the sample count as deleted. `only` names the files
    to look at by `Fragment.file`; None: all. Raises DataError for a table that raypipe cannot read
    right.
    """
    snapshot = table.snapshot(pinned)
    where = where or {}
    if table.columns.label in where:
        where = conditions.by_class(where, snapshot.schema(), table.columns.label)
    files, schema = snapshot.files(
        table.uri, where, table.columns.image, table.storage_options, only
    )

    # `map` keeps the order of the files.
    if table.sample == 1:
        return list(itertools.chain.from_iterable(files)), schema
    fragments: list[Fragment] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for groups in pool.map(lambda groups: sample.sampled(groups, schema, table), files):
            fragments += groups
    return fragments, schema


def rows(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> pa.Table:
    """Read small columns (ids, labels, splits) of a version into this process.

    Raises DataError for a column that is not there.
    """
    planned = _plan_read(table, pinned, columns, where)

    # The empty table gives the types when no row matches.
    schema = fragment.output_schema(planned.schema, planned.columns)
    parts = [schema.empty_table()]
    for _, part, _ in _read_here(planned):
        parts.append(part)
    return pa.concat_tables(parts)


def each(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> Iterator[pa.Table]:
    """The same rows, one row group after the other: memory holds a few of them."""
    planned = _plan_read(table, pinned, columns, where)
    with ThreadPoolExecutor(1) as pool:
        ahead: deque[Future[tuple[pa.Table, np.ndarray]]] = deque()
        for group in planned.fragments:
            ahead.append(pool.submit(planned.read, [group]))
            if len(ahead) > 2:
                yield ahead.popleft().result()[0]
        while ahead:
            yield ahead.popleft().result()[0]


def located(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> list[tuple[Fragment, pa.Table]]:
    """Read small columns together with the place of each row.

    Returns each row group that has a matching row, with the columns and ROW (int32): the row's
    number in its row group. Fragment and number name an image as long as its file exists:
    `binary(fragment, column, storage_options)[row]`.
    """
    planned = _plan_read(table, pinned, columns, where)

    located_rows = []
    for run, part, rows_N in _read_here(planned):
        # Cut the rows of the run at the borders of its row groups.
        borders = np.cumsum([0] + [group.rows for group in run])
        cuts = np.searchsorted(rows_N, borders).tolist()
        for i, group in enumerate(run):
            first, last = cuts[i], cuts[i + 1]
            if first == last:
                continue
            values = part.slice(first, last - first)

            # Numbers within the run become numbers within the row group.
            numbers = rows_N[first:last] - borders[i]
            values = values.append_column(ROW, pa.array(numbers.astype(np.int32)))
            located_rows.append((group, values))
    return located_rows


def numbered(
    table: ImageTable,
    pinned: TableVersion,
    columns: list[str],
    where: Where | None = None,
    only: Sequence[Fragment] | None = None,
) -> tuple[list[Fragment], Iterator[tuple[pa.Table, np.ndarray]]]:
    """Small columns of very many rows, for a caller that keeps little of them.

    only: row groups of an earlier plan; None: every row group of the version.
    Returns the row groups, and the matching rows of some files at a time with the physical number
    of each row, counted through all these row groups (int64). Memory holds the rows of a few
    hundred files.
    """
    planned = _plan_read(table, pinned, columns, where, only)

    def read() -> Iterator[tuple[pa.Table, np.ndarray]]:
        before = 0  # rows of the row groups that were read
        for parts in _read_some(planned):
            numbers = []
            for run, _, rows_N in parts:
                numbers.append(rows_N + before)
                before += sum(group.rows for group in run)
            yield pa.concat_tables([part for _, part, _ in parts]), np.concatenate(numbers)

    return planned.fragments, read()


def counted(
    fragments: list[Fragment], schema: pa.Schema, where: Where, storage_options: Options
) -> list[int]:
    """The number of rows of each row group that are not deleted and match `where`.

    Reads nothing without `where`, else the columns that it names.
    """
    if not where:
        return [fragment.rows - _bits_set(fragment.deleted) for fragment in fragments]
    # One file after the other: only the numbers stay.
    counts: list[int] = []
    for run, _, rows_N in _read_here(_Read(fragments, schema, list(where), where, storage_options)):
        borders = np.cumsum([0] + [group.rows for group in run])
        counts += np.diff(np.searchsorted(rows_N, borders)).tolist()
    return counts


def _bits_set(packed: bytes) -> int:
    return int(np.bitwise_count(np.frombuffer(packed, np.uint8)).sum())


def dataset(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> ray.data.Dataset:
    """The version as a lazy Ray Data set of Arrow blocks, read by tasks anywhere on the cluster."""
    return _ray_dataset(_plan_read(table, pinned, columns, where))


def placed(
    table: ImageTable, pinned: TableVersion, columns: list[str], where: Where | None = None
) -> tuple[ray.data.Dataset, list[Fragment]]:
    """Like `dataset`, with the place of each row.

    Column FILE is the number of its row group in the returned list. Column ROW is its number in
    the row group.
    """
    planned = _plan_read(table, pinned, columns, where)
    return _ray_dataset(planned, with_places=True), planned.fragments


def starts(fragments: Sequence[Fragment]) -> list[int]:
    """The number in its file of each row group's first row.

    `fragments` has every row group of its files, in order, as `plan` returns them.
    """
    rows_so_far: Counter[str] = Counter()
    first_rows = []
    for group in fragments:
        first_rows.append(rows_so_far[group.file])
        rows_so_far[group.file] += group.rows
    return first_rows


def distributed(
    fragments: list[Fragment],
    schema: pa.Schema,
    columns: Sequence[str],
    where: Where,
    storage_options: Options,
) -> ray.data.Dataset:
    """The rows of planned fragments as a lazy Ray Data set, one read task a row group."""
    return _ray_dataset(_Read(fragments, schema, list(columns), where, storage_options))


def _ray_dataset(planned: _Read, with_places: bool = False) -> ray.data.Dataset:
    # At least one block, also for a table without rows.
    blocks = max(1, len(planned.fragments))
    return ray.data.read_datasource(
        _Scan(planned, with_places),
        override_num_blocks=blocks,
    )


class _Scan(Datasource):
    """A Ray Data source with one read task a fragment."""

    def __init__(self, planned: _Read, with_places: bool) -> None:
        super().__init__()
        self._plan = planned
        self._with_places = with_places

    def get_name(self) -> str:
        return "DeltaImages"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(group.bytes for group in self._plan.fragments)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        schema = fragment.output_schema(self._plan.schema, self._plan.columns)
        if self._with_places:
            for name in (FILE, ROW):
                schema = schema.append(pa.field(name, pa.int32()))

        tasks = []
        for number, group in enumerate(self._plan.fragments):
            task = _read_task(self._plan, group, number, schema, self._with_places)
            tasks.append(task)
        return tasks


def _read_task(
    planned: _Read, group: Fragment, number: int, schema: pa.Schema, with_places: bool
) -> ReadTask:
    """The task that reads one row group. `number` is its place in the plan."""
    # The task travels to a worker: it carries its own fragment, not the list of all fragments.
    alone = replace(planned, fragments=[group.for_task()])

    def read() -> Iterable[pa.Table]:
        part, rows_N = alone.read(alone.fragments)
        if with_places:
            files_N = np.full(len(rows_N), number, np.int32)
            part = part.append_column(FILE, pa.array(files_N))
            part = part.append_column(ROW, pa.array(rows_N.astype(np.int32)))
        yield part

    # With conditions or deleted rows the number of rows is unknown before the read.
    num_rows = None if planned.where or group.deleted else group.rows
    metadata = BlockMetadata(
        num_rows=num_rows,
        size_bytes=group.bytes,
        exec_stats=None,
    )
    return ReadTask(read, metadata, schema=schema)


def _read_here(planned: _Read) -> Iterator[_Part]:
    """Read with threads of this process, in order: row groups, their rows, the rows' numbers."""
    return itertools.chain.from_iterable(_read_some(planned))


def _read_some(planned: _Read) -> Iterator[list[_Part]]:
    """As `_read_here`, some files at a time. To hand over each file alone costs more than to read
    it.
    """
    types = [planned.schema.field(name).type for name in planned.columns]
    has_images = any(pa.types.is_binary(kind) for kind in types)

    # Small columns of a whole file are read at once, images one row group at a time.
    runs: Iterator[list[Fragment]]
    if has_images:
        runs = ([group] for group in planned.fragments)
    else:
        by_file = itertools.groupby(planned.fragments, key=lambda group: group.file)
        runs = (list(groups) for _, groups in by_file)
    together = _together(runs, 1 if has_images else AT_ONCE)

    def read(some: list[list[Fragment]]) -> list[_Part]:
        return [(run, *planned.read(run)) for run in some]

    # What was read waits here: a caller that is slower than the threads must not let it pile up.
    ahead: deque[Future[list[_Part]]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for some in together:
            ahead.append(pool.submit(read, some))
            if len(ahead) > AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _together(runs: Iterable[list[Fragment]], rows: int) -> Iterator[list[list[Fragment]]]:
    """Neighbouring files, as many as have so many rows together; at least one."""
    some: list[list[Fragment]] = []
    counted_rows = 0
    for run in runs:
        some.append(run)
        counted_rows += sum(group.rows for group in run)
        if counted_rows >= rows:
            yield some
            some, counted_rows = [], 0
    if some:
        yield some


def _plan_read(
    table: ImageTable,
    pinned: TableVersion,
    columns: list[str],
    where: Where | None,
    only: Sequence[Fragment] | None = None,
) -> _Read:
    """Plan a read of some columns. Raises DataError for columns that cannot be read.

    Ids, labels and splits are names: their type in the plan is text, whatever type the table keeps.
    Label 3 is the class "3", labels [a, b] are a|b. Conditions on them become texts as well.
    """
    where = where or {}
    columns = list(dict.fromkeys(columns))  # one column may play two roles
    table.require(table.at(pinned), *columns, *where)

    reserved = {FILE, ROW} & set(columns)
    if reserved:
        raise DataError(
            f"Column {min(reserved)!r} of {table.uri} cannot be read",
            rule="These names are for where a row is kept",
            fix="Rename it",
        )

    if only is None:
        fragments, schema = plan(table, pinned, where)
    else:
        fragments, schema = list(only), table.snapshot(pinned).schema()
    as_names, where = with_names(table, schema, columns, where)
    return _Read(
        fragments=fragments,
        schema=as_names,
        columns=columns,
        where=where,
        storage_options=table.storage_options,
    )


def with_names(
    table: ImageTable, schema: pa.Schema, columns: Sequence[str], where: Where
) -> tuple[pa.Schema, Where]:
    """The schema and the conditions with ids, labels and splits as text.

    Raises DataError for a column that can be no name.
    """
    roles = table.columns
    names = {roles.id, roles.label, roles.split}
    # A name is one value a row; only a label may also be a list of tags.
    for name in names & {*columns, *where}:
        kind = schema.field(name).type
        is_tag_list = name == roles.label and conditions.is_listed(kind)
        if pa.types.is_nested(kind) and not is_tag_list:
            raise DataError(
                f"Column {name!r} of {table.uri} cannot name anything",
                got=str(kind),
                rule="One value a row",
            )

    # From here on names are text, in the schema as in the conditions.
    fields = []
    for stored in schema:
        is_name = stored.name in names
        fields.append(stored.with_type(pa.string()) if is_name else stored)
    where = conditions.by_class(where, schema, roles.label)
    return pa.schema(fields), conditions.as_text(where, schema, names)
