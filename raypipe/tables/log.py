"""The data files of one table version, as the Delta log lists them.

deltalake replays the log. This module turns its answers into the fragments that a reader needs:
files, partition values, deleted rows, statistics and column names. Partition values get their types
from the strings of the log, never from folder names. Statistics skip a file only when none of its
rows can match.

Names: arrays with the suffix _N have one entry a row of a file (or a file of the log).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from raypipe import stores
from raypipe.errors import DataError, nearest
from raypipe.tables import conditions, protocol, storage
from raypipe.tables.casting import FIELD_ID, PARQUET_FIELD_ID, PHYSICAL_NAME, position
from raypipe.tables.conditions import Tags, Where
from raypipe.tables.footer import Footer
from raypipe.tables.fragment import Fragment, file_name, matches, with_fields

# A relative path without anything that an address encodes, and without empty or dotted folders.
PLAIN = re.compile(r"\w[\w.=-]*(/\w[\w.=-]*)*", re.ASCII)
_Stored = tuple[tuple[str, str], ...]  # (name in the table, name in the file)


@dataclass(frozen=True, slots=True)
class File:
    """One data file of a version.

    `keep_N` says which rows are not deleted; None keeps all. It may be shorter than the file: rows
    behind its end are kept.
    """

    uri: str
    path: str
    partition: tuple[tuple[str, pa.Scalar], ...]
    keep_N: np.ndarray | None
    elsewhere: bool = False  # as a Fragment's

    @property
    def name(self) -> str:
        """As `Fragment.file`."""
        return file_name(self.uri, self.path, self.elsewhere)


def files(
    delta: DeltaTable, uri: str, where: Where, masks: dict[str, np.ndarray] | None = None
) -> tuple[list[File], pa.Schema]:
    """The files that may hold a match, oldest first, and the table's schema.

    masks: `deletion_masks`, if they were read before.
    With column mapping, the schema's fields carry the ids or names under which files store them.
    Raises DataError when the version uses a feature that raypipe would read wrong.
    """
    # The pinned version may use a feature that the newest version no longer uses.
    protocol.preflight(delta)
    schema = schema_of(delta)
    _check_conditions(delta, schema, where)

    # One add action a file, oldest first, without the files that cannot match.
    order = [
        ("modification_time", "ascending"),
        ("path", "ascending"),
    ]
    actions = pa.table(delta.get_add_actions(flatten=True))
    every_path = actions["path"]
    keep_N = _may_match(actions, schema, where)
    partition_columns = delta.metadata().partition_columns
    # Statistics take most of the memory, and are not needed any more.
    needed = ["path", "modification_time", *(f"partition.{name}" for name in partition_columns)]
    actions = actions.select(needed).filter(pa.array(keep_N)).sort_by(order)

    masks = deletion_masks(delta) if masks is None else masks
    table_root = delta.table_uri.rstrip("/")
    placed = Places(delta.table_uri)
    # Each mask has its file: without it deleted rows would come back.
    if masks:
        strangers = masks.keys() - {_mask_key(*placed(path)) for path in every_path.to_pylist()}
        if strangers:
            raise DataError(
                f"{delta.table_uri} has deletion vectors for files that its log does not name",
                got=min(strangers),
            )
    partitions = _partitions(actions, partition_columns)
    selected = []
    # Tables have hundreds of thousands of files: each line here is run for each.
    for logged_path, partition in zip(actions["path"].to_pylist(), partitions, strict=True):
        root, path = placed(logged_path)
        mask = masks.get(_mask_key(root, path)) if masks else None
        # A catalog's table is opened by its own name again: its credentials belong to that name.
        opened_under = uri if root == table_root else root
        elsewhere = _is_elsewhere(root, table_root)
        selected.append(File(opened_under, path, partition, mask, elsewhere))

    return selected, schema


def _partitions(actions: pa.Table, names: list[str]) -> Iterator[tuple[tuple[str, pa.Scalar], ...]]:
    """The partition values of each file. Files of one partition share them."""
    if not names:
        return itertools.repeat((), len(actions))
    columns = [actions[f"partition.{name}"].combine_chunks() for name in names]
    return (tuple(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _check_conditions(delta: DeltaTable, schema: pa.Schema, where: Where) -> None:
    """Raise DataError for a condition on a missing column, or with a value of the wrong type."""
    for name, wanted in where.items():
        if name not in schema.names:
            raise DataError(
                f"{delta.table_uri} has no column {name!r}",
                fix=nearest(name, schema.names),
            )
        texts = [wanted] if isinstance(wanted, str) else wanted
        # The values are not used here: this call raises for a text that the type cannot hold.
        conditions.values(texts, schema.field(name).type, name)


class Names:
    """How the files of a table call its columns. Files with the same schema are looked at once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        # By the schema object, which is kept, so that no other one gets its id. The footers of a
        # snapshot share equal ones.
        self._found: dict[tuple[int, tuple[str, ...]], tuple[pa.Schema, _Stored]] = {}

    def of(self, footer: Footer, file: File) -> _Stored:
        """(name in the table, name in the file) where they differ. Raises DataError."""
        partition = tuple(name for name, _ in file.partition)
        key = (id(footer.schema), partition)
        if key not in self._found:
            self._found[key] = footer.schema, _stored_names(footer.schema, self._schema, file)
        return self._found[key][1]


