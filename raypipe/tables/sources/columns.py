"""What sources with an image column share: its forms, class names, and how a row becomes a candidate.

The column holds bytes, or a struct {bytes, path} as Hugging Face writes it, whose path stands for a file when its bytes are
null. Small columns are read when listing, images later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.tables.sources.candidate import Candidate, Read, read_file, text
from raypipe.tables.sources.labels import require


@dataclass(frozen=True)
class Wanted:
    """Which columns mean what; None for one that is not wanted."""

    image: str
    label: str | None
    split: str | None

    @property
    def small(self) -> list[str]:
        return list(dict.fromkeys(c for c in (self.label, self.split) if c))

    def check(self, table: object, schema: pa.Schema) -> None:
        """Raise DataError unless every column is there and the image column can hold images."""
        require(table, schema.names, self.image, *self.small)
        held = schema.field(self.image).type
        inner = held.field("bytes").type if pa.types.is_struct(held) and held.get_field_index("bytes") >= 0 else held
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise DataError(
                f"Column {self.image!r} of {table} holds no images",
                got=str(held),
                rule="An image column is binary, or a struct of bytes and path",
                fix="Set ingest.from.image_column; for a column of paths ingest.from.kind=paths",
            )


def candidates(
    rows: list[dict[str, Any]],
    container: str,
    wanted: Wanted,
    size: int,
    at: list[tuple[int, ...]],
    classes: list[str] | None = None,
) -> Iterator[Candidate]:
    """One for each row of small columns, named by its place in the container and, where `path` is among them, by that."""
    for row, place in zip(rows, at, strict=True):
        label, split = (row[c] if c else None for c in (wanted.label, wanted.split))
        if classes and isinstance(label, int):
            label = classes[label] if 0 <= label < len(classes) else None  # Hugging Face writes -1 for none
        name = PurePosixPath(row.get("path") or "").name or "/".join(map(str, place))
        yield Candidate(f"{container}/{name}", text(label), text(split), size, place)


def class_names(info: bytes | str | None, label: str | None) -> list[str] | None:
    """The names of a Hugging Face ClassLabel column, from the features in `dataset_info.json` or in a Parquet footer."""
    features = json.loads(info or "{}")
    features = features.get("info", features).get("features") or {}
    return (features.get(label) or {}).get("names")


def value(scalar: pa.Scalar, candidate: Candidate, folder: Path) -> Read:
    """The bytes of one cell; of a struct without bytes those of the file it names."""
    if pa.types.is_struct(scalar.type):
        inner = scalar["bytes"]
        named = scalar["path"].as_py() if not inner.is_valid and scalar.type.get_field_index("path") >= 0 else None
        if named:
            return read_file(folder, named)
        scalar = inner
    return memoryview(scalar.as_buffer()) if scalar.is_valid else BadImage("empty", f"{candidate.path}: null")
