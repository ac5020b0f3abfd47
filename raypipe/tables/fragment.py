"""One row group of one Parquet file of a Delta table, read as the table means it.

Between the file and the table's rows stand: values that only the log holds (partition columns), rows that a deletion vector
took out, columns whose name in the file is not their name in the table (column mapping, also inside structs, lists and maps),
columns added after the file was written, and types that other engines store differently (INT96, string views, widened numbers).
pyarrow reads the bytes; this file does the rest. Source: the Delta protocol, https://github.com/delta-io/delta PROTOCOL.md.

Opening a file parses its footer (0.15 ms and more with row groups), so each thread keeps the last few open. Local files are
read through a buffer of 64 kB: 1.2 ms for 5 MB of images and 9.5 MB at the peak, 13.8 MB without; a memory map takes 0.9 ms
and leaves the whole file resident. Remote files are read a column chunk a request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, PyFileSystem

from raypipe.errors import DataError
from raypipe.tables import conditions, storage
from raypipe.tables.conditions import Where, is_listed

Options = dict[str, str] | None
Bits = bytes  # np.packbits
OPEN_FILES = 16  # a thread
BUFFER_BYTES = 65_536
PHYSICAL_NAME, FIELD_ID = b"delta.columnMapping.physicalName", b"delta.columnMapping.id"


@dataclass(frozen=True)
class Fragment:
    """One row group. `rows` counts the physical ones; `deleted` has one bit for each (or is empty when none is).

    `uri` is what `path` is opened under: the table, or the container of a file elsewhere. `names` gives the file's name of each
    column that has another one there ("" when the file lacks it).
    """

    uri: str
    path: str
    row_group: int
    rows: int
    bytes: int
    partition: tuple[tuple[str, pa.Scalar], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    deleted: Bits = b""


def binary(fragment: Fragment, column: str, storage_options: Options) -> pa.Array:
    """All physical rows of a binary column, deleted ones too, as binary or large_binary. Peak memory: twice their bytes.

    Nulls, where the column was added after the file was written.
    """
    file, row_group, name = located(fragment, column, storage_options)
    if name not in file.schema_arrow.names:
        return pa.nulls(fragment.rows, pa.large_binary())
    with _reading(fragment):
        values = file.read_row_group(row_group, columns=[name], use_threads=False).column(name)
    # Other engines keep dictionaries, views, or values of one size; only a row group of over 2 GB comes in chunks.
    if not is_bytes(values.type) or values.num_chunks > 1:
        values = values.cast(pa.large_binary())
    return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()


def located(
    fragment: Fragment, column: str, storage_options: Options
) -> tuple[pq.ParquetFile, int, str]:
    """The file, the row group in it, and the name that it has for a column."""
    file = open_file(fragment.uri, fragment.path, storage_options)
    return file, fragment.row_group, dict(fragment.names).get(column, column)


def read_bytes(
    fragment: Fragment, offset: int, out: memoryview, storage_options: Options
) -> memoryview:
    """So many bytes of the fragment's file as `out` has room for, in it or (from an object store) elsewhere."""
    store = remote(fragment.uri, tuple(sorted((storage_options or {}).items())))
    with _reading(fragment):
        if store is not None:
            with store.open_input_file(fragment.path) as file:
                return memoryview(file.read_at(len(out), offset))
        with Path(fragment.path).open("rb", buffering=0) as local:
            local.seek(offset)
            got = 0
            while got < len(out) and (more := local.readinto(out[got:])):
                got += more
            return out[:got]


def read(
    run: Sequence[Fragment],
    schema: pa.Schema,
    columns: Sequence[str],
    where: Where,
    storage_options: Options,
) -> tuple[pa.Table, np.ndarray]:
    """The rows a reader sees in neighbouring row groups of one file, as far as they match `where`.

    Returns the columns in the types of `schema`, the whole table's, and the physical number of each row within the run (int64).
    The columns of `where` are read first: where nothing matches, no image is read.
    """
    keep_N = np.concatenate([_seen(f) for f in run])
    if where:
        tested = _columns(run, schema, list(where), storage_options)
        for name, values in where.items():
            keep_N &= matches(tested[name], values, name)
    rows_N = np.flatnonzero(keep_N)
    if not len(rows_N):
        return shown(schema, columns).empty_table(), rows_N
    found = pa.table(_columns(run, schema, columns, storage_options), shown(schema, columns))
    return (found if len(rows_N) == len(keep_N) else found.filter(pa.array(keep_N))), rows_N


