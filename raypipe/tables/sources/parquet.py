"""Parquet files with an image column: one part a row group.

Parquet cannot seek to a row: a call reads its row group from the start, 32 rows at a time, so calls are long and memory is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError
from raypipe.tables.sources.candidate import Candidate, Part, Read, require_here
from raypipe.tables.sources.columns import Wanted, candidates, class_names, value
from raypipe.tables.sources.fence import Fence

ROWS_A_CALL = 1024
ROWS_A_READ = 32


@dataclass(frozen=True)
class RowGroup:
    """Reads rows (`at`) of one row group, in ascending order."""

    file: str
    group: int
    column: str
    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        wanted, start = iter(candidates), 0
        candidate = next(wanted, None)
        try:
            with pq.ParquetFile(self.file, pre_buffer=False, buffer_size=65_536) as file:
                for batch in file.iter_batches(
                    ROWS_A_READ, row_groups=[self.group], columns=[self.column], use_threads=False
                ):
                    while candidate is not None and candidate.at[0] < start + len(batch):
                        yield value(batch.column(0)[candidate.at[0] - start], candidate, self.fence)
                        candidate = next(wanted, None)
                    start += len(batch)
                    if candidate is None:
                        return
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, self.file) from None


def row_groups(images: Path, wanted: Wanted, fence: Fence) -> list[Part]:
    """Every row group of a file, or of all `.parquet` files below a folder."""
    files = sorted(images.rglob("*.parquet")) if images.is_dir() else [images]
    if not files:
        raise DataError(
            "There are no Parquet files",
            got=str(images),
            fix="Set ingest.from.images to a file or its folder",
        )
    if images.is_dir():
        for file in files:
            fence.require(str(file.absolute()), "A Parquet file")
    return [
        part
        for file in files
        for part in _parts(
            file,
            file.relative_to(images).as_posix() if images.is_dir() else file.name,
            wanted,
            fence,
        )
    ]


def _parts(path: Path, name: str, wanted: Wanted, fence: Fence) -> Iterator[Part]:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            wanted.check(path, schema)
            kind = schema.field(wanted.label).type if wanted.label else None
            classes = class_names(
                (schema.metadata or {}).get(b"huggingface"), wanted.label, kind, path
            )
            held = schema.field(wanted.image).type
            named = pa.types.is_struct(held) and held.get_field_index("path") >= 0
            for group in range(file.num_row_groups):
                footer = file.metadata.row_group(group)
                listed = file.read_row_group(
                    group, [*wanted.small, *([f"{wanted.image}.path"] if named else [])]
                )
                rows = wanted.rows(listed) if wanted.small else [{} for _ in range(footer.num_rows)]
                paths = (
                    [(inner or {}).get("path") for inner in listed[wanted.image].to_pylist()]
                    if named
                    else None
                )
                at: list[tuple[int, ...]] = [(row,) for row in range(footer.num_rows)]
                size = footer.total_byte_size // max(1, footer.num_rows)
                found = list(candidates(rows, f"{name}/{group}", wanted, size, at, classes, paths))
                yield Part(
                    RowGroup(str(path.absolute()), group, wanted.image, fence), found, ROWS_A_CALL
                )
    except (pa.ArrowException, OSError) as e:
        raise _unreadable(e, path) from None


def _unreadable(error: Exception, path: object) -> DataError:
    return DataError(f"The file cannot be read as Parquet: {error}", got=str(path))
