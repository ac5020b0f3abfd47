"""The parts of a table to prepare: what a Ray task reads, codes again and writes as one file.

A part is some neighbouring row groups. The cut depends on the rows alone, so a run that goes on
after a kill, or beside another, means the same rows by the same number.

A row group of the source becomes one of the copy where it has a usual size. So a training reads
both in the same order. Small ones are put together.

An image that does not decode, or does not match its sha256, stays as it is, with its sha256. So
training and prediction treat it as they do in the source, and bit rot is not hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.images.smaller import Copy, Shape, prepared
from raypipe.tables import fragment, storage
from raypipe.tables.between import Rows
from raypipe.tables.fragment import Fragment, Options, is_bytes
from raypipe.tables.prepare.staged import Made, Staged
from raypipe.tables.prepared import ORIGINAL
from raypipe.tables.schema import ROWS_PER_GROUP, SCHEMA
from raypipe.tables.table import Columns

FEWEST_ROWS = 256  # of a file
MOST_ROWS = 8192  # 200 MB of images of 256 px
FILES = 256  # about so many, where a file may have so many rows
SHA256 = "sha256"
# What ingest says about the stored bytes.
FACTS = ("format", "width", "height", "bytes")
LONGEST = 32  # characters of a text in the log's statistics
MISMATCH = "mismatch"


@dataclass(frozen=True)
class Part:
    """number: its place. rows: how many it has."""

    number: int
    fragments: tuple[Fragment, ...]
    rows: int


def cut(rows: Rows) -> list[Part]:
    """All parts, in order. Row groups are never cut."""
    most = min(MOST_ROWS, max(FEWEST_ROWS, sum(rows.counts) // FILES))
    parts: list[Part] = []
    group: list[Fragment] = []
    size = 0
    for one, count in zip(rows.fragments, rows.counts, strict=True):
        if group and size + count > most:
            parts.append(Part(len(parts), tuple(group), size))
            group, size = [], 0
        group.append(one)
        size += count
    if group:
        parts.append(Part(len(parts), tuple(group), size))
    return parts


@dataclass(frozen=True)
class Coding:
    """How a worker reads rows, codes their images, and writes them.

    schema: the source's own types. rows: which rows to read (its fragments are not used).
    """

    schema: pa.Schema
    rows: Rows
    columns: Columns
    shape: Shape
    options: Options
    staged: Staged


def out_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a prepared table: the source's, and two hashes."""
    plain = fragment.output_schema(schema, schema.names)
    # Delta's names differ in more than their case.
    taken = {name.lower() for name in plain.names}
    for name in (SHA256, ORIGINAL):
        if name not in taken:
            plain = plain.append(pa.field(name, pa.string()))
    return plain


def make(part: Part, coding: Coding) -> Made:
    """Prepare one part. Raises DataError where it cannot be read or written."""
    staged = coding.staged
    name = staged.new_name(part.number)
    schema = out_schema(coding.schema)
    image = coding.columns.image
    texts = [column for column in schema.names if column != image]
    seen = _Seen(coding.columns)
    try:
        with staged.files.open_output_stream(name) as file:
            # As schema.writer_properties: images plain, in small row groups.
            writer = pq.ParquetWriter(
                file, schema, compression="NONE", use_dictionary=texts, write_statistics=texts
            )
            with writer:
                for rows in _groups(_coded(part, coding, schema, seen)):
                    seen.add(rows)
                    writer.write_table(rows, row_group_size=len(rows))
            size = file.tell()
        made = seen.made(part.number, name, size)
        staged.note(made)
    except (OSError, pa.ArrowException) as e:
        what = "The prepared table cannot be written"
        raise storage.refusal(e, staged.uri, what, "Check that the folder can be written") from None
    if made.rows != part.rows:
        raise DataError(
            f"A part of the source has {made.rows} rows where its log promised {part.rows}",
            rule="A version never changes, so its files were changed or damaged",
            fix="Restore the source table",
        )
    return made


class _Seen:
    """What was written of a part so far."""

    def __init__(self, columns: Columns) -> None:
        self._bounded = [columns.label, columns.split, columns.source]
        self._low: dict[str, str] = {}
        self._high: dict[str, str] = {}
        self._nulls = Counter[str]()
        self.rows = 0
        self.broken = Counter[str]()
        self.before = self.after = 0  # bytes of images

    def add(self, rows: pa.Table) -> None:
        self.rows += len(rows)
        for name in self._bounded:
            if name not in rows.schema.names or not pa.types.is_string(rows[name].type):
                continue
            self._nulls[name] += rows[name].null_count
            ends = pc.min_max(rows[name]).as_py()
            if ends["min"] is not None:
                self._low[name] = min(self._low.get(name, ends["min"]), ends["min"])
                self._high[name] = max(self._high.get(name, ends["max"]), ends["max"])

    def made(self, number: int, name: str, size: int) -> Made:
        # A long text would be cut, and a cut one is no bound.
        low, high = self._low, self._high
        short = [column for column in high if max(len(low[column]), len(high[column])) <= LONGEST]
        stats = {
            "numRecords": self.rows,
            "minValues": {column: low[column] for column in short},
            "maxValues": {column: high[column] for column in short},
            "nullCount": dict(self._nulls),
        }
        found = (number, name, size, self.rows, json.dumps(stats), dict(self.broken))
        return Made(*found, self.before, self.after)


