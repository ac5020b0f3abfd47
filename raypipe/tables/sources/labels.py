"""Tables that name image files: CSV, JSON lines, Parquet or Delta -> {file: (label, split)}, in the table's order."""

from __future__ import annotations

import csv
import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError, nearest
from raypipe.tables import scan
from raypipe.tables.sources.candidate import text
from raypipe.tables.table import ImageTable

Labels = dict[str, tuple[str | None, str | None]]


def read(
    table: str, file: str, label: str | None, split: str | None, root: Path, storage_options: dict[str, str] | None
) -> Labels:
    """Paths relative to `root` with their label and split; columns are given by name, None for one that is not wanted.

    Raises DataError for a file that cannot be read, a column it lacks, and a path with two labels.
    """
    columns = [c for c in (file, label, split) if c]
    labels: Labels = {}
    for row in _rows(table, columns, storage_options):
        name = _relative(str(row.get(file) or ""), root)
        found = text(row.get(label)) if label else None
        if name in labels and labels[name][0] != found:
            raise DataError(f"{table} gives {name} two labels", got=f"{labels[name][0]}, {found}", rule="One label a file")
        labels[name] = found, text(row.get(split)) if split else None
    return labels


def require(table: object, have: list[str], *columns: str | None) -> None:
    for column in columns:
        if column and column not in have:
            raise DataError(f"{table} has no column {column!r}", fix=nearest(column, have))


def _rows(table: str, columns: list[str], storage_options: dict[str, str] | None) -> Iterator[dict[str, Any]]:
    path = Path(table).expanduser()
    if "://" in table or (path / "_delta_log").is_dir():
        opened = ImageTable(table if "://" in table else str(path.absolute()), storage_options=storage_options)
        yield from scan.rows(opened, opened.pin(), columns).to_pylist()
        return
    if not path.exists():
        raise DataError("The labels file does not exist", got=table, fix="Check ingest.from.labels")
    kind = path.suffix.lower()
    try:
        if kind in (".parquet", ".pq"):
            with pq.ParquetFile(path) as file:
                require(table, file.schema_arrow.names, *columns)
                yield from file.read(columns).to_pylist()
        elif kind in (".jsonl", ".ndjson"):
            yield from _json_lines(path, columns)
        else:
            with path.open(newline="", encoding="utf-8-sig") as lines:
                reader = csv.DictReader(lines)
                require(path, list(reader.fieldnames or []), *columns)
                yield from reader
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as e:
        wanted = {".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSON lines", ".ndjson": "JSON lines"}.get(kind, "CSV")
        raise DataError(f"The labels file cannot be read as a UTF-8 {wanted}: {e}", got=table) from None


def _json_lines(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:
                raise DataError(f"Line {number} of {path} is not JSON: {e}") from None
            if not isinstance(row, dict) or columns[0] not in row:
                raise DataError(f"Line {number} of {path} has no {columns[0]!r}", got=line.strip()[:80])
            seen |= row.keys()
            yield row
    require(path, sorted(seen), *columns)  # a label may be missing in some lines, not in all


def _relative(name: str, root: Path) -> str:
    """`name` below `root`, however it was written: ./a.jpg, a\\b.jpg, or with the whole path."""
    name = posixpath.normpath(name.replace("\\", "/")) if name else name
    whole = root.absolute().as_posix() + "/"
    return name.removeprefix(whole)
