"""What the Delta log says about one version: its files, their partition values, deleted rows, statistics, column names.

The log is replayed by deltalake; here its answers become the fragments that a reader needs. Partition values come typed from
the strings of the log, never from folder names. Statistics only ever rule a file out when no row of it can match.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from raypipe.errors import DataError, nearest
from raypipe.tables import conditions, protocol
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import (
    FIELD_ID,
    PHYSICAL_NAME,
    Fragment,
    Options,
    matches,
    open_file,
    position,
    with_fields,
)


@dataclass(frozen=True)
class File:
    """One data file of a version; `keep_N` says which rows are not deleted (None: all), and may be shorter than the file."""

    uri: str
    path: str
    partition: tuple[tuple[str, pa.Scalar], ...]
    keep_N: np.ndarray | None


def files(delta: DeltaTable, uri: str, where: Where) -> tuple[list[File], pa.Schema]:
    """The files that may hold a match, oldest first, and the schema; its fields carry the names a file has for them, if mapped.

    Raises DataError when the version uses a feature that we would read wrong.
    """
    protocol.preflight(delta)  # the pinned version may use a feature that the newest no longer does
    schema = _schema(delta)
    for name, wanted in where.items():
        if name not in schema.names:
            raise DataError(
                f"{delta.table_uri} has no column {name!r}", fix=nearest(name, schema.names)
            )
        conditions.values(
            [wanted] if isinstance(wanted, str) else wanted, schema.field(name).type, name
        )
    actions = pa.table(delta.get_add_actions(flatten=True)).sort_by(
        [("modification_time", "ascending"), ("path", "ascending")]
    )
    actions = actions.filter(pa.array(_may_match(actions, schema, where)))
    names = delta.metadata().partition_columns
    masks = _masks(delta)
    found = []
    for i, path in enumerate(actions["path"].to_pylist()):
        root, path = place(delta.table_uri, path)
        partition = tuple((n, actions[f"partition.{n}"][i]) for n in names)
        keep_N = masks.pop(_identity(root, path), None)
        # A catalog's table is opened by its name again, for credentials of its own.
        found.append(
            File(uri if root == delta.table_uri.rstrip("/") else root, path, partition, keep_N)
        )
    if masks and not where:
        raise DataError(
            f"{delta.table_uri} has deletion vectors for files that its log does not name",
            got=sorted(masks)[0],
        )
    return found, schema


def row_groups(
    file: File, schema: pa.Schema, sample: float, storage_options: Options
) -> list[Fragment]:
    """The file's row groups, from its footer; a `sample` of 0.1 leaves about every tenth row, the same ones each time."""
    opened = open_file(file.uri, file.path, storage_options)
    footer, names = opened.metadata, _names(opened.schema_arrow, schema, file)
    gone_N = np.zeros(footer.num_rows, bool)
    if file.keep_N is not None:
        if len(file.keep_N) > footer.num_rows:
            raise DataError(
                "A deletion vector names rows that its file does not have", got=file.path
            )
        gone_N[: len(file.keep_N)] = ~file.keep_N
    if sample < 1:
        seed = np.frombuffer(
            file.path.rpartition("/")[2].encode(), np.uint8
        )  # a copy of the table has the same sample
        gone_N |= np.random.default_rng(seed).random(footer.num_rows) >= sample
    found, start = [], 0
    for g in range(footer.num_row_groups):
        group = footer.row_group(g)
        mine_N = gone_N[start : start + group.num_rows]
        deleted = np.packbits(mine_N).tobytes() if mine_N.any() else b""
        found.append(
            Fragment(
                file.uri,
                file.path,
                g,
                len(mine_N),
                group.total_byte_size,
                file.partition,
                names,
                deleted,
            )
        )
        start += group.num_rows
    return found


def _schema(delta: DeltaTable) -> pa.Schema:
    """The table's schema with exactly the metadata that finds a field in a file: its id, its physical name, or none."""
    told = delta.protocol()
    able = told.min_reader_version == 2 or "columnMapping" in (told.reader_features or ())
    mode = delta.metadata().configuration.get("delta.columnMapping.mode") if able else None
    key = {"name": PHYSICAL_NAME, "id": FIELD_ID}.get(mode or "none")

    def kept(field: pa.Field) -> pa.Field:
        told = (field.metadata or {}).get(key) if key else None
        return field.with_metadata({key: told} if told else None)

    return pa.schema(
        [kept(f.with_type(with_fields(f.type, kept))) for f in pa.schema(delta.schema().to_arrow())]
    )


