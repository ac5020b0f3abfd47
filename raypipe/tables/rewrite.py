"""Drop or relabel single rows of a pinned version: each row is named by its file and its place in
it, never by its id.

An id may stand in a table twice, may be null, and may need quotes that differ from engine to
engine. A file never changes once it is written, so (file, place) names exactly one row for as long
as the version exists. The files that hold such rows are written again without them (or with other
values), and one commit swaps old files for new ones. The commit may not be rebased: it lands
directly on the version that was looked at, or `Moved` is raised and nothing has changed.

Cost: a touched file is copied once, row group by row group. Row groups, compression and encodings
stay those of the old file. Through deltalake a removed file's deletion vector cannot be named, nor
a path that is percent-encoded: where a touched file has one of these, the whole table is written
anew. Source: the Delta protocol, sections "Add File and Remove File" and "Column Mapping".
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from raypipe.errors import DataError
from raypipe.tables import fragment, log, scan, storage
from raypipe.tables.commits import BATCH, Moved
from raypipe.tables.provenance import commit_properties
from raypipe.tables.retries import ATTEMPTS
from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable, TableVersion

_SAFE = re.compile(
    r"[A-Za-z0-9._=/-]+"
)  # deltalake encodes other characters of a path once more and then removes no file
LONGEST = 64  # characters of a text that a file's statistics name: an id is a hash of 64


class Place(NamedTuple):
    """One row of one version: the file, as `Fragment.path` names it, and the row's number in that
    file.
    """

    file: str
    row: int


@dataclass
class Change:
    """What becomes of one file: rows that go, and new values of text columns, by row."""

    gone: set[int] = field(default_factory=set)
    values: dict[str, dict[int, str | None]] = field(default_factory=dict)


Changes = Mapping[str, Change]  # by file


def places(
    table: ImageTable, pinned: TableVersion, columns: Sequence[str], where: scan.Where | None = None
) -> pa.Table:
    """The columns of every row a reader sees, with where it is kept: `file` and `place`."""
    fragments, _ = scan.plan(table, pinned, where)
    starts = {
        (f.path, f.row_group): start
        for f, start in zip(fragments, scan.starts(fragments), strict=True)
    }
    found = []
    for part, rows in scan.located(table, pinned, list(columns), where):
        first = starts[part.path, part.row_group]
        at = pc.add(rows[scan.ROW].cast(pa.int64()), first)
        rows = rows.drop_columns([scan.ROW]).append_column("file", pa.repeat(part.path, len(rows)))
        found.append(rows.append_column("place", at))
    if found:
        return pa.concat_tables(found)
    empty = scan.rows(table, pinned, list(columns), where).slice(0, 0)
    return empty.append_column("file", pa.array([], pa.string())).append_column(
        "place", pa.array([], pa.int64())
    )


def drop(table: ImageTable, pinned: TableVersion, rows: Iterable[Place], why: str) -> TableVersion:
    """The pinned version without these rows, as the table's newest. Doing it again under the same
    `why` does nothing.

    Raises DataError when other rows came or went since `pinned`: the result would not be the pinned
    version less `rows`.
    """
    wanted = sorted(set(rows))
    for _ in range(ATTEMPTS):
        delta, since = table.commits(after=pinned.version)
        done = [e["version"] for e in since if e.get("raypipe") == why]
        if done:
            return TableVersion(table.uri, min(done))
        if not wanted:
            return pinned
        if foreign := [e for e in since if e["changes"]]:
            raise DataError(
                f"{table.uri} has changed since version {pinned.version}",
                got=f"{foreign[-1]['operation'] or 'a commit'} in version {foreign[-1]['version']}",
                rule="Rows that came later were not judged",
                fix="Pin the newest version and run again",
            )
        changes: dict[str, Change] = defaultdict(Change)
        for place in _moved(table, pinned, delta, wanted):
            changes[place.file].gone.add(place.row)
        try:
            after = commit(table, delta, changes, commit_properties(why, f"@v{pinned.version}"))
            return TableVersion(table.uri, after)
        except Moved:
            continue  # a tag, perhaps: look again at what it was
    raise DataError(
        f"Others keep writing to {table.uri}",
        got=f"{ATTEMPTS} attempts",
        fix="Run again when they are done",
    )


def commit(table: ImageTable, base: DeltaTable, changes: Changes, why: CommitProperties) -> int:
    """Make the changes in one commit directly after `base`; returns its version.

    Raises Moved when somebody else committed first, DataError when the table cannot be written.
    """
    rows = (
        sum(len(c.gone) for c in changes.values()),
        sum(len(v) for c in changes.values() for v in c.values.values()),
    )
    told_rows = {"raypipe.removed": str(rows[0]), "raypipe.relabelled": str(rows[1])}
    told_rows = {k: v for k, v in told_rows.items() if v != "0"} | {BATCH: uuid.uuid4().hex}
    properties = CommitProperties(
        custom_metadata={**(why.custom_metadata or {}), **told_rows}, max_commit_retries=0
    )
    files, schema = log.files(base, table.uri, {})
    touched = {f.path: f for f in files if f.path in changes}
    if lost := sorted(set(changes) - set(touched)):
        raise AssertionError(f"files that version {base.version()} does not have: {lost[:3]}")
    written: list[str] = []
    try:
        mapped = any(f.metadata for f in schema)
        logged = {
            log.place(base.table_uri, path)[1]: path
            for path in pa.table(base.get_add_actions())["path"].to_pylist()
        }
        if not all(
            f.keep_N is None
            and _SAFE.fullmatch(logged[f.path])
            and _holds(table, f, changes[f.path], mapped)
            for f in touched.values()
        ):
            _whole(table, base, changes, properties)
        else:
            actions = _actions(table, base, files, schema, changes, written)
            base.create_write_transaction(
                actions,
                "append",
                base.schema(),
                partition_by=base.metadata().partition_columns or None,
                commit_properties=properties,
            )
    except DataError:
        _forget(table, written)
        raise
    except Exception as e:  # deltalake's errors share no base
        ours = _landed(table, base, properties)
        if ours is not None:
            return ours
        _forget(table, written)
        if isinstance(e, CommitFailedError) and table.delta().version() > base.version():
            raise Moved(str(e)) from None
        raise storage.refusal(e, table.uri, "Rows of the table cannot be changed") from None
    return base.version() + 1


def _holds(table: ImageTable, file: log.File, change: Change, mapped: bool) -> bool:
    """Has the file, under the table's names, every column that is to change? A partition's value it
    has not.
    """
    stored = fragment.open_file(file.uri, file.path, table.storage_options).schema_arrow.names
    return not change.values or (not mapped and set(change.values) <= set(stored))


def _landed(table: ImageTable, base: DeltaTable, properties: CommitProperties) -> int | None:
    """Our commit's version when it went through and only the answer was lost."""
    mine = (properties.custom_metadata or {})[BATCH]
    try:
        since = table.commits(after=base.version())[1]
    except DataError:  # the table is not reachable any more: the first error says more
        return None
    return next((e["version"] for e in since if e.get(BATCH) == mine), None)


