"""The images of a row group, read from their Parquet pages into memory of the caller.

One read, no copy, no allocation. Encoded images do not compress, so tables written by raypipe hold
them in Parquet's simplest pages: uncompressed, PLAIN, each value behind its length. This module
walks such pages in place: 2 ms for 5 MB, where pyarrow's reader takes 5 ms beside two decoding
threads, most of it to allocate memory. All else (compression, dictionaries, nulls, pages of version
2) returns None and is left to pyarrow.
Source: https://github.com/apache/parquet-format README.md, Encodings.md, parquet.thrift.

Layout of a column chunk that is read here, repeated for each page:
  header   a Thrift struct (compact protocol): page type, size, number of values, encodings
  levels   only for a nullable column: one RLE run which says that no value is null
  values   for each value its length (4 bytes, little-endian) and its bytes
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow.parquet as pq

# Values of enums in parquet.thrift.
DATA_PAGE = 0
PLAIN = 0
RLE = 3
# Field types of Thrift's compact protocol.
TRUE, FALSE, I32, I64, BINARY, STRUCT = 1, 2, 5, 6, 8, 12
# Header fields by their path of field numbers: (5, 1) is field 1 of the struct in field 5.
PAGE_TYPE = (1,)
PAGE_BYTES = (3,)
VALUES = (5, 1)
VALUE_ENCODING = (5, 2)
LEVEL_ENCODING = (5, 3)
_length = struct.Struct("<i")

Spans = list[tuple[int, int]]  # first byte and end of each value
Header = dict[tuple[int, ...], int]


class Chunk(NamedTuple):
    """Where a file holds the values of one column of one row group."""

    offset: int
    """First byte in the file."""
    size: int
    """Bytes."""
    rows: int
    nullable: bool
    """Each page begins with the levels of its values."""


def chunk(footer: pq.FileMetaData, row_group: int, column: str) -> Chunk | None:
    """The column chunk when its footer promises plain pages; None when pyarrow must read it."""
    group = footer.row_group(row_group)
    for i in range(group.num_columns):
        meta, leaf = group.column(i), footer.schema.column(i)
        if meta.path_in_schema != column:
            continue

        is_plain = (
            meta.compression == "UNCOMPRESSED"
            and not meta.has_dictionary_page
            and leaf.physical_type == "BYTE_ARRAY"
        )
        # A repeated or nested column has levels that say more than "null".
        is_flat = leaf.max_repetition_level == 0 and leaf.max_definition_level <= 1
        if not (is_plain and is_flat):
            return None
        return Chunk(
            offset=meta.data_page_offset,
            size=meta.total_compressed_size,
            rows=group.num_rows,
            nullable=leaf.max_definition_level == 1,
        )
    return None


def spans(data: memoryview, rows: int, nullable: bool) -> Spans | None:
    """Where each value lies in the bytes of a column chunk.

    None when the bytes are anything else than `rows` values in plain pages.
    """
    values: Spans = []
    at = 0
    try:
        while at < len(data):
            at = _read_page(data, at, rows, nullable, values)
    except (KeyError, IndexError, ValueError, struct.error):
        return None
    is_complete = len(values) == rows and at == len(data)
    return values if is_complete else None


def _read_page(data: memoryview, at: int, rows: int, nullable: bool, values: Spans) -> int:
    """Append the values of the page at byte `at`; returns the byte behind it.

    Raises ValueError, KeyError, IndexError or struct.error for a page that is not plain.
    """
    header, at = _header(data, at)
    end = at + header[PAGE_BYTES]
    count = header[VALUES]
    if header[PAGE_TYPE] != DATA_PAGE or header[VALUE_ENCODING] != PLAIN:
        raise ValueError("no plain data page")
    if not 0 < count <= rows - len(values):
        raise ValueError("more values than the row group has rows")

    if nullable:
        if header[LEVEL_ENCODING] != RLE:
            raise ValueError("levels of another encoding")
        at = _skip_levels(data, at, count)

    # A damaged length must not lead out of the page.
    for _ in range(count):
        length = _length.unpack_from(data, at)[0]
        start = at + 4
        at = start + length
        if length < 0 or at > end:
            raise ValueError("a value leaves its page")
        values.append((start, at))
    if at != end:
        raise ValueError("bytes behind the last value")
    return at


def _header(data: memoryview, at: int) -> tuple[Header, int]:
    """The integers of a page header, and the byte behind it.

    Raises ValueError for a field that plain pages do not have.
    """
    fields: Header = {}
    path: list[int] = [0]  # the last field number at each depth
    while path:
        byte = data[at]
        at += 1
        if byte == 0:  # the end of a struct
            path.pop()
            continue

        # The upper four bits are the step from the last field number, the lower four the type.
        step, kind = byte >> 4, byte & 15
        if not step or kind not in (TRUE, FALSE, I32, I64, BINARY, STRUCT):
            raise ValueError("a field that no plain page has")
        path[-1] += step
        if kind == STRUCT:
            path.append(0)
        elif kind not in (TRUE, FALSE):
            value, at = _varint(data, at)
            # Zigzag encoding: 0, 1, 2, 3 mean 0, -1, 1, -2.
            fields[tuple(path)] = (value >> 1) ^ -(value & 1)
            if kind == BINARY:  # a statistic: skip its bytes
                at += value
    return fields, at


def _skip_levels(data: memoryview, at: int, values: int) -> int:
    """The byte behind levels that say, in one run, that no value is null.

    Raises ValueError for any other levels.
    """
    size = _length.unpack_from(data, at)[0]
    end = at + 4 + size
    run, level_at = _varint(data, at + 4)
    is_one_run = run == values << 1 and level_at + 1 == end
    if not is_one_run or data[level_at] != 1:
        raise ValueError("nulls, perhaps")
    return end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned integer of 7 bits a byte, lowest first, and the byte behind it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("no integer is so long")
