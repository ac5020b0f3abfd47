"""What sources with an image column share: its forms, class names, and how a row becomes a candidate.

The column holds bytes, or a struct {bytes, path} as Hugging Face writes it, whose path stands for a file when its bytes are
null. Small columns are read when listing, images later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Read, told
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import json_of, require
from raypipe.tables.sources.values import python

Names = Sequence[str]


@dataclass(frozen=True)
class Wanted:
    """Which columns mean what; None for one that is not wanted. `task` says what a label is."""

    image: str
    label: str | None
    split: str | None
    task: Kind = "single_label"

    @property
    def small(self) -> list[str]:
        return list(dict.fromkeys(c for c in (self.label, self.split) if c))

    def check(self, table: object, schema: pa.Schema) -> None:
        """Raise DataError unless every column is there once and the image column can hold images."""
        require(table, schema.names, self.image, *self.small)
        if self.image in self.small:
            raise DataError(
                f"Column {self.image!r} of {table} cannot be image and label at once",
                fix="Set ingest.from.label_column, or ingest.from.labelled=false",
            )
        said = schema.field(self.label).type if self.label else pa.null()
        if pa.types.is_fixed_size_list(said) and not pa.types.is_string(said.value_type):
            raise DataError(
                f"Column {self.label!r} of {table} holds one number a class",
                got=str(said),
                rule="A list of tags names those that are set",
                fix="Write the tags' names, or a|b",
            )
        held = schema.field(self.image).type
        inner = (
            held.field("bytes").type
            if pa.types.is_struct(held) and held.get_field_index("bytes") >= 0
            else held
        )
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise DataError(
                f"Column {self.image!r} of {table} holds no images",
                got=str(held),
                rule="An image column is binary, or a struct of bytes and path",
                fix="Set ingest.from.image_column; for a column of paths ingest.from.kind=paths",
            )

    def rows(self, table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
        """The small columns, as they are."""
        held = [python(table.column(c)) for c in self.small]
        return (
            [dict(zip(self.small, row, strict=True)) for row in zip(*held, strict=True)]
            if held
            else [{}] * len(table)
        )


def candidates(
    rows: list[dict[str, Any]],
    container: str,
    wanted: Wanted,
    size: int,
    at: list[tuple[int, ...]],
    classes: Names | None = None,
    paths: Sequence[str | None] | None = None,
) -> Iterator[Candidate]:
    """One for each row of small columns, named by its place in the container and, where `paths` are given, by those."""
    for i, (row, place) in enumerate(zip(rows, at, strict=True)):
        label, split = (row[c] if c else None for c in (wanted.label, wanted.split))
        name = PurePosixPath((paths[i] if paths else None) or "").name or "/".join(map(str, place))
        candidate = Candidate(f"{container}/{name}", None, None, size, place)
        try:
            yield told(candidate, wanted.task, _named(label, classes), split)
        except LookupError as e:
            yield candidate.refused("label", f"{candidate.path}: {e.args[0]}")


def class_names(
    info: bytes | str | None, label: str | None, held: pa.DataType | None, where: object
) -> list[str] | None:
    """The names of a Hugging Face ClassLabel column (or of a list of them), from the features in `dataset_info.json` or in a
    Parquet footer. None when the column holds no numbers. Raises DataError for features that cannot be read."""
    while held is not None and (
        pa.types.is_list(held) or pa.types.is_large_list(held) or pa.types.is_fixed_size_list(held)
    ):
        held = held.value_type
    if not label or not info or held is None or not pa.types.is_integer(held):
        return None  # text says itself what it is
    try:
        features = json_of(info)
        features = features.get("info", features).get("features") or {}
        feature = features.get(label) or {}
        for _ in range(
            3
        ):  # Sequence(ClassLabel) is {"feature": …}, and in older files a list of one
            feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        names = feature.get("names")
    except (ValueError, AttributeError, IndexError, TypeError) as e:
        raise _malformed(where, str(e)) from None
    if names is None:
        return None
    if (
        not isinstance(names, list)
        or not all(isinstance(n, str) for n in names)
        or len(set(names)) < len(names)
    ):
        raise _malformed(where, f"the names of {label!r} are no list of different names")
    return names


def value(scalar: pa.Scalar, candidate: Candidate, fence: Fence) -> Read:
    """The bytes of one cell; of a struct without bytes those of the file it names, if that lies within the fence."""
    if pa.types.is_struct(scalar.type):
        inner = scalar["bytes"]
        named = (
            scalar["path"].as_py()
            if not inner.is_valid and scalar.type.get_field_index("path") >= 0
            else None
        )
        if named:
            return fence.read(named)
        scalar = inner
    if not scalar.is_valid:
        return BadImage("empty", f"{candidate.path}: null")
    return fence.bounded(memoryview(scalar.as_buffer()), candidate.path)


def _named(label: Any, classes: Names | None) -> Any:
    """Class numbers as names; -1 is what Hugging Face writes for none. Raises LookupError for a number without a name."""
    if classes is None or label is None:
        return label
    if isinstance(label, list):
        return [_named(item, classes) for item in label]
    if label == -1:
        return None
    if not 0 <= label < len(classes):
        raise LookupError(f"class number {label} has no name: there are {len(classes)}")
    return classes[label]


def _malformed(where: object, why: str) -> DataError:
    return DataError(
        f"The Hugging Face features of {where} cannot be read: {why}",
        rule="They name the classes behind the numbers of the label column",
        fix="Save the data set again, or keep the names in the column",
    )