def _actions(
    table: ImageTable,
    base: DeltaTable,
    files: list[log.File],
    schema: pa.Schema,
    changes: Changes,
    written: list[str],
) -> list[AddAction | RemoveAction]:
    """Old files out, new ones in; a file of which no row is left has no successor."""
    listed = pa.table(base.get_add_actions(flatten=True)).to_pylist()
    logged = {log.place(base.table_uri, a["path"])[1]: a for a in listed}
    mapped = any(f.metadata for f in schema)
    now, actions = int(time.time() * 1000), list[AddAction | RemoveAction]()
    for file in files:
        change = changes.get(file.path)
        if change is None:
            continue
        old = logged[file.path]
        values = {name: _logged(scalar) for name, scalar in file.partition}
        actions.append(RemoveAction(old["path"], True, now, old["size_bytes"], values))
        name = f"part-00000-{uuid.uuid4()}-c000.parquet"
        out = _Out(table, name)
        counts = _copy(table, file, change, out)
        if not counts.rows:
            out.remove()
            continue
        written.append(name)
        actions.append(
            AddAction(name, out.size(), values, now, True, counts.stats(None if mapped else schema))
        )
    return actions


class _Out:
    """A new file at the table's root: partition values come from the log, so no folder has to say
    them.
    """

    def __init__(self, table: ImageTable, name: str) -> None:
        self.remote = fragment.remote(
            table.uri, tuple(sorted((table.storage_options or {}).items()))
        )
        self.path = name if self.remote else str(Path(fragment.local(table.uri), name))

    def size(self) -> int:
        if self.remote is None:
            return Path(self.path).stat().st_size
        return int(self.remote.get_file_info(self.path).size)

    def remove(self) -> None:
        if self.remote is None:
            Path(self.path).unlink(missing_ok=True)
        else:
            self.remote.delete_file(self.path)


