"""Hugging Face data sets as `save_to_disk` leaves them, read with pyarrow alone: one part an Arrow file.

Layout (checked against datasets 5.2): `state.json` lists the Arrow stream files, `dataset_info.json` names the classes, and a
DatasetDict is a folder of such folders, one a split, with `dataset_dict.json`. The files are mapped: listing reads labels only.
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
from raypipe.tables.sources.columns import Wanted, candidates, class_names, value
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import json_of


@dataclass(frozen=True)
class ArrowFile:
    """Reads (batch, row) pairs of one Arrow stream file, in ascending order."""

    file: str
    column: str
    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        at = -1
        try:
            with pa.memory_map(self.file) as source, pa.ipc.open_stream(source) as stream:
                for candidate in candidates:
                    while at < candidate.at[0]:
                        batch, at = stream.read_next_batch(), at + 1
                    yield value(batch.column(self.column)[candidate.at[1]], candidate, self.fence)
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, self.file) from None


def saved(images: Path, wanted: Wanted, fence: Fence) -> list[Part]:
    """Every Arrow file of a Dataset or a DatasetDict; of the latter the splits are its folders, unless a column says so."""
    if not (images / "dataset_dict.json").is_file():
        return list(_parts(images, wanted, None, fence))
    splits = _json(images / "dataset_dict.json", fence).get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise _no_data_set(images, "dataset_dict.json does not list the splits")
    return [p for split in splits for p in _parts(images / split, wanted, split, fence)]


def _parts(folder: Path, wanted: Wanted, split: str | None, fence: Fence) -> Iterator[Part]:
    state = _json(folder / "state.json", fence)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "The data set keeps its rows behind a list of indices",
            got=str(folder),
            fix="flatten_indices(), then save",
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(
        isinstance(e, dict) and isinstance(e.get("filename"), str) for e in listed
    ):
        raise _no_data_set(folder, "state.json does not list the data files")
    features = json.dumps(_json(folder / "dataset_info.json", fence))
    for entry in listed:
        path = folder / entry["filename"]
        fence.require(str(path.absolute()), "A data file")
        name = f"{split}/{path.name}" if split else path.name
        found: list[Candidate] = []
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                wanted.check(path, stream.schema)
                kind = stream.schema.field(wanted.label).type if wanted.label else None
                classes = class_names(features, wanted.label, kind, folder)
                for number, batch in enumerate(stream):
                    at: list[tuple[int, ...]] = [(number, row) for row in range(len(batch))]
                    size = batch.column(wanted.image).nbytes // max(1, len(batch))
                    found += candidates(
                        wanted.rows(batch), name, wanted, size, at, classes, _paths(batch, wanted)
                    )
        except (pa.ArrowException, OSError) as e:
            raise _unreadable(e, path) from None
        if split and not wanted.split:
            found = [c if c.reason else c._replace(split=split) for c in found]
        yield Part(ArrowFile(str(path.absolute()), wanted.image, fence), found)


def _paths(batch: pa.RecordBatch, wanted: Wanted) -> list[str | None] | None:
    images = batch.column(wanted.image)
    named = pa.types.is_struct(images.type) and images.type.get_field_index("path") >= 0
    return images.field("path").to_pylist() if named else None


def _json(path: Path, fence: Fence) -> dict[str, Any]:
    fence.require(str(path.absolute()), "The data set")
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise _no_data_set(path.parent, str(e)) from None
    if not isinstance(found, dict):
        raise _no_data_set(path.parent, f"{path.name} is no JSON object")
    return found


def _no_data_set(folder: Path, why: str) -> DataError:
    return DataError(
        f"This is no data set that save_to_disk wrote: {why}",
        got=str(folder),
        rule="It holds state.json and dataset_info.json",
        fix="Check ingest.from.images",
    )


def _unreadable(error: Exception, path: object) -> DataError:
    return DataError(f"The data set cannot be read: {error}", got=str(path))
