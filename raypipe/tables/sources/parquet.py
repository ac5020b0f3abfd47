"""Parquet files with an image column as a source: one part a row group.

Parquet cannot seek to a row. A call therefore reads its row group from the start, 32 rows at a
time: few long calls, little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError
from raypipe.tables.sources import inside
from raypipe.tables.sources.candidate import Candidate, Part, Read, require_here
from raypipe.tables.sources.columns import (
    SourceColumns,
    candidates,
    class_names,
    has_field,
    value,
)
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import tell_of_split

ROWS_A_CALL = 1024
ROWS_A_READ = 32
BUFFER_BYTES = 65_536
SUFFIXES = {".parquet", ".pq"}  # as of a table of labels


@dataclass(frozen=True)
class RowGroup:
    """Reads rows (`at`) of one row group, in ascending order."""

    file: str
    group: int
    column: str
    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        remaining = iter(candidates)
        candidate = next(remaining, None)
        start = 0  # number of the batch's first row
        try:
            with pq.ParquetFile(self.file, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
                for batch in file.iter_batches(
                    ROWS_A_READ,
                    row_groups=[self.group],
                    columns=[self.column],
                    use_threads=False,
                ):
                    images, end = batch.column(0), start + len(batch)
                    while candidate is not None and candidate.at[0] < end:
                        yield value(images[candidate.at[0] - start], candidate, self.fence)
                        candidate = next(remaining, None)
                    start = end
                    if candidate is None:
                        return
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, self.file) from None


def row_groups(images: Path, columns: SourceColumns, fence: Fence) -> list[Part]:
    """Every row group of a file, or of all `.parquet` and `.pq` files below a folder.

    Hidden files are left out. Raises DataError, also for the files of a Delta table.
    """
    if not images.is_dir():
        inside.refuse_data_files([images])
        listed = list(_parts(images, images.name, columns, fence))
        tell_of_split(images, _columns_of(images), columns.label_and_split)
        return listed

    # A Delta table without a file has a log.
    inside.refuse_data_files([images / "any"])
    found = sorted(path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES)
    # Spark writes a folder of this name.
    named = [path for path in found if not path.is_dir()]
    files = [file for file in named if not inside.is_hidden(file.relative_to(images))]
    inside.refuse_data_files(files)
    if not files:
        raise DataError(
            "There are no Parquet files",
            got=str(images),
            fix="Set ingest.from.images to a file or its folder",
        )
    # Check every file before the first is read.
    for file in files:
        fence.require(str(file.absolute()), "A Parquet file")
    parts: list[Part] = []
    for file in files:
        name = file.relative_to(images).as_posix()
        parts += _parts(file, name, columns, fence)
    # Said once: the files of one data set have the same columns.
    tell_of_split(images, _columns_of(files[0]), columns.label_and_split)
    return parts


def _columns_of(path: Path) -> list[str]:
    names: list[str] = pq.read_schema(path).names
    return names


def _parts(path: Path, name: str, columns: SourceColumns, fence: Fence) -> Iterator[Part]:
    """One part a row group of a file that is called `name` in paths."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns.check(path, schema)
            kind = schema.field(columns.label).type if columns.label else None
            info = (schema.metadata or {}).get(b"huggingface")
            classes = class_names(info, columns.label, kind, path)

            for group in range(file.num_row_groups):
                listed = _list_group(file, group, f"{name}/{group}", columns, classes)
                reader = RowGroup(str(path.absolute()), group, columns.image, fence)
                yield Part(reader, listed, ROWS_A_CALL)
    except (pa.ArrowException, OSError) as e:
        raise _unreadable(e, path) from None


def _list_group(
    file: pq.ParquetFile,
    group: int,
    container: str,
    columns: SourceColumns,
    classes: list[str] | None,
) -> list[Candidate]:
    """All rows of a row group as candidates; reads labels, splits and paths, never images."""
    footer = file.metadata.row_group(group)
    image_type = file.schema_arrow.field(columns.image).type
    has_paths = has_field(image_type, "path")

    # Of a struct, only the path is read.
    names = list(columns.label_and_split)
    if has_paths:
        names.append(f"{columns.image}.path")
    table = file.read_row_group(group, names)
    paths = None
    if has_paths:
        structs = table[columns.image].to_pylist()
        paths = [(struct or {}).get("path") for struct in structs]

    # Without any column, pyarrow's table has no rows: their number is in the footer.
    rows = columns.rows(table) if columns.label_and_split else [{} for _ in range(footer.num_rows)]
    at: list[tuple[int, ...]] = [(row,) for row in range(footer.num_rows)]
    listed = candidates(
        rows,
        container,
        columns,
        size=footer.total_byte_size // max(1, footer.num_rows),
        at=at,
        classes=classes,
        paths=paths,
    )
    return list(listed)


def _unreadable(error: Exception, path: object) -> DataError:
    return DataError(f"The file cannot be read as Parquet: {error}", got=str(path))