def _forget(table: ImageTable, written: list[str]) -> None:
    for name in written:
        try:
            _Out(table, name).remove()
        except OSError:  # no log names it: vacuum takes it
            continue


class _Counts:
    """Rows, nulls and bounds of what was written, for the log's statistics."""

    def __init__(self) -> None:
        self.rows = 0
        self.nulls: Counter[str] = Counter()
        self.low: dict[str, Any] = {}
        self.high: dict[str, Any] = {}

    def add(self, rows: pa.Table) -> None:
        self.rows += len(rows)
        for name in rows.schema.names:
            kind = rows.schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_integer(kind)):
                continue
            self.nulls[name] += rows[name].null_count
            found = pc.min_max(rows[name]).as_py()
            if found["min"] is not None:
                self.low[name] = min(found["min"], self.low.get(name, found["min"]))
                self.high[name] = max(found["max"], self.high.get(name, found["max"]))

    def stats(self, schema: pa.Schema | None) -> str:
        """As the log has them; without bounds where a column's name in the file is not its name in
        the log.
        """
        told: dict[str, Any] = {"numRecords": self.rows}
        if schema is not None:
            short = [
                n
                for n in self.low
                if all(len(str(v)) <= LONGEST for v in (self.low[n], self.high[n]))
            ]
            told["minValues"] = {n: self.low[n] for n in short}
            told["maxValues"] = {n: self.high[n] for n in short}
            told["nullCount"] = dict(self.nulls)
        return json.dumps(told)


def _copy(table: ImageTable, file: log.File, change: Change, out: _Out) -> _Counts:
    """The file's rows with the change made, in `out`, row group by row group."""
    opened = fragment.open_file(file.uri, file.path, table.storage_options)
    counts, start = _Counts(), 0
    schema = _filterable(opened.schema_arrow)
    footer = opened.metadata
    leaves = (
        [footer.row_group(0).column(i) for i in range(footer.num_columns)]
        if footer.num_row_groups
        else []
    )
    how: dict[str, Any] = {
        "compression": {c.path_in_schema: c.compression for c in leaves} or "NONE",
        "use_dictionary": [c.path_in_schema for c in leaves if c.has_dictionary_page],
        "write_statistics": [c.path_in_schema for c in leaves if c.is_stats_set],
    }
    how["compression"] = (
        {k: "NONE" if v == "UNCOMPRESSED" else v for k, v in how["compression"].items()}
        if leaves
        else "NONE"
    )
    with (
        fragment.reading(file.uri, file.path),
        pq.ParquetWriter(out.path, schema, filesystem=out.remote, **how) as writer_,
    ):
        for g in range(footer.num_row_groups):
            rows = opened.read_row_group(g, use_threads=False).cast(schema)
            for name, values in change.values.items():
                rows = _set(
                    rows,
                    name,
                    {r - start: v for r, v in values.items() if 0 <= r - start < len(rows)},
                )
            keep_N = np.ones(len(rows), bool)
            keep_N[[r - start for r in change.gone if 0 <= r - start < len(rows)]] = False
            start += len(rows)
            rows = rows if keep_N.all() else rows.filter(pa.array(keep_N))
            counts.add(rows)
            if len(rows):
                writer_.write_table(rows, row_group_size=len(rows))
    return counts


