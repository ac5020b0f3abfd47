"""One row group of one Parquet file of a Delta table, read as the table means it.

pyarrow reads the bytes. This module adds what only the table knows:
- partition columns, whose values stand in the log alone;
- rows that a deletion vector removed;
- columns with another name in the file (column mapping) or with another type (casting.py);
- columns that were added after the file was written: null.
Source: the Delta protocol, https://github.com/delta-io/delta PROTOCOL.md.

A fragment brings the footer of its file, which was read when the table was planned (snapshot.py).
Opening a file parses it (0.15 ms, more with many row groups), so each thread keeps its last files
open. Local files are read through a buffer of 64 kB: 1.2 ms for 5 MB of images and a peak of
9.5 MB (13.8 MB without it). A memory map takes 0.9 ms but keeps the whole file in memory. Remote
files are read with one request a column chunk.

Names: arrays with the suffix _N have one entry a physical row, deleted rows included.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, PyFileSystem

from raypipe import stores
from raypipe.errors import DataError
from raypipe.tables import conditions, names, storage
from raypipe.tables.casting import conform
from raypipe.tables.conditions import Tags, Where, is_listed, is_tags
from raypipe.tables.pages import Chunk

Options = dict[str, str] | None
Bits = bytes  # np.packbits
Bytes = bytes  # a fragment has a field `bytes`
OPEN_FILES = 16  # a thread
MOST_SENT = 65_536  # bytes of a footer that is sent with a row group; to read one takes as much
BUFFER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Fragment:
    """One row group of a file."""

    uri: str
    """The address that `path` is opened under: the table, or the store of a file elsewhere."""
    path: str
    row_group: int
    rows: int
    """Physical rows, deleted ones included."""
    bytes: int
    partition: tuple[tuple[str, pa.Scalar], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    """(name in the table, name in the file) where these differ; "" when the file lacks it."""
    deleted: Bits = b""
    """One bit a physical row; empty when no row is deleted."""
    image: str = ""
    """The table's image column, if it can be read in place (pages.py); else blank."""
    image_offset: int = 0
    image_size: int = 0
    image_nullable: bool = False
    footer: Bytes | None = field(default=None, compare=False, repr=False)
    """The file's footer (footer.py), one object for all its row groups; None: read it."""
    elsewhere: bool = False
    """The file is in another place than its table, as those of a shallow clone are."""

    @property
    def file(self) -> str:
        """Names its file among all files of the table."""
        return file_name(self.uri, self.path, self.elsewhere)

    @property
    def chunk(self) -> Chunk | None:
        """Where the images lie; None: pyarrow must read them."""
        if not self.image:
            return None
        return Chunk(self.image_offset, self.image_size, self.rows, self.image_nullable)

    def for_images(self) -> Fragment:
        """This fragment, for whoever reads its images alone: no footer where none is needed."""
        return replace(self, footer=None) if self.image else self

    def for_task(self) -> Fragment:
        """This fragment, to be sent alone. A long footer is not sent with each of its groups."""
        too_long = self.footer is not None and len(self.footer) > MOST_SENT
        return replace(self, footer=None) if too_long else self


def file_name(uri: str, path: str, elsewhere: bool) -> str:
    """The path, or the whole address of a file elsewhere: two buckets may have one path."""
    return f"{uri}/{path}" if elsewhere else path


def binary(fragment: Fragment, column: str, storage_options: Options) -> pa.Array:
    """All physical rows of a binary column, deleted ones included, as binary or large_binary.

    Null where the column was added after the file was written. Peak memory: twice the bytes.
    """
    file, row_group, name = located(fragment, column, storage_options)
    if name not in file.schema_arrow.names:
        return pa.nulls(fragment.rows, pa.large_binary())

    with _reading(fragment):
        values = file.read_row_group(row_group, columns=[name], use_threads=False).column(name)

    # Other engines write dictionaries, views or values of fixed size. A row group of over 2 GB
    # comes in several chunks.
    if not is_bytes(values.type) or values.num_chunks > 1:
        values = values.cast(pa.large_binary())
    if values.num_chunks == 1:
        return values.chunk(0)
    return values.combine_chunks()


def located(
    fragment: Fragment, column: str, storage_options: Options
) -> tuple[pq.ParquetFile, int, str]:
    """The open file, the number of the row group, and the column's name in the file."""
    file = open_file(fragment.uri, fragment.path, storage_options, fragment.footer)
    names = dict(fragment.names)
    return file, fragment.row_group, names.get(column, column)


