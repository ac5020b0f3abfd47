"""Tables that name image files -> {file: (label, split)}, in the table's order.

The table is CSV, JSON lines, Parquet or Delta. Values stay as the table holds them; `models.labels`
says what they mean. A table that says two things about one file, or whose rows do not fit their
header, is refused: raypipe cannot know which was meant.
"""

from __future__ import annotations

import csv
import json
import logging
import posixpath
import stat
from collections.abc import Iterable, Iterator, Sequence
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
from raypipe.tables.table import Columns, ImageTable
from raypipe.tables.values import python

Labels = dict[str, tuple[Any, Any]]
Row = dict[str, Any]
# Without roles, the columns of a Delta table keep their types; a label would become text.
NO_ROLES = Columns(id="", label="", split="")
# Format of a labels file by its suffix; CSV for all others.
FORMATS = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
}


def read(
    table: str,
    file: str,
    label: str | None,
    split: str | None,
    task: Kind,
    fence: Fence,
    storage_options: dict[str, str] | None,
) -> Labels:
    """Label and split of each path, relative to the fence's folder.

    `file`, `label` and `split` are names of columns; None for one that is not wanted. Raises
    DataError for a file that cannot be read, a column that is missing or repeated, a row that does
    not fit the header, and a path with two labels or two splits.
    """
    columns = [name for name in (file, label, split) if name]
    listed = _rows(table, columns, fence, storage_options)
    return collect(table, listed, file, label, split, task, fence)


def collect(
    table: str,
    rows: Iterable[Row],
    file: str,
    label: str | None,
    split: str | None,
    task: Kind,
    fence: Fence,
) -> Labels:
    """Label and split of each path in `rows`. Raises DataError as `read` does."""
    root = Path(fence.base)
    labels: Labels = {}
    for row in rows:
        name = _relative(str(row.get(file) or ""), root)
        row_label = row.get(label) if label else None
        row_split = row.get(split) if split else None
        given = (row_label, row_split)
        # A file may be named twice, as long as both rows mean the same.
        if name in labels:
            _require_same(table, name, task, labels[name], given)
        labels[name] = given
    return labels


def _require_same(
    table: str, name: str, task: Kind, old: tuple[Any, Any], new: tuple[Any, Any]
) -> None:
    """Raise DataError unless both rows of a file mean the same."""
    # "1" and 1.0 may be one label: the meanings are compared, not the texts.
    if meaning.read(task, old[0]) != meaning.read(task, new[0]):
        raise DataError(
            f"{table} gives {name} two labels",
            got=f"{old[0]}, {new[0]}",
            rule="One label a file",
        )
    if meaning.name(old[1]) != meaning.name(new[1]):
        raise DataError(
            f"{table} gives {name} two splits",
            got=f"{old[1]}, {new[1]}",
            rule="One split a file",
        )


SPLIT = "split"
log = logging.getLogger("raypipe")


def tell_of_split(table: object, have: Sequence[str], read: Sequence[str | None]) -> None:
    """Say so if there is a column of splits that nobody asked for: other splits are drawn.

    Once for a source, however many files it has.
    """
    if SPLIT in have and SPLIT not in read:
        log.warning(
            "%s has a column %r, which is not read: ingest.from.split_column=%s keeps its splits",
            table,
            SPLIT,
            SPLIT,
        )


def require(table: object, have: list[str], *columns: str | None) -> None:
    """Raise DataError for a column that is missing or repeated. None is skipped."""
    for column in columns:
        if not column:
            continue
        if column not in have:
            raise DataError(f"{table} has no column {column!r}", fix=nearest(column, have))
        if have.count(column) > 1:
            raise DataError(
                f"{table} has {have.count(column)} columns {column!r}",
                rule="A name means one column",
                fix="Rename the others",
            )


