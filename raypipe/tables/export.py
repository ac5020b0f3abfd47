"""A version of any Delta table -> one Parquet file of its visible rows, or a folder of image files.

Rows are streamed one row group at a time, which bounds the memory. The output is written beside the
target and renamed at the end, so the target is never incomplete. An export marks what it writes: a
key in the metadata of a Parquet file, a list of files in a folder. Only marked files are ever
replaced, so no table and no foreign photograph is lost.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError, nearest
from raypipe.tables import fragment, scan
from raypipe.tables.conditions import Where, both
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import Columns, ImageTable, TableVersion

MADE = "raypipe.export"  # key in the metadata of a Parquet file
MARK = ".raypipe-export.json"  # in a folder: the list of files that an export wrote
LABELS = "labels.csv"
NAME_BYTES = 200  # file systems allow 255; a number and a suffix are added to the name
SUFFIXES = {
    b"\xff\xd8": "jpg",
    b"\x89P": "png",
    b"RI": "webp",
    b"II": "tif",
    b"MM": "tif",
    b"BM": "bmp",
}
Progress = Callable[[int, int], None]


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
) -> int:
    """Write the version's rows to `out` and return how many were written.

    A name that ends in .parquet becomes a Parquet file, any other a folder of images with a
    labels.csv. `progress` is called with the rows read and the physical rows of all planned row
    groups. With `distributed` Ray tasks read (connect first), in the same order. Raises DataError
    for a table that raypipe cannot read right, a missing column, and a target that exists.
    """
    fragments, schema = scan.plan(table, pinned, where)
    # An existing folder stays a folder, whatever its name.
    as_file = out.suffix == ".parquet" and not out.is_dir()
    if as_file:
        wanted = list(dict.fromkeys(columns or schema.names))
    else:
        named = {table.columns.id, table.columns.label} & set(schema.names)
        wanted = [table.columns.image, *named]
    _check_columns(table, pinned, schema, wanted, as_file)
    _check_target(table, out, overwrite)

    # The parts are lazy: nothing is read before they are written.
    parts = _parts(table, fragments, schema, wanted, where or {}, distributed)
    total = sum(group.rows for group in fragments)
    parts = _limited(_counted(parts, total, progress), limit)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name[:50]}."
        with tempfile.TemporaryDirectory(".partial", prefix, out.parent) as scratch:
            partial = Path(scratch, out.name)
            if as_file:
                rows = _to_parquet(parts, fragment.output_schema(schema, wanted), partial)
            else:
                rows = _to_images(parts, table.columns, partial)
            # Check again: another process may have written the target meanwhile.
            _check_target(table, out, overwrite)
            _replace(out, partial, Path(scratch, "before"))
    except OSError as e:
        raise DataError(f"The target cannot be written: {e}", got=str(out)) from None
    return rows


def conditions(table: ImageTable, pinned: TableVersion, first: Where, second: Where) -> Where:
    """Both conditions on the rows of a version. Raises DataError as `both` does."""
    delta = table.delta(pinned.version)
    table.require(delta, *first, *second)
    return both(first, second, pa.schema(delta.schema().to_arrow()))


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
            "The target exists",
            got=str(out),
            rule="Nothing is overwritten unasked",
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
    folder = fragment.local(table.uri)
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

    try:
        mark = json.loads((out / MARK).read_text(encoding="utf-8"))
        files = set(mark["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(out)  # no readable mark: nothing here is ours

    # Expected are the listed files and their folders, nothing else.
    folders = set()
    for file in files:
        folders |= {str(parent) for parent in PurePosixPath(file).parents}
    for path in sorted(out.rglob("*")):
        is_folder = path.is_dir() and not path.is_symlink()
        expected = folders if is_folder else files | {MARK, LABELS}
        if path.relative_to(out).as_posix() not in expected:
            return str(path)
    return None


def _is_own_parquet(path: Path) -> bool:
    try:
        with pq.ParquetFile(path) as file:
            return MADE.encode() in (file.schema_arrow.metadata or {})
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


def _to_parquet(parts: Iterator[pa.Table], schema: pa.Schema, out: Path) -> int:
    """Write one Parquet file and return the number of rows."""
    # Encoded images do not compress. A dictionary or statistics would store each image again.
    small = [field.name for field in schema if not fragment.is_bytes(field.type)]
    compression = {name: "ZSTD" if name in small else "NONE" for name in schema.names}

    # The mark by which a later export knows that it may replace this file.
    metadata = {**(schema.metadata or {}), MADE: "1"}
    schema = schema.with_metadata(metadata)
    rows = 0
    with pq.ParquetWriter(
        out,
        schema,
        use_dictionary=small,
        write_statistics=small,
        compression=compression,
    ) as writer:
        for part in parts:
            writer.write_table(part.cast(schema))
            rows += len(part)
    return rows


def _to_images(parts: Iterator[pa.Table], columns: Columns, out: Path) -> int:
    """Write LABEL/ID.EXT for each row with an image, and return the number of images.

    labels.csv lists the label of each file; MARK lists all files.
    """
    out.mkdir()
    names = _ImageNames(out)
    written: list[str] = []
    with (out / LABELS).open("w", newline="", encoding="utf-8") as opened:
        lines = csv.writer(opened)
        lines.writerow(["file", "label"])
        for part in parts:
            for row in part.to_pylist():
                data = row[columns.image]
                # A row without an image has no file.
                if data is None:
                    continue
                label = row.get(columns.label)
                file = names.place(data, label, row.get(columns.id), len(written))
                (out / file).write_bytes(data)
                lines.writerow([file, label])
                written.append(file)

    # The mark by which a later export knows what it may replace.
    (out / MARK).write_text(json.dumps({"files": written}), encoding="utf-8")
    return len(written)


class _ImageNames:
    """File names of an export: one folder a label, no name twice.

    Names differ by more than capitals, because some file systems ignore them.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._taken: set[str] = set()
        # By label, with "=" before it and "" for none: two labels never share a folder.
        self._folders: dict[str, str] = {}

    def place(self, data: bytes, label: object, image_id: object, number: int) -> str:
        """LABEL/ID.EXT of one image; `number` replaces a missing id and tells equal ids apart."""
        folder = self._folder(label)
        stem = f"{number:08d}" if image_id is None else _file_name(image_id)
        suffix = SUFFIXES.get(data[:2], "bin")
        file = f"{folder}/{stem}.{suffix}"
        # An id may stand in a table more than once.
        if file.casefold() in self._taken:
            file = f"{folder}/{stem}-{number:08d}.{suffix}"
        self._taken.add(file.casefold())
        return file

    def _folder(self, label: object) -> str:
        """The label's folder; made at its first image."""
        key = "" if label is None else f"={label}"
        if key not in self._folders:
            wanted = "unlabelled" if label is None else _file_name(label)
            self._folders[key] = _unique(wanted, set(self._folders.values()))
            (self._out / self._folders[key]).mkdir()
        return self._folders[key]


def _file_name(value: object) -> str:
    """A label or id as a file name that stays in its folder and that a file system accepts.

    A name that is too long is cut and ends in a hash, so that two long names stay different.
    """
    # A slash would lead to another folder; a null ends a name.
    text = str(value)
    name = re.sub(r"[/\0]", "_", text)
    name = name.encode("utf-8", "replace").decode()

    if len(name.encode()) > NAME_BYTES:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
        # Cutting bytes may split the last character: "ignore" drops its rest.
        short = name.encode()[: NAME_BYTES - 9].decode("utf-8", "ignore")
        name = f"{short}-{digest}"

    # Names of dots and blanks lead elsewhere; two names belong to the export itself.
    is_usable = name.strip(". ") and name not in (LABELS, MARK)
    return name if is_usable else f"_{name}"


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or `name` with a number when it is taken; capitals do not count as a difference."""
    lower = {other.casefold() for other in taken}
    candidate, n = name, 1
    while candidate.casefold() in lower:
        n += 1
        candidate = f"{name}-{n}"
    return candidate