def read_bytes(
    fragment: Fragment, offset: int, out: memoryview, storage_options: Options
) -> memoryview:
    """Read len(out) bytes of the fragment's file from `offset` on; fewer at the end of the file.

    Returns the bytes: a part of `out` for a local file, other memory for an object store.
    """
    store = _store_of(fragment.uri, storage_options)
    with _reading(fragment):
        if store is not None:
            with store.open_input_file(fragment.path) as file:
                return memoryview(file.read_at(len(out), offset))

        # A local read may return fewer bytes than requested: repeat until none come.
        with Path(fragment.path).open("rb", buffering=0) as local_file:
            local_file.seek(offset)
            filled = 0
            while filled < len(out):
                count = local_file.readinto(out[filled:])
                if not count:
                    break
                filled += count
            return out[:filled]


def read(
    run: Sequence[Fragment],
    schema: pa.Schema,
    columns: Sequence[str],
    where: Where,
    storage_options: Options,
) -> tuple[pa.Table, np.ndarray]:
    """The visible rows of neighbouring row groups of one file that match `where`.

    Returns the columns in the types of `schema` (the whole table's), and the physical number of
    each row within the run (int64). The columns of `where` are read first: where nothing matches,
    no image is read. Raises DataError.
    """
    # Rows that are not deleted and match; the images are not read yet.
    keep_N = np.concatenate([_visible_rows(fragment) for fragment in run])
    if where:
        tested = _columns(run, schema, list(where), storage_options)
        for name, values in where.items():
            keep_N &= matches(tested[name], values, name)

    rows_N = np.flatnonzero(keep_N)
    schema_out = output_schema(schema, columns)
    if not len(rows_N):
        return schema_out.empty_table(), rows_N

    table = pa.table(_columns(run, schema, columns, storage_options), schema_out)
    # Filtering copies every image, so it is skipped when all rows stay.
    if len(rows_N) < len(keep_N):
        table = table.filter(pa.array(keep_N))
    return table, rows_N


