"""The footer of a Parquet file, read once and sent to whoever reads the file.

Kept as the bytes of the file, so that it can be sent to other processes. Parsing it again takes
0.15 ms; reading it again would take two requests to the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from raypipe.tables import pages
from raypipe.tables.casting import position
from raypipe.tables.fragment import Options, new_file
from raypipe.tables.pages import Chunk


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a file says. Arrays with the suffix _G have one entry a row group."""

    data: bytes | None = field(repr=False)
    """A Parquet file of this footer alone: `fragment.open_file` parses it. None: not kept."""
    schema: pa.Schema
    """The columns as the file has them."""
    rows_G: tuple[int, ...]
    bytes_G: tuple[int, ...]
    images_G: tuple[Chunk | None, ...]
    """Where the images lie, if they can be read in place (pages.py)."""


def read_footer(
    uri: str, path: str, schema: pa.Schema, image: str, storage_options: Options
) -> Footer:
    """The footer of a file of a table. `image`: its column of images. Raises DataError."""
    with new_file(uri, path, storage_options) as file:
        footer, stored = file.metadata, file.schema_arrow
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]

    # With column mapping the file has another name for it. Some tables have no images.
    name = ""
    if image in schema.names:
        at = position(stored, schema.field(image))
        name = stored.names[at] if at >= 0 else ""
    copied = pa.BufferOutputStream()
    footer.write_metadata_file(copied)
    return Footer(
        data=copied.getvalue().to_pybytes(),
        schema=stored,
        rows_G=tuple(group.num_rows for group in groups),
        bytes_G=tuple(group.total_byte_size for group in groups),
        images_G=tuple(pages.chunk(footer, number, name) for number in range(len(groups))),
    )
