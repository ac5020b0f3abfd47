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


@dataclass(frozen=True)
class ArrowFile:
    """Reads (batch, row) pairs of one Arrow stream file, in ascending order."""

    file: str
    column: str

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        at = -1
        with pa.memory_map(self.file) as source, pa.ipc.open_stream(source) as stream:
            for candidate in candidates:
                while at < candidate.at[0]:
                    batch, at = stream.read_next_batch(), at + 1
                yield value(batch.column(self.column)[candidate.at[1]], candidate, Path(self.file).parent)


def saved(images: Path, wanted: Wanted) -> list[Part]:
    """Every Arrow file of a Dataset or a DatasetDict; of the latter the splits are its folders, unless a column says so."""
    if (images / "dataset_dict.json").is_file():
        return [p for split in _json(images / "dataset_dict.json")["splits"] for p in _parts(images / split, wanted, split)]
    return list(_parts(images, wanted, None))


def _parts(folder: Path, wanted: Wanted, split: str | None) -> Iterator[Part]:
    state = _json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "The data set keeps its rows behind a list of indices", got=str(folder), fix="flatten_indices(), then save"
        )
    classes = class_names(json.dumps(_json(folder / "dataset_info.json")), wanted.label)
    for entry in state["_data_files"]:
        path = folder / entry["filename"]
        name = f"{split}/{path.name}" if split else path.name
        found: list[Candidate] = []
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                wanted.check(path, stream.schema)
                for number, batch in enumerate(stream):
                    at: list[tuple[int, ...]] = [(number, row) for row in range(len(batch))]
                    size = batch.column(wanted.image).nbytes // max(1, len(batch))
                    found += candidates(_listed(batch, wanted), name, wanted, size, at, classes)
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"The data set cannot be read: {e}", got=str(path)) from None
        if split and not wanted.split:
            found = [c._replace(split=split) for c in found]
        yield Part(ArrowFile(str(path.absolute()), wanted.image), found)


def _listed(batch: pa.RecordBatch, wanted: Wanted) -> list[dict[str, Any]]:
    rows = batch.select(wanted.small).to_pylist() if wanted.small else [{} for _ in range(len(batch))]
    images = batch.column(wanted.image)
    if pa.types.is_struct(images.type) and images.type.get_field_index("path") >= 0:
        for row, name in zip(rows, images.field("path").to_pylist(), strict=True):
            row["path"] = name
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DataError(
            f"This is no data set that save_to_disk wrote: {e}",
            got=str(path.parent),
            rule="It holds state.json and dataset_info.json",
            fix="Check ingest.from.images",
        ) from None
    return found
