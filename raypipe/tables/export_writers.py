"""What an export writes: one Parquet file, or a folder of images with labels.csv.

Both carry a mark, by which a later export knows what it may replace.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.tables import fragment
from raypipe.tables.table import Columns

MADE = "raypipe.export"  # key in the metadata of a Parquet file
MARK = ".raypipe-export.json"  # in a folder: the list of files that an export wrote
LABELS = "labels.csv"
NAME_BYTES = 200  # file systems allow 255; a number and a suffix are added to the name
SUFFIXES = {
    b"\xff\xd8": "jpg",
    b"\x89P": "png",
    b"RI": "webp",
    b"II": "tif",
    b"MM": "tif",
    b"BM": "bmp",
}


@dataclass(frozen=True)
class Exported:
    """How many rows were written, and how many have no image and so no file in a folder."""

    rows: int
    without_image: int = 0


def to_parquet(parts: Iterator[pa.Table], schema: pa.Schema, out: Path) -> int:
    """Write one Parquet file and return the number of rows."""
    # Encoded images do not compress. A dictionary or statistics would store each image again.
    small = [field.name for field in schema if not fragment.is_bytes(field.type)]
    compression = {name: "ZSTD" if name in small else "NONE" for name in schema.names}

    rows = 0
    with (
        pa.OSFile(str(out), "wb") as target,
        pq.ParquetWriter(
            target,
            schema,
            use_dictionary=small,
            write_statistics=small,
            compression=compression,
        ) as writer,
    ):
        for part in parts:
            writer.write_table(part.cast(schema))
            rows += len(part)
        # The mark by which a later export knows that it may replace this file: where its data end.
        writer.add_key_value_metadata({MADE: str(target.tell())})
    return rows


def to_images(parts: Iterator[pa.Table], columns: Columns, out: Path) -> Exported:
    """Write LABEL/ID.EXT for each row with an image.

    labels.csv has the label of each labelled file; MARK lists all files.
    """
    out.mkdir()
    names = _ImageNames(out)
    hashes: dict[str, str] = {}
    without_image = 0
    with (out / LABELS).open("w", newline="", encoding="utf-8") as opened:
        lines = csv.writer(opened)
        lines.writerow(["file", "label"])
        for part in parts:
            for row in part.to_pylist():
                data = row[columns.image]
                if data is None:
                    without_image += 1
                    continue
                label = row[columns.label]
                file = names.place(data, label, row.get(columns.id), len(hashes))
                (out / file).write_bytes(data)
                hashes[file] = hashlib.sha256(data).hexdigest()
                # A blank would be the label of an image without tags.
                if label is not None:
                    lines.writerow([file, label])

    # The mark by which a later export knows what it may replace.
    mark = {"sha256": hashes, "labels_sha256": sha256_of(out / LABELS)}
    (out / MARK).write_text(json.dumps(mark), encoding="utf-8")
    return Exported(len(hashes), without_image)


class _ImageNames:
    """File names of an export: one folder a label, no name twice.

    Names differ by more than capitals and the code points of accents, because some file systems
    ignore these.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._taken: set[str] = set()
        # By label, with "=" before it and "" for none: two labels never share a folder.
        self._folders: dict[str, str] = {}

    def place(self, data: bytes, label: str | None, image_id: str | None, number: int) -> str:
        """LABEL/ID.EXT of one image; `number` replaces a missing id. Equal names are numbered."""
        folder = self._folder(label)
        stem = f"{number:08d}" if image_id is None else _file_name(image_id)
        suffix = SUFFIXES.get(data[:2], "bin")
        # An id may stand in a table more than once, and may look like a name with a number.
        file, n = f"{folder}/{stem}.{suffix}", 1
        while _same(file) in self._taken:
            n += 1
            file = f"{folder}/{stem}-{n}.{suffix}"
        self._taken.add(_same(file))
        return file

    def _folder(self, label: str | None) -> str:
        """The label's folder; made at its first image."""
        key = "" if label is None else f"={label}"
        if key not in self._folders:
            wanted = "unlabelled" if label is None else _file_name(label)
            self._folders[key] = _unique(wanted, set(self._folders.values()))
            (self._out / self._folders[key]).mkdir()
        return self._folders[key]


def _same(name: str) -> str:
    """Names for which this is equal are one name on some file system."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _file_name(value: object) -> str:
    """A label or id as a file name that stays in its folder and that a file system accepts.

    A name that is too long is cut and ends in a hash, so that two long names stay different.
    """
    # A slash would lead to another folder, as a backslash does for ingest; a null ends a name.
    text = str(value)
    name = re.sub(r"[/\\\0]", "_", text)
    name = name.encode("utf-8", "replace").decode()

    if len(name.encode()) > NAME_BYTES:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
        # Cutting bytes may split the last character: "ignore" drops its rest.
        short = name.encode()[: NAME_BYTES - 9].decode("utf-8", "ignore")
        name = f"{short}-{digest}"

    # Names of dots and blanks lead elsewhere. A dot hides a file from ingest, and _delta_log is a
    # table's. Two names belong to the export itself.
    is_hidden = name.startswith(".") or not name.strip(". ")
    is_taken = name.casefold() in (LABELS, MARK, "_delta_log")
    return f"_{name}" if is_hidden or is_taken else name


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or `name` with a number when it is taken; capitals do not count as a difference."""
    others = {_same(other) for other in taken}
    candidate, n = name, 1
    while _same(candidate) in others:
        n += 1
        candidate = f"{name}-{n}"
    return candidate


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
