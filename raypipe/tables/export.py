"""A version of any Delta table -> one Parquet file of its visible rows, or a folder of image files.

Rows are streamed one row group at a time, which bounds the memory. The output is written beside the
target and renamed at the end, so the target is never incomplete.

A folder and its labels.csv are what `raypipe ingest` reads as a folder with labels: the same images
come back with the same labels. An image without a label is in the folder and not in labels.csv,
because a blank there is the label of an image without tags.

An export marks what it writes: a key in the metadata of a Parquet file, a list of files with their
hashes in a folder. Only what still is as it was written is ever replaced, so no table, no foreign
photograph and no corrected label is lost.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe import stores
from raypipe.errors import DataError, nearest
from raypipe.tables import fragment, scan, storage
from raypipe.tables.conditions import Where, both, by_class
from raypipe.tables.export_writers import (
    LABELS,
    MADE,
    MARK,
    Exported,
    sha256_of,
    to_images,
    to_parquet,
)
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import ImageTable, TableVersion

Progress = Callable[[int, int], None]
log = logging.getLogger("raypipe")


def export(
    table: ImageTable,
    pinned: TableVersion,
    out: Path,
    columns: Sequence[str] | None = None,
    where: Where | None = None,
    limit: int | None = None,
    distributed: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the version's rows to `out`.

    A name that ends in .parquet becomes a Parquet file, any other a folder of images with a
    labels.csv; `columns` are for a Parquet file only. `progress` is called with the rows read and
    the physical rows of all planned row groups. With `distributed` Ray tasks read (connect first),
    in the same order. Raises DataError for a table that raypipe cannot read right, a missing
    column, a folder of images without labels, and a target that exists.
    """
    fragments, schema = scan.plan(table, pinned, where)
    # An existing folder stays a folder, whatever its name.
    as_file = out.suffix == ".parquet" and not out.is_dir()
    if as_file:
        wanted = list(dict.fromkeys(columns or schema.names))
    else:
        _refuse_columns(columns)
        roles = table.columns
        named = {roles.id: None} if roles.id in schema.names else {}
        wanted = list(dict.fromkeys([roles.image, *named, roles.label]))
    _check_columns(table, pinned, schema, wanted, as_file)
    _check_target(table, out, overwrite)
    where = by_class(where or {}, schema, table.columns.label)
    if not as_file:
        _require_labels(table, pinned, where)
        # As text a label is what ingest made of it: 0.1 and not 0.10000000149, a|b and not a list.
        schema, where = scan.with_names(table, schema, wanted, where)

    # The parts are lazy: nothing is read before they are written.
    parts = _parts(table, fragments, schema, wanted, where, distributed)
    total = sum(group.rows for group in fragments)
    parts = _limited(_counted(parts, total, progress), limit)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name[:50]}."
        with tempfile.TemporaryDirectory(".partial", prefix, out.parent) as scratch:
            partial = Path(scratch, out.name)
            if as_file:
                schema = fragment.output_schema(schema, wanted)
                done = Exported(to_parquet(parts, schema, partial))
            else:
                done = to_images(parts, table.columns, partial)
            # Check again: another process may have written the target meanwhile.
            _check_target(table, out, overwrite)
            _replace(out, partial, Path(scratch, "before"))
    except OSError as e:
        raise storage.refusal(e, str(out), "The target cannot be written") from None
    if done.without_image:
        log.warning("%d rows of %s have no image, and no file", done.without_image, pinned)
    return done


def conditions(table: ImageTable, pinned: TableVersion, first: Where, second: Where) -> Where:
    """Both conditions on the rows of a version. Raises DataError as `both` does."""
    delta = table.at(pinned)
    table.require(delta, *first, *second)
    return both(first, second, pa.schema(delta.schema().to_arrow()), table.columns.label)


def _check_columns(
    table: ImageTable, pinned: TableVersion, schema: pa.Schema, wanted: list[str], as_file: bool
) -> None:
    for name in wanted:
        if name not in schema.names:
            raise DataError(f"{pinned} has no column {name!r}", fix=nearest(name, schema.names))
    image = table.columns.image
    if not as_file and not fragment.is_bytes(schema.field(image).type):
        raise DataError(
            f"Column {image!r} of {pinned} holds no images",
            fix="Name OUT with .parquet, or a configuration",
        )


def _refuse_columns(columns: Sequence[str] | None) -> None:
    if columns is not None:
        raise DataError(
            "A folder of images has no columns to choose",
            got=", ".join(columns),
            rule="It holds the images, their ids as names, and their labels in labels.csv",
            fix="Name OUT with .parquet, or leave --columns out",
        )


