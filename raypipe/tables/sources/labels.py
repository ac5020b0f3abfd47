"""Tables that name image files: CSV, JSON lines, Parquet or Delta -> {file: (label, split)}, in the table's order.

The values are as the table holds them; what they mean is for `models.labels` to say. A table that says two things about one
file, or whose rows do not fit their header, is refused: whatever we took, the other may have been meant.
"""

from __future__ import annotations

import csv
import json
import posixpath
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import DataError, nearest
from raypipe.models import labels as meaning
from raypipe.models.labels import Kind
from raypipe.tables import scan
from raypipe.tables.sources import inside
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.values import python
from raypipe.tables.table import Columns, ImageTable

Labels = dict[str, tuple[Any, Any]]
RAW = Columns(
    id="", label="", split=""
)  # a label column of a Delta table as it is, not as the text of a name


def read(
    table: str,
    file: str,
    label: str | None,
    split: str | None,
    task: Kind,
    fence: Fence,
    storage_options: dict[str, str] | None,
) -> Labels:
    """Paths relative to the fence's folder with their label and split; columns are given by name, None for an unwanted one.

    Raises DataError for a file that cannot be read, a column it lacks or has twice, a row that does not fit the header, and
    a path with two labels or two splits.
    """
    columns = [c for c in (file, label, split) if c]
    found: Labels = {}
    for row in _rows(table, columns, fence, storage_options):
        name = _relative(str(row.get(file) or ""), Path(fence.base))
        said = row.get(label) if label else None, row.get(split) if split else None
        if name in found:
            _require_same(table, name, task, found[name], said)
        found[name] = said
    return found


def _require_same(
    table: str, name: str, task: Kind, old: tuple[Any, Any], new: tuple[Any, Any]
) -> None:
    """A file may be named twice, as long as both rows mean the same."""
    mean = (
        (meaning.read(task, old[0]), meaning.name(old[1])),
        (meaning.read(task, new[0]), meaning.name(new[1])),
    )
    for what, i in (("labels", 0), ("splits", 1)):
        if mean[0][i] != mean[1][i]:
            raise DataError(
                f"{table} gives {name} two {what}",
                got=f"{old[i]}, {new[i]}",
                rule=f"One {what[:-1]} a file",
            )


def require(table: object, have: list[str], *columns: str | None) -> None:
    """Raise DataError for a column that is not there, or there twice."""
    for column in columns:
        if column and column not in have:
            raise DataError(f"{table} has no column {column!r}", fix=nearest(column, have))
        if column and have.count(column) > 1:
            raise DataError(
                f"{table} has {have.count(column)} columns {column!r}",
                rule="A name means one column",
                fix="Rename the others",
            )


def _rows(
    table: str, columns: list[str], fence: Fence, storage_options: dict[str, str] | None
) -> Iterator[dict[str, Any]]:
    path = Path(table).expanduser()
    if "://" in table or (path / "_delta_log").is_dir():
        opened = ImageTable(table if "://" in table else str(path.absolute()), RAW, storage_options)
        pinned = opened.pin()
        inside.require(opened, pinned, fence)
        found = scan.rows(opened, pinned, columns)
        yield from _zipped(found, columns)
        return
    if path.absolute().is_relative_to(
        fence.base
    ):  # it came with the images: a link in it may lead anywhere
        fence.require(str(path.absolute()), "The labels file")
    if not path.exists():
        raise DataError("The labels file does not exist", got=table, fix="Check ingest.from.labels")
    kind = path.suffix.lower()
    try:
        if not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
            raise OSError("it is no regular file")
        if kind in (".parquet", ".pq"):
            with pq.ParquetFile(path) as file:
                require(table, file.schema_arrow.names, *columns)
                yield from _zipped(file.read(columns), columns)
        elif kind in (".jsonl", ".ndjson"):
            yield from _json_lines(path, columns)
        else:
            yield from _csv(path, columns)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as e:
        wanted = {
            ".parquet": "Parquet",
            ".pq": "Parquet",
            ".jsonl": "JSON lines",
            ".ndjson": "JSON lines",
        }.get(kind, "CSV")
        raise DataError(
            f"The labels file cannot be read as a UTF-8 {wanted}: {e}", got=table
        ) from None


def _zipped(table: pa.Table, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    held = [python(table[c]) for c in columns]
    return (dict(zip(columns, row, strict=True)) for row in zip(*held, strict=True))


def _csv(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(
            lines, strict=True
        )  # strict: a quote that is never closed would swallow the rest of the file
        header = next(reader, [])
        require(path, header, *columns)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"Line {reader.line_num} of {path} has {len(row)} fields and the header has {len(header)}",
                    got=",".join(row)[:80],
                    rule="Which field is which is not to be guessed",
                    fix="Put quotes around a field with a comma in it",
                )
            if row == header:
                raise DataError(
                    f"Line {reader.line_num} of {path} is the header again",
                    fix="Join tables without their header lines",
                )
            yield dict(zip(header, row, strict=True))


def _json_lines(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json_of(line)
            except ValueError as e:
                raise DataError(f"Line {number} of {path} is not JSON: {e}") from None
            if not isinstance(row, dict) or columns[0] not in row:
                raise DataError(
                    f"Line {number} of {path} has no {columns[0]!r}", got=line.strip()[:80]
                )
            seen |= row.keys()
            yield row
    require(path, sorted(seen), *columns)  # a label may be missing in some lines, not in all


def json_of(text: str | bytes) -> Any:
    """JSON in which no key stands twice. Raises ValueError for what cannot be read, also for a nesting without end."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _relative(name: str, root: Path) -> str:
    """`name` below `root`, however it was written: ./a.jpg, a\\b.jpg, or with the whole path."""
    name = posixpath.normpath(name.replace("\\", "/")) if name else name
    whole = root.absolute().as_posix() + "/"
    return name.removeprefix(whole)
