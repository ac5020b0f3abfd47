"""The columns of the tables that raypipe writes, and how their Parquet files are laid out.

Images are written uncompressed and PLAIN, without dictionary or statistics, in small row groups.
Encoded images do not compress, and a reader holds one row group at a time (139 MB instead of 854 MB
RSS on a 690 MB table).
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import ColumnProperties, WriterProperties

ROWS_PER_GROUP = 128
SCHEMA = pa.schema(
    [
        # sha256 of the bytes as the source had them
        ("image_id", pa.string()),
        ("label", pa.string()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("path", pa.string()),
        ("format", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("bytes", pa.int64()),
        # perceptual hash of the pixels: 256 bits in hex
        ("look", pa.string()),
        # near-duplicate group: the image_id of its first image; all images of a group get one split
        ("family", pa.string()),
        # sha256 of the bytes stored here, which may be smaller than the source's: readers check it
        # for bit rot
        ("sha256", pa.string()),
        ("image", pa.binary()),
    ]
)


def writer_properties(image: str = "image") -> WriterProperties:
    """Parquet settings for every write to a table whose image column is `image`."""
    uncompressed = ColumnProperties(
        dictionary_enabled=False, statistics_enabled="NONE", encoding="PLAIN"
    )
    return WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=ROWS_PER_GROUP,
        column_properties={image: uncompressed},
    )