def _require_labels(table: ImageTable, pinned: TableVersion, where: Where) -> None:
    """Raise DataError when no row to export has a label."""
    label = table.columns.label
    labels = scan.rows(table, pinned, [label], where)[label]
    if len(labels) and labels.null_count == len(labels):
        raise DataError(
            f"No row of {pinned} has a label",
            got=label,
            rule="The folders of an export are its labels",
            fix="Name OUT with .parquet, or map table.columns.label",
        )


def _check_target(table: ImageTable, out: Path, overwrite: bool) -> None:
    """Raise DataError unless an export may write to `out`.

    It may when `out` does not exist, is an empty folder, or, with `overwrite`, holds only what an
    earlier export wrote.
    """
    _refuse_table(table, out)
    if not os.path.lexists(out):
        return
    is_folder = out.is_dir() and not out.is_symlink()
    if is_folder and not any(out.iterdir()):
        return

    if not overwrite:
        raise DataError(
            "OUT exists",
            got=str(out),
            rule="An export replaces nothing without --overwrite",
            fix="Pass --overwrite",
        )
    foreign = _foreign(out)
    if foreign:
        raise DataError(
            "The target holds something that no export made",
            got=foreign,
            rule="--overwrite replaces an earlier export and removes nothing else",
            fix="Name another place, or remove it yourself",
        )


def _refuse_table(table: ImageTable, out: Path) -> None:
    """Raise DataError when `out` is the table's folder, lies in it, or contains it."""
    folder = stores.local(table.uri)
    if "://" in folder:
        return
    # The real paths: a link may lead into the table.
    target = Path(os.path.realpath(out))
    source = Path(os.path.realpath(folder))
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise DataError(
            "The target is the table, or lies in it, or around it",
            got=str(out),
            rule="An export never touches a table",
            fix="Name another place",
        )


def _replace(out: Path, partial: Path, before: Path) -> None:
    """Put `partial` in the place of `out`. An old folder is moved to `before` first."""
    if out.is_dir() and not out.is_symlink():
        out.rename(before)  # deleted with the temporary folder
    partial.replace(out)


def _foreign(out: Path) -> str | None:
    """The first path at or below `out` that no export wrote; None when there is none."""
    if out.is_symlink():
        return str(out)
    if out.is_file():
        return None if _is_own_parquet(out) else str(out)

    # Exports of an earlier raypipe have neither: what was changed in them cannot be told.
    try:
        mark = json.loads((out / MARK).read_text(encoding="utf-8"))
        hashes = {str(file): str(sha256) for file, sha256 in dict(mark["sha256"]).items()}
        labels_sha256 = str(mark["labels_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(out)  # no readable mark: nothing here is ours

    # Expected are the listed files and their folders, nothing else.
    folders = set()
    for file in hashes:
        folders |= {str(parent) for parent in PurePosixPath(file).parents}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_dir() and not path.is_symlink():
            own = name in folders
        elif path.is_symlink() or not path.is_file():
            own = False
        elif name == LABELS:
            own = sha256_of(path) == labels_sha256
        else:
            own = name == MARK or hashes.get(name) == sha256_of(path)
        if not own:
            return str(path)
    return None


def _is_own_parquet(path: Path) -> bool:
    """Whether the file is as an export wrote it. Other writers copy our key and not our bytes."""
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata.metadata or {}
            data_end = path.stat().st_size - file.metadata.serialized_size - 8
            return metadata.get(MADE.encode()) == str(data_end).encode()
    except (pa.ArrowException, OSError):
        return False


def _parts(
    table: ImageTable,
    fragments: list[Fragment],
    schema: pa.Schema,
    columns: list[str],
    where: Where,
    distributed: bool,
) -> Iterator[pa.Table]:
    """The rows in order, one table a row group, read here or by Ray tasks."""
    options = table.storage_options
    # Without rows there is nothing to distribute.
    if not fragments or not distributed:
        for group in fragments:
            part, _ = fragment.read([group], schema, columns, where, options)
            yield part
        return

    # Ray Data returns blocks in the order they finish, unless it must keep theirs.
    stream = scan.distributed(fragments, schema, columns, where, options)
    stream.context.execution_options.preserve_order = True
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow")


def _counted(parts: Iterator[pa.Table], total: int, progress: Progress) -> Iterator[pa.Table]:
    """The same parts; calls `progress` for each."""
    done = 0
    for part in parts:
        done += len(part)
        progress(done, total)
        yield part


def _limited(parts: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    """The first `limit` rows; all rows when it is None."""
    if limit is None:
        yield from parts
        return
    left = limit
    for part in parts:
        yield part.slice(0, left)
        left -= min(left, len(part))
        if not left:
            return  # the other parts are not read