def row_groups(file: File, footer: Footer, names_of: Names, image: str) -> list[Fragment]:
    """The row groups of a file, from its footer. `image`: the table's column. Raises DataError."""
    names = names_of.of(footer, file)
    deleted_N = None if file.keep_N is None else _deleted_rows(file, footer.rows)
    fragments, start = [], 0
    for number, (rows, size, chunk) in enumerate(footer.groups()):
        deleted = b""
        if deleted_N is not None and deleted_N[start : start + rows].any():
            deleted = np.packbits(deleted_N[start : start + rows]).tobytes()
        fragments.append(
            Fragment(
                uri=file.uri,
                path=file.path,
                row_group=number,
                rows=rows,
                bytes=size,
                partition=file.partition,
                names=names,
                deleted=deleted,
                image=image if chunk else "",
                image_offset=chunk.offset if chunk else 0,
                image_size=chunk.size if chunk else 0,
                image_nullable=chunk is not None and chunk.nullable,
                footer=footer.data,
                elsewhere=file.elsewhere,
            )
        )
        start += rows

    return fragments


def _deleted_rows(file: File, rows: int) -> np.ndarray:
    """One bool a row: deleted by a deletion vector."""
    deleted_N = np.zeros(rows, bool)

    if file.keep_N is not None:
        if len(file.keep_N) > rows:
            raise DataError(
                "A deletion vector names rows that its file does not have", got=file.path
            )
        deleted_N[: len(file.keep_N)] = ~file.keep_N
    return deleted_N


def schema_of(delta: DeltaTable) -> pa.Schema:
    """The table's Arrow schema.

    The only metadata that a field keeps is what finds it in a file: its id or physical name with
    column mapping, nothing without.
    """
    mode = protocol.mapping(delta)
    key = {"name": PHYSICAL_NAME, "id": FIELD_ID}.get(mode)

    def keep_key(field: pa.Field) -> pa.Field:
        value = (field.metadata or {}).get(key) if key else None
        return field.with_metadata({key: value} if value else None)

    fields = []
    for field in pa.schema(delta.schema().to_arrow()):
        fields.append(keep_key(field.with_type(with_fields(field.type, keep_key))))
    return pa.schema(fields)


def stored_as(field: pa.Field) -> str:
    """What finds a column of the table's schema in its files, and its type."""
    return f"{stored_name(field)}: {field.type}"


def stored_name(field: pa.Field) -> str:
    """What finds a column of the table's schema in its files."""
    metadata = field.metadata or {}
    key = metadata.get(PHYSICAL_NAME) or metadata.get(FIELD_ID) or field.name.encode()
    return str(key.decode())


def _stored_names(stored: pa.Schema, schema: pa.Schema, file: File) -> _Stored:
    """(name in the table, name in the file) where they differ; "" when the file lacks it."""
    partition = dict(file.partition)
    fields = [field for field in schema if field.name not in partition]
    mapped_by_id = any(FIELD_ID in (field.metadata or {}) for field in fields)
    file_has_ids = any(PARQUET_FIELD_ID in (field.metadata or {}) for field in stored)
    if mapped_by_id and not file_has_ids:
        raise DataError(
            "Columns are mapped by id and a file has no ids",
            got=file.path,
            rule="A table is read in full or refused",
            fix="Rewrite the table with the engine that made it",
        )

    names = []
    for field in fields:
        # A column that was added after the file was written has no place in it.
        index = position(stored, field)
        if index < 0:
            _refuse_other_case(stored, field, schema.names, file)
        stored_name = stored.names[index] if index >= 0 else ""
        if stored_name != field.name:
            names.append((field.name, stored_name))
    return tuple(names)


def _refuse_other_case(
    stored: pa.Schema, field: pa.Field, columns: Collection[str], file: File
) -> None:
    """Raise DataError where the file has the column in other letters: it would read as null.

    CONVERT TO DELTA takes such files, and engines that ignore case read both.
    """
    alike = [
        name for name in stored.names if name.lower() == field.name.lower() and name not in columns
    ]
    if alike and not field.metadata:
        raise DataError(
            f"A file calls the column {field.name!r} {alike[0]!r}",
            got=file.path,
            rule="A table is read in full or refused",
            fix="Rewrite the table with the engine that made it",
        )


