"""A version of any Delta table -> one Parquet file of the rows a reader sees, or a folder of image files.

Streamed row group by row group, so memory is bounded by one of them. Written beside the target and renamed at the end: what
stands there is whole, or not there. What an export makes says so (a key in a Parquet file's metadata, a list of files in
a folder), and only that is ever replaced: never a table, never photographs of somebody.
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
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import Columns, ImageTable, TableVersion

MADE = "raypipe.export"  # in the metadata of a Parquet file
MARK = ".raypipe-export.json"  # in a folder: the files that an export put there
NAME_BYTES = 200  # file systems take 255, and a number and a suffix come behind
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
    """Write the version's rows to `out`: a Parquet file when it is named so, else a folder of images and a labels.csv.

    Returns how many were written. `progress` is told the rows read and the physical rows of all planned row groups. With
    `distributed` Ray tasks read (connect first), in the same order. Raises DataError for a table that cannot be read right, a
    column that is not there, and a target that exists.
    """
    fragments, schema = scan.plan(table, pinned, where)
    as_file, c = out.suffix == ".parquet" and not out.is_dir(), table.columns
    wanted = (
        list(dict.fromkeys(columns or schema.names))
        if as_file
        else [c.image, *{c.id, c.label} & set(schema.names)]
    )
    for name in wanted:
        if name not in schema.names:
            raise DataError(f"{pinned} has no column {name!r}", fix=nearest(name, schema.names))
    if not as_file and not fragment.is_bytes(schema.field(c.image).type):
        raise DataError(
            f"Column {c.image!r} of {pinned} holds no images",
            fix="Name OUT with .parquet, or a configuration",
        )
    _replaceable(table, out, overwrite)
    parts = _parts(table, fragments, schema, wanted, where or {}, distributed)
    parts = _limited(_counted(parts, sum(f.rows for f in fragments), progress), limit)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{out.name[:50]}.", suffix=".partial", dir=out.parent
        ) as scratch:
            partial = Path(scratch, out.name)
            shown = fragment.shown(schema, wanted)
            rows = _to_parquet(parts, shown, partial) if as_file else _to_images(parts, c, partial)
            _replaceable(
                table, out, overwrite
            )  # again: somebody may have put something there meanwhile
            if out.is_dir() and not out.is_symlink():
                out.rename(Path(scratch, "before"))  # gone with the scratch folder
            partial.replace(out)
    except OSError as e:
        raise DataError(f"The target cannot be written: {e}", got=str(out)) from None
    return rows


def _replaceable(table: ImageTable, out: Path, overwrite: bool) -> None:
    """Raise DataError unless `out` is free, an empty folder, or with `overwrite` nothing but what an export made."""
    whole, here = Path(os.path.realpath(out)), Path(os.path.realpath(fragment.local(table.uri)))
    if "://" not in fragment.local(table.uri) and (
        whole == here or whole in here.parents or here in whole.parents
    ):
        raise DataError(
            "The target is the table, or lies in it, or around it",
            got=str(out),
            rule="An export never touches a table",
            fix="Name another place",
        )
    if not os.path.lexists(out) or (
        out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    ):
        return
    if not overwrite:
        raise DataError(
            "The target exists",
            got=str(out),
            rule="Nothing is overwritten unasked",
            fix="Pass --overwrite",
        )
    if foreign := _foreign(out):
        raise DataError(
            "The target holds something that no export made",
            got=foreign,
            rule="--overwrite replaces an earlier export and removes nothing else",
            fix="Name another place, or remove it yourself",
        )


def _foreign(out: Path) -> str | None:
    """The first thing in `out` that an export did not make; None when there is none."""
    if out.is_symlink():
        return str(out)
    if out.is_file():
        try:
            with pq.ParquetFile(out) as file:
                made = MADE.encode() in (file.schema_arrow.metadata or {})
        except (pa.ArrowException, OSError):
            made = False
        return None if made else str(out)
    try:
        files = set(json.loads((out / MARK).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(out)
    known = files | {MARK, "labels.csv"}
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    for found in sorted(out.rglob("*")):
        name = found.relative_to(out).as_posix()
        if name not in (folders if found.is_dir() and not found.is_symlink() else known):
            return str(found)
    return None


def _parts(
    table: ImageTable,
    fragments: list[Fragment],
    schema: pa.Schema,
    columns: list[str],
    where: Where,
    distributed: bool,
) -> Iterator[pa.Table]:
    if not fragments or not distributed:
        for f in fragments:
            yield fragment.read([f], schema, columns, where, table.storage_options)[0]
        return
    stream = scan.distributed(fragments, schema, columns, where, table.storage_options)
    stream.context.execution_options.preserve_order = True
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow")


def _counted(parts: Iterator[pa.Table], total: int, progress: Progress) -> Iterator[pa.Table]:
    done = 0
    for part in parts:
        done += len(part)
        progress(done, total)
        yield part


def _limited(parts: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    left = limit
    for part in parts:
        yield part if left is None else part.slice(0, left)
        if left is not None:
            left -= min(left, len(part))
            if not left:
                return


def _to_parquet(parts: Iterator[pa.Table], schema: pa.Schema, out: Path) -> int:
    # Encoded images do not compress, and a dictionary or the statistics of them are the images once more.
    small = [f.name for f in schema if not fragment.is_bytes(f.type)]
    packed = {n: "ZSTD" if n in small else "NONE" for n in schema.names}
    rows = 0
    schema = schema.with_metadata({**(schema.metadata or {}), MADE: "1"})
    with pq.ParquetWriter(
        out, schema, use_dictionary=small, write_statistics=small, compression=packed
    ) as writer:
        for part in parts:
            writer.write_table(part.cast(schema))
            rows += len(part)
    return rows


def _to_images(parts: Iterator[pa.Table], columns: Columns, out: Path) -> int:
    """LABEL/ID.EXT for each row with an image, labels.csv of what went where, and a list of all files, which is MARK."""
    out.mkdir()
    written: list[str] = []
    taken: set[str] = set()
    folders: dict[str, str] = {}  # by label: two labels never share one
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as listed:
        lines = csv.writer(listed)
        lines.writerow(["file", "label"])
        for part in parts:
            for row in part.to_pylist():
                data, label, name = row[columns.image], row.get(columns.label), row.get(columns.id)
                if data is None:
                    continue
                key = "" if label is None else f"={label}"
                if key not in folders:
                    folders[key] = _unique(
                        "unlabelled" if label is None else _file_name(label), set(folders.values())
                    )
                    (out / folders[key]).mkdir()
                stem, suffix = (
                    f"{len(written):08d}" if name is None else _file_name(name),
                    SUFFIXES.get(data[:2], "bin"),
                )
                file = f"{folders[key]}/{stem}.{suffix}"
                if file.casefold() in taken:  # an id seen before gets a number
                    file = f"{folders[key]}/{stem}-{len(written):08d}.{suffix}"
                taken.add(file.casefold())
                (out / file).write_bytes(data)
                lines.writerow([file, label])
                written.append(file)
    (out / MARK).write_text(json.dumps({"files": written}), encoding="utf-8")
    return len(written)


def _file_name(value: object) -> str:
    """A label or id as the name of a file: it stays in its folder whatever the table says, and a file system takes it.

    What had to be cut ends in a hash, so that two long names stay two.
    """
    text = str(value)
    name = re.sub(r"[/\0]", "_", text).encode("utf-8", "replace").decode()
    if len(name.encode()) > NAME_BYTES:
        short = name.encode()[: NAME_BYTES - 9].decode("utf-8", "ignore")
        name = f"{short}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"
    return name if name.strip(". ") and name not in ("labels.csv", MARK) else f"_{name}"


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or with a number: also where a file system tells no capitals apart."""
    low, found, n = {t.casefold() for t in taken}, name, 1
    while found.casefold() in low:
        n += 1
        found = f"{name}-{n}"
    return found