def output_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Some columns of the table's schema, without the metadata that finds them in a file."""
    fields = []
    for name in columns:
        kind = with_fields(schema.field(name).type, pa.Field.remove_metadata)
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def with_fields(kind: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """The type with `change` applied to every field inside it, at every depth."""

    def changed(field: pa.Field) -> pa.Field:
        inner = with_fields(field.type, change)
        return change(field.with_type(inner))

    if pa.types.is_struct(kind):
        return pa.struct([changed(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(
            changed(kind.key_field),
            changed(kind.item_field),
        )
    if pa.types.is_list(kind):
        return pa.list_(changed(kind.value_field))
    return kind


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def matches(
    values: pa.ChunkedArray | pa.Array, wanted: str | list[str], name: str = ""
) -> np.ndarray:
    """One bool a value: it is one of `wanted`, read in the column's type. A null never is.

    Raises DataError for a text that the type cannot hold.
    """
    texts = [wanted] if isinstance(wanted, str) else wanted
    # A million rows have few different labels: each is read once.
    if any(isinstance(text, Tags) for text in texts):
        texts = conditions.with_tags(texts, pc.unique(values).to_pylist())
    options = conditions.values(texts, values.type, name)
    # A list is compared as the text a|b. Tags have no order; numbers, like a place, have one.
    if is_tags(values.type):
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        values = pa.chunked_array([names.tags(chunk) for chunk in chunks], pa.string())
    elif is_listed(values.type):
        values = pc.binary_join(values.cast(pa.list_(pa.string())), "|")

    is_match = pc.is_in(values.cast(options.type), value_set=options)
    match_N: np.ndarray = is_match.to_numpy(zero_copy_only=False)
    return match_N


def open_file(
    uri: str, path: str, storage_options: Options, footer: bytes | None = None
) -> pq.ParquetFile:
    """The open file. Raises DataError when it is missing or unreadable.

    footer: the file's own, if it was read before. Each thread keeps its own OPEN_FILES files open:
    pyarrow's readers must not be shared.
    """
    files = _files_of_this_thread()
    # An OrderedDict as a least-recently-used cache: a file that is used moves to the end.
    file = files.pop((uri, path), None)
    if file is None:
        file = new_file(uri, path, storage_options, footer)

    files[uri, path] = file
    if len(files) > OPEN_FILES:
        _, oldest = files.popitem(last=False)
        oldest.close(force=True)
    return file


_open = threading.local()


def _files_of_this_thread() -> OrderedDict[tuple[str, str], pq.ParquetFile]:
    files: OrderedDict[tuple[str, str], pq.ParquetFile]
    files = _open.__dict__.setdefault("files", OrderedDict())
    return files


def new_file(
    uri: str, path: str, storage_options: Options, footer: bytes | None = None
) -> pq.ParquetFile:
    """As `open_file`, for the caller alone, who closes it."""
    store = _store_of(uri, storage_options)
    known = None if footer is None else pq.read_metadata(pa.BufferReader(footer))
    try:
        return pq.ParquetFile(
            path,
            metadata=known,
            filesystem=store,
            pre_buffer=False,
            buffer_size=0 if store else BUFFER_BYTES,
            # Nanoseconds hold no year before 1678 or after 2262.
            coerce_int96_timestamp_unit="us",
        )
    except FileNotFoundError:
        raise DataError(
            f"{uri} lacks a file that its log names",
            got=path,
            rule="VACUUM removes the files of old versions",
            fix="Bring it back from a backup, or pin a newer version",
        ) from None
    except (pa.ArrowException, OSError) as e:
        if stores.cause(e, uri) or stores.of_system(e):
            raise storage.refusal(e, uri, "A file of the table cannot be opened") from None
        raise DataError(f"A file of {uri} is no readable Parquet: {e}", got=path) from None


@lru_cache(maxsize=32)
def remote(uri: str, storage_options: tuple[tuple[str, str], ...]) -> FileSystem | None:
    """The object store that a table is in; None for a folder of this machine."""
    if "://" not in uri or uri.startswith("file://"):
        return None
    return PyFileSystem(DeltaStorageHandler(uri, dict(storage_options)))


def _store_of(uri: str, storage_options: Options) -> FileSystem | None:
    options = (storage_options or {}).items()
    return remote(uri, tuple(sorted(options)))


@contextmanager
def reading(uri: str, path: str) -> Iterator[None]:
    """Turn an error of an open file (network, disk, damaged pages) into a DataError.

    Object stores have retried by then.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as e:
        raise storage.refusal(e, uri, f"{path} cannot be read") from None


@contextmanager
def _reading(fragment: Fragment) -> Iterator[None]:
    with reading(fragment.uri, fragment.path):
        yield


def _visible_rows(fragment: Fragment) -> np.ndarray:
    """One bool a physical row: it is not deleted."""
    if not fragment.deleted:
        return np.ones(fragment.rows, bool)
    # `count` drops the bits that fill the last byte.
    packed = np.frombuffer(fragment.deleted, np.uint8)
    return np.unpackbits(packed, count=fragment.rows) == 0


def _repeated(value: pa.Scalar, field: pa.Field, rows: int) -> pa.Array:
    """A partition value for every row, in the type of the table's `field`."""
    one = conform(pa.array([value.as_py()], value.type), field)
    return pa.repeat(one[0], rows)


def _columns(
    run: Sequence[Fragment], schema: pa.Schema, columns: Sequence[str], storage_options: Options
) -> dict[str, pa.ChunkedArray]:
    """All physical rows of some columns, in the types of `schema`."""
    first = run[0]
    rows = sum(fragment.rows for fragment in run)
    file = open_file(first.uri, first.path, storage_options, first.footer)
    partition = dict(first.partition)
    names = dict(first.names)

    # Name in the file of each column that the file holds.
    stored = {}
    in_file = set(file.schema_arrow.names)
    for name in columns:
        stored_name = names.get(name, name)
        if name not in partition and stored_name in in_file:
            stored[name] = stored_name

    # One read for all row groups of the run.
    with _reading(first):
        data = file.read_row_groups(
            [fragment.row_group for fragment in run],
            columns=list(stored.values()),
            use_threads=False,
        )

    # Every column as the table has it, wherever its values come from.
    out = {}
    for name in columns:
        field = schema.field(name)
        try:
            if name in partition:
                chunks = [_repeated(partition[name], field, rows)]
            elif name in stored:
                chunks = [conform(chunk, field) for chunk in data.column(stored[name]).chunks]
            else:  # the column was added after this file was written
                chunks = [pa.nulls(rows, field.type)]
            out[name] = pa.chunked_array(chunks, field.type)
        except pa.ArrowException as e:
            raise DataError(
                f"Column {name!r} of {first.path} cannot be read as {field.type}: {e}"
            ) from None
    return out