def _rows(
    table: str, columns: list[str], fence: Fence, storage_options: dict[str, str] | None
) -> Iterator[Row]:
    """The rows of a table of labels, with at least these columns. Raises DataError."""
    path = Path(table).expanduser()
    is_delta = "://" in table or (path / "_delta_log").is_dir()
    if is_delta:
        uri = table if "://" in table else str(path.absolute())
        yield from _delta(ImageTable(uri, NO_ROLES, storage_options), columns, fence)
        return

    # A labels file among the images came with them: a link there may lead anywhere.
    if path.absolute().is_relative_to(fence.base):
        fence.require(str(path.absolute()), "The labels file")
    if not path.exists():
        raise DataError("The labels file does not exist", got=table, fix="Check ingest.from.labels")

    kind = FORMATS.get(path.suffix.lower(), "CSV")
    try:
        # Reading a pipe or a device would wait.
        if not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
            raise OSError("it is no regular file")
        if kind == "Parquet":
            inside.refuse_data_files([path])
            yield from _parquet(path, columns, table)
        elif kind == "JSON lines":
            yield from _json_lines(path, columns)
        else:
            yield from _csv(path, columns)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as e:
        what = f"The labels file cannot be read as a UTF-8 {kind}: {e}"
        raise DataError(what, got=table) from None


def _delta(table: ImageTable, columns: list[str], fence: Fence) -> Iterator[Row]:
    pinned = table.pin()
    inside.require(table, pinned, fence)
    tell_of_split(pinned, table.snapshot(pinned).schema().names, columns)
    return _as_rows(scan.rows(table, pinned, columns), columns)


def _parquet(path: Path, columns: list[str], table: str) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        require(table, file.schema_arrow.names, *columns)
        tell_of_split(table, file.schema_arrow.names, columns)
        yield from _as_rows(file.read(columns), columns)


def _as_rows(table: pa.Table, columns: Sequence[str]) -> Iterator[Row]:
    values = [python(table[name]) for name in columns]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def _csv(path: Path, columns: list[str]) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        # strict: without it, a quote that is never closed swallows the rest of the file.
        reader = csv.reader(lines, strict=True)
        header = next(reader, [])
        for mark, named in ((";", "semicolons"), ("\t", "tabs")):
            if len(header) == 1 and mark in header[0]:
                raise DataError(
                    f"{path} has no column {columns[0]!r}: {named} separate its fields",
                    got=header[0],
                    rule="Commas separate the fields of a CSV",
                    fix="Save it with commas, as JSON lines or as Parquet",
                )
        require(path, header, *columns)
        tell_of_split(path, header, columns)
        for row in reader:
            if not row:  # an empty line
                continue
            _check_fields(path, reader.line_num, row, header)
            yield dict(zip(header, row, strict=True))


def _check_fields(path: Path, line: int, row: list[str], header: list[str]) -> None:
    if len(row) != len(header):
        raise DataError(
            f"Line {line} of {path} has {len(row)} fields and the header has {len(header)}",
            got=",".join(row)[:80],
            rule="Which field is which is not to be guessed",
            fix="Put quotes around a field with a comma in it",
        )
    if row == header:
        raise DataError(
            f"Line {line} of {path} is the header again",
            fix="Join tables without their header lines",
        )


def _json_lines(path: Path, columns: list[str]) -> Iterator[Row]:
    """`columns[0]` names the file and must be in every line, the others in at least one."""
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
                    f"Line {number} of {path} has no {columns[0]!r}",
                    got=line.strip()[:80],
                )
            seen |= row.keys()
            yield row
    # A label may be missing in some lines, not in all.
    require(path, sorted(seen), *columns)
    tell_of_split(path, sorted(seen), columns)


def json_of(text: str | bytes) -> Any:
    """Parsed JSON. Raises ValueError for invalid JSON, a repeated key, and too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeated_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} stands twice")
        values[key] = value
    return values


def _relative(name: str, root: Path) -> str:
    """`name` below `root`, for any way to write it: ./a.jpg, a\\b.jpg, or an absolute path."""
    if not name:
        return name
    # Backslashes come from Windows.
    name = posixpath.normpath(name.replace("\\", "/"))
    folder = root.absolute().as_posix() + "/"
    return name.removeprefix(folder)
