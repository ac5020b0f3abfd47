"""A version of any Delta table -> one Parquet file of the rows a reader sees, or a folder of image files.

Streamed row group by row group, so memory is bounded by one of them. Written beside the target and renamed at the end: what
stands there is whole, or not there.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError, nearest
from raypipe.tables import fragment, scan
from raypipe.tables.fragment import Fragment, Where
from raypipe.tables.table import Columns, ImageTable, TableVersion

SUFFIXES = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"II": "tif", b"MM": "tif", b"BM": "bmp"}
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
    wanted = list(dict.fromkeys(columns or schema.names)) if as_file else [c.image, *{c.id, c.label} & set(schema.names)]
    for name in wanted:
        if name not in schema.names:
            raise DataError(f"{pinned} has no column {name!r}", fix=nearest(name, schema.names))
    if not as_file and not fragment.is_bytes(schema.field(c.image).type):
        raise DataError(f"Column {c.image!r} of {pinned} holds no images", fix="Name OUT with .parquet, or a configuration")
    if out.exists() and not overwrite and not (out.is_dir() and not any(out.iterdir())):
        raise DataError("The target exists", got=str(out), rule="Nothing is overwritten unasked", fix="Pass --overwrite")
    parts = _parts(table, fragments, schema, wanted, where or {}, distributed)
    parts = _limited(_counted(parts, sum(f.rows for f in fragments), progress), limit)
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        shown = fragment.shown(schema, wanted)
        rows = _to_parquet(parts, shown, partial) if as_file else _to_images(parts, c, partial)
        if out.is_dir():
            _remove(out)
        partial.replace(out)
    except OSError as e:
        raise DataError(f"The target cannot be written: {e}", got=str(out)) from None
    finally:
        _remove(partial)
    return rows


def _parts(
    table: ImageTable, fragments: list[Fragment], schema: pa.Schema, columns: list[str], where: Where, distributed: bool
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
    with pq.ParquetWriter(out, schema, use_dictionary=small, write_statistics=small, compression=packed) as writer:
        for part in parts:
            writer.write_table(part.cast(schema))
            rows += len(part)
    return rows


def _to_images(parts: Iterator[pa.Table], columns: Columns, out: Path) -> int:
    """LABEL/ID.EXT for each row with an image, and labels.csv of what went where. An id seen before gets a number."""
    out.mkdir()
    rows = 0
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as listed:
        lines = csv.writer(listed)
        lines.writerow(["file", "label"])
        for part in parts:
            for row in part.to_pylist():
                data, label, name = row[columns.image], row.get(columns.label), row.get(columns.id)
                if data is None:
                    continue
                folder = out / ("unlabelled" if label is None else _file_name(label))
                folder.mkdir(exist_ok=True)
                stem, suffix = f"{rows:08d}" if name is None else _file_name(name), SUFFIXES.get(data[:2], "bin")
                file = folder / f"{stem}.{suffix}"
                if file.exists():
                    file = folder / f"{stem}-{rows:08d}.{suffix}"
                file.write_bytes(data)
                lines.writerow([file.relative_to(out).as_posix(), label])
                rows += 1
    return rows


def _file_name(value: object) -> str:
    """A label or id as the name of a file: it stays in its folder whatever the table says."""
    name = str(value).replace("/", "_").replace("\0", "_")[:100]
    return name if name.strip(".") and name != "labels.csv" else f"_{name}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
