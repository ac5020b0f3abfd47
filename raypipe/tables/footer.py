"""The footer of a Parquet file, read once and sent to whoever reads the file.

Kept as the bytes of the file, so that it can be sent to other processes. Parsing it again takes
0.15 ms; reading it again would take two requests to the store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from raypipe.tables import pages
from raypipe.tables.casting import position
from raypipe.tables.fragment import Options, new_file
from raypipe.tables.pages import Chunk

# Rows and bytes of a row group, then its images: offset, size, whether they may be null. An offset
# of -1: pyarrow must read them.
_GROUP = struct.Struct("<qqqq?")


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a file says.

    Row groups are packed: a table has 900,000 of them and more, and as tuples they took 200 bytes
    each.
    """

    data: bytes | None = field(repr=False)
    """A Parquet file of this footer alone: `fragment.open_file` parses it. None: not kept."""
    schema: pa.Schema
    """The columns as the file has them."""
    packed: bytes = field(repr=False)

    @property
    def rows(self) -> int:
        """Of all row groups."""
        return sum(rows for rows, _, _ in self.groups())

    def groups(self) -> Iterator[tuple[int, int, Chunk | None]]:
        """(rows, bytes, where the images lie) of each row group; None: not to be read in place."""
        for rows, size, image_at, image_size, nullable in _GROUP.iter_unpack(self.packed):
            chunk = Chunk(image_at, image_size, rows, nullable) if image_at >= 0 else None
            yield rows, size, chunk


def packed(groups: Iterable[tuple[int, int, Chunk | None]]) -> bytes:
    """What `Footer.groups` unpacks."""
    found = []
    for rows, size, chunk in groups:
        image = (chunk.offset, chunk.size, chunk.nullable) if chunk else (-1, 0, False)
        found.append(_GROUP.pack(rows, size, *image))
    return b"".join(found)


def read_footer(
    uri: str, path: str, schema: pa.Schema, image: str, storage_options: Options
) -> Footer:
    """The footer of a file of a table. `image`: its column of images. Raises DataError."""
    with new_file(uri, path, storage_options) as file:
        footer, stored = file.metadata, file.schema_arrow
    # With column mapping the file has another name for it. Some tables have no images.
    name = ""
    if image in schema.names:
        at = position(stored, schema.field(image))
        name = stored.names[at] if at >= 0 else ""
    groups = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunk = pages.chunk(footer, number, name)
        groups.append((group.num_rows, group.total_byte_size, chunk))
    copied = pa.BufferOutputStream()
    footer.write_metadata_file(copied)
    return Footer(copied.getvalue().to_pybytes(), stored, packed(groups))