def _may_match(actions: pa.Table, schema: pa.Schema, where: Where) -> np.ndarray:
    """One bool a file: partition values and statistics do not rule out a match."""
    keep_N = np.ones(len(actions), bool)
    for name, wanted in where.items():
        texts = [wanted] if isinstance(wanted, str) else wanted
        field = schema.field(name)
        partition = f"partition.{name}"
        if partition in actions.column_names:
            # The log holds partition values as text; the schema says their type.
            values = actions[partition].cast(field.type)
            keep_N &= matches(values, texts, name)
            continue

        metadata = field.metadata or {}
        physical = metadata.get(PHYSICAL_NAME, name.encode()).decode()
        low, high = f"min.{physical}", f"max.{physical}"
        # Twice: field b of a struct a, and a column that is called a.b.
        has_statistics = all(actions.column_names.count(name) == 1 for name in (low, high))
        # Mapped by id, the statistics are not under the column's name.
        if has_statistics and FIELD_ID not in metadata:
            keep_N &= _overlaps(actions[low], actions[high], texts, field.type)
    return keep_N


def _overlaps(
    low: pa.ChunkedArray, high: pa.ChunkedArray, texts: list[str], kind: pa.DataType
) -> np.ndarray:
    """One bool a file: one of the values may lie between its minimum and maximum.

    Only strings, whole numbers and dates are compared: their order in the statistics is certain.
    """
    is_ordered = pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)
    # Tags may be written as b|a, which lies elsewhere than a|b.
    has_tags = any(isinstance(text, Tags) for text in texts)
    if not is_ordered or has_tags or low.type != kind:
        return np.ones(len(low), bool)

    overlap_N = np.zeros(len(low), bool)
    for value in conditions.values(texts, kind, ""):
        inside = pc.and_(
            pc.less_equal(low, value),
            pc.greater_equal(high, value),
        )
        # A file without statistics may hold any value.
        overlap_N |= pc.fill_null(inside, True).to_numpy()
    return overlap_N


def deletion_masks(delta: DeltaTable) -> dict[str, np.ndarray]:
    """The rows to keep of each file with a deletion vector, by `_mask_key`. Raises DataError."""
    if "deletionVectors" not in (delta.protocol().reader_features or ()):
        return {}
    try:
        vectors = pa.table(delta.deletion_vectors())
    except Exception as e:
        # For a missing, short or damaged vector deltalake raises its own error, OSError or
        # a bare Exception.
        if stores.cause(e, delta.table_uri):
            raise storage.refusal(e, delta.table_uri, "A deletion vector cannot be read") from None
        raise DataError(
            f"A deletion vector of {delta.table_uri} cannot be read: {' '.join(str(e).split())}",
            rule="Without it deleted rows would come back",
        ) from None
    masks = {}
    paths, selections = vectors["filepath"].to_pylist(), vectors["selection_vector"]
    for path, selection in zip(paths, selections, strict=True):
        masks[unquote(path)] = selection.values.to_numpy(zero_copy_only=False)
    return masks


class Places:
    """`place` for many files of one table: those that are named plainly are not parsed."""

    def __init__(self, table_uri: str) -> None:
        self._table_uri = table_uri
        root = table_uri.rstrip("/")
        is_local = root.startswith("file://") or "://" not in root
        self._root = unquote(root.removeprefix("file://")) if is_local else root
        self._before = f"{self._root}/" if is_local else ""

    def __call__(self, path: str) -> tuple[str, str]:
        # Letters, digits and -_.=/ mean themselves in an address. Other texts are parsed.
        if PLAIN.fullmatch(path):
            return self._root, self._before + path
        return place(self._table_uri, path)

    def name(self, path: str) -> str:
        """As `Fragment.file`."""
        root, inside = self(path)
        return file_name(root, inside, _is_elsewhere(root, self._root))


def _is_elsewhere(root: str, table_root: str) -> bool:
    """Is what is opened under `root` in another store than its table? A local table has paths that
    are whole by themselves."""
    return "://" in root and root != table_root


def place(table_uri: str, path: str) -> tuple[str, str]:
    """The address to open a file under, and its path there.

    `path` is as the log has it: percent-encoded, relative or absolute. Raises DataError when a
    local table names a file in a store.
    """
    root, parts = table_uri.rstrip("/"), urlsplit(path)
    if root.startswith("file://") or "://" not in root:
        root = unquote(root.removeprefix("file://"))
        if parts.scheme not in ("", "file"):
            raise DataError(
                f"{root} names a file in another place",
                got=path,
                rule="A local table has local files",
            )
        # PurePosixPath ignores the root when the second path is absolute.
        return root, str(PurePosixPath(root, unquote(parts.path)))
    if not parts.scheme:
        return root, unquote(path)

    # A shallow clone names the files of another table by their full address.
    return f"{parts.scheme}://{parts.netloc}", unquote(parts.path).lstrip("/")


def _mask_key(uri: str, path: str) -> str:
    """The file's full address, as deltalake's deletion vectors name it."""
    # `deletion_masks` decodes the names, and a bucket's address may be percent-encoded.
    return f"file://{path}" if path.startswith("/") else f"{unquote(uri)}/{path}"