def _set(rows: pa.Table, name: str, values: dict[int, str | None]) -> pa.Table:
    if not values:
        return rows
    at = rows.schema.get_field_index(name)
    column = rows[name].to_pylist()
    for row, value in values.items():
        column[row] = value
    return rows.set_column(at, rows.schema.field(at), pa.array(column, rows.schema.field(at).type))


def _filterable(schema: pa.Schema) -> pa.Schema:
    """The schema without views, for which Arrow has no filter kernel; deltalake's rewrites store
    them.
    """

    def inner(kind: pa.DataType) -> pa.DataType:
        kind = (
            pa.string()
            if pa.types.is_string_view(kind)
            else pa.binary()
            if pa.types.is_binary_view(kind)
            else kind
        )
        return fragment.with_fields(kind, lambda f: f.with_type(inner(f.type)))

    return pa.schema([f.with_type(inner(f.type)) for f in schema])


def _logged(value: pa.Scalar) -> str | None:
    """A partition value as the log writes it."""
    if not value.is_valid:
        return None
    found = value.as_py()
    return found.decode() if isinstance(found, bytes) else str(value.cast(pa.string()).as_py())


def _whole(
    table: ImageTable, base: DeltaTable, changes: Changes, properties: CommitProperties
) -> None:
    """Write all rows of `base` anew, changed."""
    pinned = TableVersion(table.uri, base.version())
    fragments, schema = scan.plan(_all(table), pinned)
    shown = fragment.shown(schema, schema.names)

    def batches() -> Iterator[pa.RecordBatch]:
        for part, start in zip(fragments, scan.starts(fragments), strict=True):
            change = changes.get(part.path, Change())
            rows, rows_N = fragment.read([part], schema, schema.names, {}, table.storage_options)
            at = (rows_N + start).tolist()
            for name, values in change.values.items():
                rows = _set(
                    rows, name, {i: values[row] for i, row in enumerate(at) if row in values}
                )
            rows = rows.filter(pa.array([row not in change.gone for row in at], pa.bool_()))
            yield from rows.cast(shown).to_batches()

    write_deltalake(
        base,
        pa.RecordBatchReader.from_batches(shown, batches()),
        mode="overwrite",
        writer_properties=writer_properties(table.columns.image),
        commit_properties=properties,
    )


def _all(table: ImageTable) -> ImageTable:
    return ImageTable(table.uri, table.columns, table.storage_options)


def _moved(
    table: ImageTable, pinned: TableVersion, newest: DeltaTable, rows: list[Place]
) -> list[Place]:
    """Where rows of the pinned version are now: a compaction since then has moved them to other
    files and changed none.

    Rows that are equal in every column, image included, are as good as each other.
    """
    files, _ = log.files(newest, table.uri, {})
    here = {f.path for f in files}
    lost = defaultdict[str, set[int]](set)
    for place in rows:
        if place.file not in here:
            lost[place.file].add(place.row)
    found = [place for place in rows if place.file in here]
    if not lost:
        return found
    before = {f.path for f in log.files(table.delta(pinned.version), table.uri, {})[0]}
    sought: Counter[bytes] = Counter(
        content
        for place, content in _contents(table, pinned, lambda path: path in lost)
        if place.row in lost[place.file]
    )
    now = TableVersion(table.uri, newest.version())
    for place, content in _contents(table, now, lambda path: path not in before):
        if sought[content] > 0:
            sought[content] -= 1
            found.append(place)
    if +sought:
        raise DataError(
            f"{sum(sought.values())} rows of {pinned} are not in {now} any more",
            fix="Pin the newest version and run again",
        )
    return found


def _contents(
    table: ImageTable, version: TableVersion, of: Callable[[str], bool]
) -> Iterator[tuple[Place, bytes]]:
    """A hash of every column of each row in some files, and where the row is."""
    fragments, schema = scan.plan(_all(table), version)
    for part, start in zip(fragments, scan.starts(fragments), strict=True):
        if not of(part.path):
            continue
        rows, rows_N = fragment.read([part], schema, schema.names, {}, table.storage_options)
        for row, place in zip(rows.to_pylist(), rows_N.tolist(), strict=True):
            yield Place(part.path, start + place), hashlib.sha256(repr(row).encode()).digest()
