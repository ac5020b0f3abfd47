"""Hugging Face data sets as `save_to_disk` writes them, read with pyarrow alone.

Layout (checked against datasets 5.2): `state.json` lists the Arrow stream files,
`dataset_info.json` names the classes. A DatasetDict is a folder with one such folder a split and
`dataset_dict.json`. One part an Arrow file. Files are memory-mapped: listing reads labels only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.tables.sources.candidate import Candidate, Part, Read, require_here
from raypipe.tables.sources.columns import (
    SourceColumns,
    candidates,
    class_names,
    has_field,
    value,
)
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import json_of, tell_of_split


@dataclass(frozen=True)
class ArrowFile:
    """Reads rows of one Arrow stream file; `at` is (batch, row), in ascending order."""

    file: str
    column: str
    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        number = -1
        try:
            with pa.memory_map(self.file) as source, pa.ipc.open_stream(source) as stream:
                for candidate in candidates:
                    # A stream cannot be sought: batches are read up to the one wanted.
                    wanted, row = candidate.at
                    while number < wanted:
                        batch = stream.read_next_batch()
                        number += 1
                    scalar = batch.column(self.column)[row]
                    yield value(scalar, candidate, self.fence)
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, self.file) from None


def arrow_files(images: Path, columns: SourceColumns, fence: Fence) -> list[Part]:
    """Every Arrow file of a Dataset or a DatasetDict.

    The splits of a DatasetDict are its folders, unless `columns` names a split column. Raises
    DataError.
    """
    dataset_dict = images / "dataset_dict.json"
    if not dataset_dict.is_file():
        return list(_parts(images, columns, None, fence))

    splits = _json(dataset_dict, fence).get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise _no_data_set(images, "dataset_dict.json does not list the splits")

    # Every split is a Dataset in its own folder.
    parts: list[Part] = []
    for split in splits:
        parts += _parts(images / split, columns, split, fence)
    return parts


def _parts(folder: Path, columns: SourceColumns, split: str | None, fence: Fence) -> Iterator[Part]:
    """One part for each Arrow file of a Dataset; `split` is its name in a DatasetDict."""
    names = _file_names(folder, fence)
    features = json.dumps(_json(folder / "dataset_info.json", fence))
    for file_name in names:
        path = folder / file_name
        fence.require(str(path.absolute()), "A data file")
        container = f"{split}/{path.name}" if split else path.name
        try:
            listed = _list_file(path, container, columns, features)
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, path) from None

        # The quarantine has no splits.
        if split and not columns.split:
            listed = [c if c.reason else c._replace(split=split) for c in listed]
        reader = ArrowFile(str(path.absolute()), columns.image, fence)
        yield Part(reader, listed)
    # All files of a data set have the same columns. In a DatasetDict its folders are the splits.
    if names and not split:
        tell_of_split(folder, _columns_of(folder / names[0]), columns.label_and_split)


def _columns_of(path: Path) -> list[str]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        names: list[str] = stream.schema.names
        return names


def _file_names(folder: Path, fence: Fence) -> list[str]:
    """The Arrow files that state.json lists."""
    state = _json(folder / "state.json", fence)
    # With indices, a row's place in the files is not its place in the data set.
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "The data set keeps its rows behind a list of indices",
            got=str(folder),
            fix="flatten_indices(), then save",
        )

    malformed = _no_data_set(folder, "state.json does not list the data files")
    entries = state.get("_data_files")
    # The file is not trusted: each entry is checked.
    if not isinstance(entries, list):
        raise malformed
    names = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise malformed
        names.append(name)
    return names


def _list_file(
    path: Path, container: str, columns: SourceColumns, features: str
) -> list[Candidate]:
    """All rows of an Arrow file as candidates. Raises pyarrow's errors, OSError and DataError."""
    listed: list[Candidate] = []
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        columns.check(path, stream.schema)
        kind = stream.schema.field(columns.label).type if columns.label else None
        classes = class_names(features, columns.label, kind, path.parent)

        for number, batch in enumerate(stream):
            at: list[tuple[int, ...]] = [(number, row) for row in range(len(batch))]
            image_bytes = batch.column(columns.image).nbytes
            listed += candidates(
                columns.rows(batch),
                container,
                columns,
                size=image_bytes // max(1, len(batch)),
                at=at,
                classes=classes,
                paths=_paths(batch, columns),
            )
    return listed


def _paths(batch: pa.RecordBatch, columns: SourceColumns) -> list[str | None] | None:
    """The paths in the image column; None when it has none."""
    images = batch.column(columns.image)
    # An image column is plain binary, or a struct of bytes and path.
    if not has_field(images.type, "path"):
        return None
    paths: list[str | None] = images.field("path").to_pylist()
    return paths


def _json(path: Path, fence: Fence) -> dict[str, Any]:
    fence.require(str(path.absolute()), "The data set")
    try:
        content = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise _no_data_set(path.parent, str(e)) from None
    if not isinstance(content, dict):
        raise _no_data_set(path.parent, f"{path.name} is no JSON object")
    return content


def _no_data_set(folder: Path, why: str) -> DataError:
    return DataError(
        f"This is no data set that save_to_disk wrote: {why}",
        got=str(folder),
        rule="It holds state.json and dataset_info.json",
        fix="Check ingest.from.images",
    )


def _unreadable(error: Exception, path: object) -> DataError:
    return DataError(f"The data set cannot be read: {error}", got=str(path))