def _names(stored: pa.Schema, schema: pa.Schema, file: File) -> tuple[tuple[str, str], ...]:
    mapped = [f for f in schema if f.metadata and f.name not in dict(file.partition)]
    if any(FIELD_ID in f.metadata for f in mapped) and not any(
        b"PARQUET:field_id" in (f.metadata or {}) for f in stored
    ):
        raise DataError(
            "Columns are mapped by id and a file has no ids",
            got=file.path,
            rule="A table is read in full or refused",
            fix="Rewrite the table with the engine that made it",
        )
    fields = [f for f in schema if f.name not in dict(file.partition)]
    found = ((f.name, stored.names[i] if (i := position(stored, f)) >= 0 else "") for f in fields)
    return tuple((ours, theirs) for ours, theirs in found if ours != theirs)


def _may_match(actions: pa.Table, schema: pa.Schema, where: Where) -> np.ndarray:
    keep_N = np.ones(len(actions), bool)
    for name, wanted in where.items():
        values = [wanted] if isinstance(wanted, str) else wanted
        if f"partition.{name}" in actions.column_names:
            keep_N &= matches(
                actions[f"partition.{name}"].cast(schema.field(name).type), values, name
            )
            continue
        field = schema.field(name)
        physical = (field.metadata or {}).get(PHYSICAL_NAME, name.encode()).decode()
        low, high = (
            actions[f"{end}.{physical}"] if f"{end}.{physical}" in actions.column_names else None
            for end in ("min", "max")
        )
        if FIELD_ID in (field.metadata or {}) or low is None or high is None:
            continue
        keep_N &= _overlaps(low, high, values, field.type)
    return keep_N


def _overlaps(
    low: pa.ChunkedArray, high: pa.ChunkedArray, values: list[str], kind: pa.DataType
) -> np.ndarray:
    """Files whose range of a column may hold one of the values. Only for types whose text and order leave no doubt."""
    everything: np.ndarray = np.ones(len(low), bool)
    if (
        not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind))
        or low.type != kind
    ):
        return everything
    points = conditions.values(values, kind, "")
    hit = np.zeros(len(low), bool)
    for point in points:
        inside = pc.and_(pc.less_equal(low, point), pc.greater_equal(high, point))
        hit |= pc.fill_null(inside, True).to_numpy()  # no statistics: it may
    return hit


def _masks(delta: DeltaTable) -> dict[str, np.ndarray]:
    if "deletionVectors" not in (delta.protocol().reader_features or ()):
        return {}
    try:
        found = pa.table(delta.deletion_vectors())
    except Exception as e:  # deltalake raises its own, OSError or plain Exception for a missing, short or damaged vector
        raise DataError(
            f"A deletion vector of {delta.table_uri} cannot be read: {' '.join(str(e).split())}",
            rule="Without it deleted rows would come back",
        ) from None
    files, keeps = (
        found["filepath"].to_pylist(),
        (k.values for chunk in found["selection_vector"].chunks for k in chunk),
    )
    return {unquote(f): k.to_numpy(zero_copy_only=False) for f, k in zip(files, keeps, strict=True)}


def place(table_uri: str, path: str) -> tuple[str, str]:
    """Under which address to open a file, and its path there. The log holds paths percent-encoded, relative or absolute."""
    root, parts = table_uri.rstrip("/"), urlsplit(path)
    if root.startswith("file://") or "://" not in root:
        root = unquote(root.removeprefix("file://"))
        if parts.scheme not in ("", "file"):
            raise DataError(
                f"{root} names a file in another place",
                got=path,
                rule="A local table has local files",
            )
        return root, str(PurePosixPath(root, unquote(parts.path)))  # an absolute path stays
    if not parts.scheme:
        return root, unquote(path)
    return f"{parts.scheme}://{parts.netloc}", unquote(parts.path).lstrip("/")  # a shallow clone


def _identity(uri: str, path: str) -> str:
    return f"file://{path}" if path.startswith("/") else f"{uri}/{path}"