def shown(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Some columns of the table's schema, without what finds them in a file."""
    return pa.schema(
        [pa.field(n, with_fields(schema.field(n).type, pa.Field.remove_metadata)) for n in columns]
    )


def with_fields(kind: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """The type with every field inside it changed, at every depth."""

    def changed(field: pa.Field) -> pa.Field:
        return change(field.with_type(with_fields(field.type, change)))

    if pa.types.is_struct(kind):
        return pa.struct([changed(f) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(changed(kind.key_field), changed(kind.item_field))
    return pa.list_(changed(kind.value_field)) if pa.types.is_list(kind) else kind


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def matches(
    values: pa.ChunkedArray | pa.Array, wanted: str | list[str], name: str = ""
) -> np.ndarray:
    """Which values are one of those wanted, as the column's type reads their texts; a null never is. Raises DataError."""
    options = conditions.values([wanted] if isinstance(wanted, str) else wanted, values.type, name)
    if is_listed(values.type):
        values = pc.binary_join(values.cast(pa.list_(pa.string())), "|")
    found: np.ndarray = pc.is_in(values.cast(options.type), value_set=options).to_numpy(
        zero_copy_only=False
    )
    return found


def open_file(uri: str, path: str, storage_options: Options) -> pq.ParquetFile:
    """The file, opened once a thread (pyarrow's readers are not safe to share). Raises DataError when it is gone."""
    files: OrderedDict[tuple[str, str], pq.ParquetFile] = _open.__dict__.setdefault(
        "files", OrderedDict()
    )
    file = files.pop((uri, path), None)
    if file is None:
        store = remote(uri, tuple(sorted((storage_options or {}).items())))
        try:
            file = pq.ParquetFile(
                path,
                filesystem=store,
                pre_buffer=False,
                buffer_size=0 if store else BUFFER_BYTES,
                coerce_int96_timestamp_unit="us",  # nanoseconds hold no year before 1678 or after 2262
            )
        except FileNotFoundError:
            raise DataError(
                f"{uri} lacks a file that its log names",
                got=path,
                rule="VACUUM removes the files of old versions",
                fix="Pin a newer version",
            ) from None
        except (pa.ArrowException, OSError) as e:
            if storage.cause(e, uri):
                raise storage.refusal(e, uri, "A file of the table cannot be opened") from None
            raise DataError(f"A file of {uri} is no readable Parquet: {e}", got=path) from None
    files[uri, path] = file
    if len(files) > OPEN_FILES:
        files.popitem(last=False)[1].close(force=True)
    return file


_open = threading.local()


def local(uri: str) -> str:
    """The folder that a local table's address names: a plain path is taken as it stands, a URL is percent-encoded."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri


@lru_cache(maxsize=32)
def remote(uri: str, storage_options: tuple[tuple[str, str], ...]) -> FileSystem | None:
    """The store that a table lies in; None for a folder of this machine."""
    if "://" not in uri or uri.startswith("file://"):
        return None
    return PyFileSystem(DeltaStorageHandler(uri, dict(storage_options)))


@contextmanager
def reading(uri: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as e:
        raise storage.refusal(e, uri, f"{path} cannot be read") from None


@contextmanager
def _reading(fragment: Fragment) -> Iterator[None]:
    """What goes wrong after a file was opened: the network, a disk, its pages. Stores have been tried again by then."""
    with reading(fragment.uri, fragment.path):
        yield


def _seen(fragment: Fragment) -> np.ndarray:
    if not fragment.deleted:
        return np.ones(fragment.rows, bool)
    return np.unpackbits(np.frombuffer(fragment.deleted, np.uint8), count=fragment.rows) == 0


def _columns(
    run: Sequence[Fragment], schema: pa.Schema, columns: Iterable[str], storage_options: Options
) -> dict[str, pa.ChunkedArray]:
    """All physical rows of some columns, in the types of `schema`."""
    first, rows = run[0], sum(f.rows for f in run)
    file = open_file(first.uri, first.path, storage_options)
    names, partition, stored = (
        dict(first.names),
        dict(first.partition),
        set(file.schema_arrow.names),
    )
    physical = {
        c: names.get(c, c) for c in columns if c not in partition and names.get(c, c) in stored
    }
    with _reading(first):
        data = file.read_row_groups(
            [f.row_group for f in run], columns=list(physical.values()), use_threads=False
        )
    out = {}
    for name in columns:
        field = schema.field(name)
        try:
            if name in partition:
                out[name] = pa.chunked_array([pa.repeat(partition[name].cast(field.type), rows)])
            elif name in physical:
                chunks = [conform(chunk, field) for chunk in data.column(physical[name]).chunks]
                out[name] = pa.chunked_array(chunks, field.type)
            else:  # the column was added after this file was written
                out[name] = pa.chunked_array([pa.nulls(rows, field.type)])
        except pa.ArrowException as e:
            raise DataError(
                f"Column {name!r} of {first.path} cannot be read as {field.type}: {e}"
            ) from None
    return out


def conform(values: pa.Array, field: pa.Field) -> pa.Array:
    """What a file holds, in the table's type: fields of structs found by id or name, missing ones null, leaves cast."""
    want, have = field.type, values.type
    if have == want and not pa.types.is_nested(
        want
    ):  # equal names inside prove nothing: a rename may have swapped them
        return values
    if pa.types.is_null(have):
        return pa.nulls(len(values), want)
    if pa.types.is_struct(want):
        children = [
            values.field(i) if (i := position(have, f)) >= 0 else pa.nulls(len(values), f.type)
            for f in want
        ]
        children = [conform(child, f) for child, f in zip(children, want, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(want), mask=values.is_null())
    if pa.types.is_map(want):
        offsets, mask = pa.array(values.offsets.to_numpy()), values.is_null()
        keys, items = conform(values.keys, want.key_field), conform(values.items, want.item_field)
        return pa.MapArray.from_arrays(offsets, keys, items, type=want, mask=mask)
    if pa.types.is_list(want):
        values = values if pa.types.is_list(have) else values.cast(pa.list_(have.value_type))
        offsets, mask = pa.array(values.offsets.to_numpy()), values.is_null()
        return pa.ListArray.from_arrays(
            offsets, conform(values.values, want.value_field), type=want, mask=mask
        )
    if pa.types.is_string(want) and is_listed(
        have
    ):  # a label of several tags is read as the text a|b
        return _tags(values, field.name)
    return pc.cast(
        values, options=pc.CastOptions(want, allow_time_truncate=True)
    )  # Delta's clock ticks in microseconds


def _tags(values: pa.Array, name: str) -> pa.Array:
    """Lists as texts like a|b. Raises DataError for a null in a list, which would make the whole row unlabelled in silence,
    and for a bar in a tag, which would make it two."""
    texts = values.cast(pa.list_(pa.string()))
    items = texts.flatten()
    numbers = not (
        pa.types.is_string(values.type.value_type)
        or pa.types.is_large_string(values.type.value_type)
    )
    if numbers and _repeats(pc.list_parent_indices(texts), items):
        raise DataError(
            f"A list in column {name!r} holds one number a class",
            rule="A list of tags names those that are set: [1], and not [0, 1, 0]",
            fix="Write the tags' names, or a|b",
        )
    wrong = pc.or_(pc.match_substring(items, "|"), pc.equal(items, "nan"))
    if items.null_count or pc.any(wrong).as_py():
        raise DataError(
            f"A list in column {name!r} cannot be read as tags",
            got="a null in a list" if items.null_count else items.filter(wrong)[0].as_py(),
            rule="A tag is a name without the bar that stands between tags",
            fix="Mend the rows, or leave them out with table.where",
        )
    return pc.binary_join(texts, "|")


def _repeats(parents: pa.Array, items: pa.Array) -> bool:
    pairs = pa.table({"list": parents, "item": items})
    return len(pairs.group_by(["list", "item"]).aggregate([])) < len(pairs)


def position(stored: pa.StructType | pa.Schema, field: pa.Field) -> int:
    """Where a file keeps a field of the table: by its id, its physical name, or its own name; -1 when it does not."""
    ours: dict[bytes, Any] = field.metadata or {}
    fields = list(stored)
    if FIELD_ID in ours:
        ids = [(f.metadata or {}).get(b"PARQUET:field_id") for f in fields]
        return ids.index(ours[FIELD_ID]) if ours[FIELD_ID] in ids else -1
    name = ours[PHYSICAL_NAME].decode() if PHYSICAL_NAME in ours else field.name
    names = [f.name for f in fields]
    return names.index(name) if name in names else -1
