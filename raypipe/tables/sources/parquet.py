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

ROWS_A_CALL = 1024
ROWS_A_READ = 32


@dataclass(frozen=True)
class RowGroup:
    """Reads rows (`at`) of one row group, in ascending order."""

    file: str
    group: int
    column: str

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        wanted, start = iter(candidates), 0
        candidate = next(wanted, None)
        with pq.ParquetFile(self.file, pre_buffer=False, buffer_size=65_536) as file:
            for batch in file.iter_batches(ROWS_A_READ, row_groups=[self.group], columns=[self.column], use_threads=False):
                while candidate is not None and candidate.at[0] < start + len(batch):
                    yield value(batch.column(0)[candidate.at[0] - start], candidate, Path(self.file).parent)
                    candidate = next(wanted, None)
                start += len(batch)
                if candidate is None:
                    return


def row_groups(images: Path, wanted: Wanted) -> list[Part]:
    """Every row group of a file, or of all `.parquet` files below a folder."""
    files = sorted(images.rglob("*.parquet")) if images.is_dir() else [images]
    if not files:
        raise DataError("There are no Parquet files", got=str(images), fix="Set ingest.from.images to a file or its folder")
    return [
        part
        for file in files
        for part in _parts(file, file.relative_to(images).as_posix() if images.is_dir() else file.name, wanted)
    ]


def _parts(path: Path, name: str, wanted: Wanted) -> Iterator[Part]:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            wanted.check(path, schema)
            classes = class_names((schema.metadata or {}).get(b"huggingface"), wanted.label)
            held = schema.field(wanted.image).type
            named = pa.types.is_struct(held) and held.get_field_index("path") >= 0
            for group in range(file.num_row_groups):
                footer = file.metadata.row_group(group)
                listed = file.read_row_group(group, [*wanted.small, *([f"{wanted.image}.path"] if named else [])])
                rows = listed.select(wanted.small).to_pylist() if wanted.small else [{} for _ in range(footer.num_rows)]
                if named:
                    for row, inner in zip(rows, listed[wanted.image].to_pylist(), strict=True):
                        row["path"] = (inner or {}).get("path")
                at: list[tuple[int, ...]] = [(row,) for row in range(footer.num_rows)]
                size = footer.total_byte_size // max(1, footer.num_rows)
                found = list(candidates(rows, f"{name}/{group}", wanted, size, at, classes))
                yield Part(RowGroup(str(path.absolute()), group, wanted.image), found, ROWS_A_CALL)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"The file cannot be read as Parquet: {e}", got=str(path)) from None
