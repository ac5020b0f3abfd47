"""Shared by sources with an image column: its types, class names, and rows -> candidates.

The column holds bytes, or a struct {bytes, path} as Hugging Face writes it. When the bytes of a
struct are null, its path names a file. Small columns are read when listing, images later.
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
from raypipe.tables.sources.candidate import Candidate, Read, with_label
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import json_of, require
from raypipe.tables.values import python

Names = Sequence[str]


@dataclass(frozen=True)
class SourceColumns:
    """The columns of image, label and split; None for one that is not wanted."""

    image: str
    label: str | None
    split: str | None
    task: Kind = "single_label"
    """The type of a label."""

    @property
    def label_and_split(self) -> list[str]:
        """Label and split column, as far as wanted, each once."""
        return list(dict.fromkeys(c for c in (self.label, self.split) if c))

    def check(self, table: object, schema: pa.Schema) -> None:
        """Raise DataError unless each column exists once and the image column can hold images."""
        require(table, schema.names, self.image, *self.label_and_split)
        if self.image in self.label_and_split:
            raise DataError(
                f"Column {self.image!r} of {table} cannot be image and label at once",
                fix="Set ingest.from.label_column, or ingest.from.labelled=false",
            )

        if self.label:
            label_type = schema.field(self.label).type
            self._check_label_type(table, label_type)
        image_type = schema.field(self.image).type
        self._check_image_type(table, image_type)

    def _check_label_type(self, table: object, kind: pa.DataType) -> None:
        # A list of fixed size is a vector like [0, 1, 0], not a list of tags.
        if pa.types.is_fixed_size_list(kind) and not pa.types.is_string(kind.value_type):
            raise DataError(
                f"Column {self.label!r} of {table} holds one number a class",
                got=str(kind),
                rule="A list of tags names those that are set",
                fix="Write the tags' names, or a|b",
            )

    def _check_image_type(self, table: object, kind: pa.DataType) -> None:
        # A struct is judged by its field of bytes.
        inner = kind
        if has_field(kind, "bytes"):
            inner = kind.field("bytes").type
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise DataError(
                f"Column {self.image!r} of {table} holds no images",
                got=str(kind),
                rule="An image column is binary, or a struct of bytes and path",
                fix="Set ingest.from.image_column; for a column of paths ingest.from.kind=paths",
            )

    def rows(self, table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
        """The label and the split of each row, as {column: value}; {} if neither is wanted."""
        names = self.label_and_split
        if not names:
            return [{}] * len(table)
        # Not `to_pylist`, which lengthens a float32: the label 0.1 would be another one.
        columns = [python(table.column(name)) for name in names]
        rows = []
        for values in zip(*columns, strict=True):
            rows.append(dict(zip(names, values, strict=True)))
        return rows


def has_field(kind: pa.DataType, name: str) -> bool:
    """Whether a type is a struct with a field of this name."""
    return bool(pa.types.is_struct(kind)) and kind.get_field_index(name) >= 0


def candidates(
    rows: list[dict[str, Any]],
    container: str,
    columns: SourceColumns,
    size: int,
    at: list[tuple[int, ...]],
    classes: Names | None = None,
    paths: Sequence[str | None] | None = None,
) -> Iterator[Candidate]:
    """One candidate a row; `size` is the bytes of an average image, `at` the place of each row.

    The name is the file name in `paths`, else the place in the container. `classes` are the names
    of numbered classes.
    """
    for i, (row, place) in enumerate(zip(rows, at, strict=True)):
        # A file name where the row has one, else its place.
        stored_path = paths[i] if paths else None
        name = PurePosixPath(stored_path or "").name
        if not name:
            name = "/".join(map(str, place))
        candidate = Candidate(f"{container}/{name}", None, None, size, place)

        label = row[columns.label] if columns.label else None
        split = row[columns.split] if columns.split else None
        # A class number without a name is one bad row, not the end of the listing.
        try:
            label = _class_name(label, classes)
        except LookupError as e:
            yield candidate.refused("label", f"{candidate.path}: {e.args[0]}")
        else:
            yield with_label(candidate, columns.task, label, split)


def class_names(
    info: bytes | str | None, label: str | None, kind: pa.DataType | None, where: object
) -> list[str] | None:
    """The class names of a Hugging Face ClassLabel column, or of a list of them.

    `info` is the JSON of `dataset_info.json` or of a Parquet footer, `kind` the column's type.
    None when the column holds no numbers or has no names. Raises DataError for malformed features.
    """
    # A list of class numbers is judged by its items.
    while kind is not None and _is_list(kind):
        kind = kind.value_type
    if not label or not info or kind is None or not pa.types.is_integer(kind):
        return None  # a text is its own name

    try:
        names = _names_in(json_of(info), label)
    except (ValueError, AttributeError, IndexError, TypeError) as e:
        raise _malformed(where, str(e)) from None
    if names is None:
        return None

    is_list_of_texts = isinstance(names, list) and all(isinstance(n, str) for n in names)
    if not is_list_of_texts or len(set(names)) < len(names):
        raise _malformed(where, f"the names of {label!r} are no list of different names")
    checked: list[str] = names
    return checked


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _names_in(info: Any, label: str) -> Any:
    """`names` of the label's feature, whatever it is; None when there is none."""
    features = info.get("info", info).get("features") or {}
    feature = features.get(label) or {}
    # Sequence(ClassLabel) is {"feature": …}; in older files it is a list of one.
    for _ in range(3):
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
    return feature.get("names")


def value(scalar: pa.Scalar, candidate: Candidate, fence: Fence) -> Read:
    """The bytes of one cell.

    For a struct without bytes, those of the file that it names, when the fence allows it.
    """
    if pa.types.is_struct(scalar.type):
        content = scalar["bytes"]
        # Without bytes, the path names a file of the data set.
        if not content.is_valid and has_field(scalar.type, "path"):
            named = scalar["path"].as_py()
            if named:
                return fence.read(named)
        scalar = content

    if not scalar.is_valid:
        return BadImage("empty", f"{candidate.path}: null")
    return fence.bounded(memoryview(scalar.as_buffer()), candidate.path)


def _class_name(label: Any, classes: Names | None) -> Any:
    """The name of a class number; other labels stay. -1 is Hugging Face's number for no label.

    Raises LookupError for a number without a name.
    """
    if classes is None or label is None:
        return label
    if isinstance(label, list):
        return [_class_name(item, classes) for item in label]
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