def _groups(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, with neighbours put together up to ROWS_PER_GROUP rows."""
    waiting: list[pa.Table] = []
    size = 0
    for rows in parts:
        if waiting and size + len(rows) > ROWS_PER_GROUP:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
        waiting.append(rows)
        size += len(rows)
    if waiting:
        yield pa.concat_tables(waiting)


def _coded(part: Part, coding: Coding, schema: pa.Schema, seen: _Seen) -> Iterator[pa.Table]:
    """The part's rows with their new images; at most a row group of the source at a time."""
    for group in part.fragments:
        rows = _read(group, coding)
        # Other engines write row groups of a million rows.
        for start in range(0, len(rows), 2 * ROWS_PER_GROUP):
            some = rows.slice(start, 2 * ROWS_PER_GROUP)
            yield _recoded(some, coding, schema, seen)


def _read(group: Fragment, coding: Coding) -> pa.Table:
    """All columns of the chosen rows of a row group, in their own types."""
    schema, options, chosen = coding.schema, coding.options, coding.rows
    every = schema.names
    if not chosen.where:
        return fragment.read([group], schema, every, {}, options)[0]
    # Conditions compare names as text (scan.with_names), so which rows match is asked apart.
    first = next(iter(chosen.where))
    _, matching_n = fragment.read([group], chosen.schema, [first], chosen.where, options)
    rows, visible_N = fragment.read([group], schema, every, {}, options)
    return rows.filter(pc.is_in(pa.array(visible_N), value_set=pa.array(matching_n)))


def _recoded(rows: pa.Table, coding: Coding, schema: pa.Schema, seen: _Seen) -> pa.Table:
    """The rows as the prepared table holds them."""
    promised: list[str | None] = [None] * len(rows)
    has_hashes = SHA256 in rows.schema.names and _can_hold_hash(rows[SHA256].type)
    if has_hashes:
        promised = [_hex(value) for value in rows[SHA256].to_pylist()]

    images: list[bytes | memoryview | None] = []
    copies: list[Copy | None] = []
    originals: list[str | None] = []
    for image, expected in zip(rows[coding.columns.image], promised, strict=True):
        data = memoryview(image.as_buffer()) if image.is_valid else None
        digest = None if data is None else hashlib.sha256(data).hexdigest()
        copy, reason = _copy(data, digest, expected, coding.shape)
        if reason:
            seen.broken[reason] += 1
        kept = data if copy is None else copy.data
        seen.before += len(data or b"")
        seen.after += len(kept or b"")
        images.append(kept)
        copies.append(copy)
        originals.append(digest)

    new: dict[str, list[object]] = {coding.columns.image: list(images)}
    if has_hashes or SHA256 not in rows.schema.names:
        new[SHA256] = list(_hashes(copies, originals, promised))
    if ORIGINAL not in rows.schema.names:
        new[ORIGINAL] = list(originals)
    if _is_ingested(rows.schema):
        new |= _facts(rows, copies)
    arrays = [_column(rows, field, new) for field in schema]
    return pa.table(arrays, schema=schema)


def _copy(
    data: memoryview | None, digest: str | None, expected: str | None, shape: Shape
) -> tuple[Copy | None, str]:
    """The new image; else None, and why in a word."""
    if data is None:
        return None, "missing"
    if expected and digest != expected:
        return None, MISMATCH
    try:
        return prepared(data, shape), ""
    except BadImage as bad:
        return None, bad.reason


def _hashes(
    copies: list[Copy | None], originals: list[str | None], promised: list[str | None]
) -> Iterator[str | None]:
    """The sha256 of the stored bytes; of a broken image what its row has said before."""
    for copy, original, before in zip(copies, originals, promised, strict=True):
        if copy is None:
            yield before or original
        else:
            yield hashlib.sha256(copy.data).hexdigest()


def _facts(rows: pa.Table, copies: list[Copy | None]) -> dict[str, list[object]]:
    """FACTS of the stored bytes; of a broken image what its row has said before."""
    found: dict[str, list[object]] = {name: rows[name].to_pylist() for name in FACTS}
    for n, copy in enumerate(copies):
        if copy is not None:
            values = (copy.format, copy.width, copy.height, len(copy.data))
            for name, value in zip(FACTS, values, strict=True):
                found[name][n] = value
    return found


def _column(
    rows: pa.Table, field: pa.Field, new: dict[str, list[object]]
) -> pa.Array | pa.ChunkedArray:
    if field.name not in new:
        return rows[field.name]
    values = new[field.name]
    if field.name in (SHA256, ORIGINAL) and is_bytes(field.type):
        values = [bytes.fromhex(value) if isinstance(value, str) else None for value in values]
    return pa.array(values, field.type)


def _is_ingested(schema: pa.Schema) -> bool:
    """Do the columns FACTS say what they say in tables that ingest makes?"""
    needed = ("image_id", "look", "family", *FACTS)
    return all(name in schema.names and schema.field(name) == SCHEMA.field(name) for name in needed)


def _can_hold_hash(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or is_bytes(kind))


def _hex(value: str | bytes | None) -> str | None:
    """A sha256 in lower case; None for what is none."""
    if isinstance(value, bytes):
        return value.hex() if len(value) == 32 else None
    text = (value or "").lower()
    is_hash = len(text) == 64 and not set(text) - set("0123456789abcdef")
    return text if is_hash else None
