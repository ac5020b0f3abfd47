"""Where images come from before they are in a table: one module a kind of source.

A source lists candidates without decoding an image. First it checks all that can be checked without
reading one: the folder exists, the table has that column, the files that it names exist. So a typo
costs a second, not a half-written table. A candidate takes about 300 bytes of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raypipe.errors import DataError
from raypipe.tables.export_writers import LABELS, MARK
from raypipe.tables.sources import (
    delta,
    feedback,
    folder,
    function,
    huggingface,
    labels,
    parquet,
    shards,
)
from raypipe.tables.sources.candidate import Candidate, Part
from raypipe.tables.sources.columns import SourceColumns
from raypipe.tables.sources.config import SourceConfig
from raypipe.tables.sources.fence import fence
from raypipe.tables.sources.summary import understood

__all__ = ["Candidate", "Listed", "Part", "SourceConfig", "candidates", "understood"]


@dataclass(frozen=True)
class Listed:
    """All candidates of a source in a stable order, by container."""

    parts: list[Part]
    lineage: str = ""
    """The table version that they are from; "" when they are from no table."""
    layout: str = ""
    """One line that says how a folder was understood."""
    steady: bool = True
    """A candidate has the same path at the next ingest."""


def candidates(cfg: SourceConfig) -> Listed:
    """Every candidate of a source. Raises DataError when there are no images or no labels."""
    listed = _list(cfg)
    found: list[Candidate] = []
    for part in listed.parts:
        found += part.candidates
    if not found:
        raise DataError(
            "There is nothing to ingest",
            got=f"{cfg.images or cfg.kind} {listed.layout}".strip(),
            rule="A source has at least one image",
        )
    if cfg.labelled:
        _require_labels(cfg, found)
    return listed


def _require_labels(cfg: SourceConfig, found: list[Candidate]) -> None:
    """Raise DataError when no candidate has a label."""
    if any(candidate.label is not None for candidate in found):
        return
    # Labels that are all of another type point to a wrong `task`.
    for candidate in found:
        if candidate.reason == "label":
            raise DataError(
                f"None of {len(found)} labels fits model.task={cfg.label_task}",
                got=candidate.detail,
                rule=(
                    "single_label: one name; multi_label: a list or a|b; "
                    "probability and regression: a number"
                ),
                fix="Set model.task, or mend the labels",
            )
    way_out = "Set ingest.from.labels to a CSV with columns file,label"
    # The other kinds bring their labels themselves.
    if cfg.kind not in ("folder", "paths"):
        way_out = f"Set ingest.from.label_column, which is {cfg.label_column!r}"
    raise DataError(
        "There are no labels",
        got=cfg.labels or cfg.images,
        fix=f"{way_out}, or ingest.from.labelled=false to ingest without",
    )


def _list(cfg: SourceConfig) -> Listed:
    """The candidates of any kind of source."""
    label = cfg.label_column if cfg.labelled else None
    # These kinds do not need `images` to be a file or folder.
    if cfg.kind == "python":
        return _list_function(cfg, label)
    if cfg.kind in ("folder", "paths"):
        return _list_files(cfg)
    if cfg.kind == "delta":
        return _list_delta(cfg)
    if cfg.kind == "feedback":
        return _list_feedback(cfg)

    # A pipe is no file: opening it would wait.
    images = Path(cfg.images).expanduser()
    if not cfg.images or not (images.is_dir() or images.is_file()):
        raise _missing(cfg)
    around = fence(images, cfg.roots, cfg.max_bytes)
    columns = _columns(cfg)
    if cfg.kind == "tar":
        return Listed(shards.shards(images, label, cfg.split_column, cfg.label_task, around))
    if cfg.kind == "parquet":
        return Listed(parquet.row_groups(images, columns, around))
    return Listed(huggingface.arrow_files(images, columns, around))


def _columns(cfg: SourceConfig) -> SourceColumns:
    return SourceColumns(
        image=cfg.image_column,
        label=cfg.label_column if cfg.labelled else None,
        split=cfg.split_column,
        task=cfg.label_task,
    )


def _list_delta(cfg: SourceConfig) -> Listed:
    if not cfg.images:
        raise _missing(cfg)
    parts, pinned, has_paths = delta.row_groups(
        cfg.images,
        cfg.version,
        cfg.where,
        _columns(cfg),
        fence(Path(cfg.images).expanduser(), cfg.roots, cfg.max_bytes),
        cfg.storage_options,
    )
    return Listed(parts, str(pinned), steady=has_paths or cfg.version is not None)


def _list_feedback(cfg: SourceConfig) -> Listed:
    if not cfg.images:
        raise _missing(cfg)
    around = fence(Path(cfg.images).expanduser(), cfg.roots, cfg.max_bytes)
    parts, pinned, said = feedback.row_groups(
        cfg.images, _columns(cfg), around, cfg.storage_options
    )
    return Listed(parts, str(pinned), layout=said)


def _list_function(cfg: SourceConfig, label: str | None) -> Listed:
    """The candidates that a Python function names."""
    columns = [name for name in (cfg.file_column, label, cfg.split_column) if name]
    root, rows = function.rows(cfg.images, columns, cfg.where, label)
    if not root.is_dir():
        raise DataError("The folder of the source's images does not exist", got=str(root))
    around = fence(root.absolute(), cfg.roots, cfg.max_bytes)
    task = cfg.label_task
    named = labels.collect(cfg.images, rows, cfg.file_column, label, cfg.split_column, task, around)
    return Listed(folder.named_files(named, cfg.images, task, around))


def _list_files(cfg: SourceConfig) -> Listed:
    """The candidates of a folder, or of a table of paths."""
    table = Path(cfg.labels).expanduser() if cfg.labels else None
    if cfg.kind == "paths" and table is None:
        raise DataError(
            "No table names the images",
            rule="kind: paths reads them",
            fix="Set ingest.from.labels to the table",
        )
    root = _root(cfg, table)
    around = fence(root, cfg.roots, cfg.max_bytes)

    named = None
    if cfg.kind == "folder" and cfg.labelled and not cfg.labels and (root / MARK).is_file():
        raise DataError(
            "This folder is an export, and its labels are not read",
            got=str(root),
            rule=f"Its labels are in {LABELS}: its folders have names for people, and one is of "
            "images without a label",
            fix=f"Set ingest.from.labels={root / LABELS}",
        )
    if cfg.labels:
        named = labels.read(
            cfg.labels,
            cfg.file_column,
            cfg.label_column if cfg.labelled else None,
            cfg.split_column,
            cfg.label_task,
            around,
            cfg.storage_options,
        )
    if cfg.kind == "paths":
        return Listed(folder.named_files(named or {}, str(cfg.labels), cfg.label_task, around))
    parts, layout = folder.all_files(root, named, cfg.labelled, table, cfg.label_task, around)
    return Listed(parts, layout=layout)


def _root(cfg: SourceConfig, table: Path | None) -> Path:
    """The folder that paths are relative to. Raises DataError when it does not exist."""
    if cfg.images:
        root = Path(cfg.images).expanduser()
    elif table is not None and cfg.kind == "paths":
        root = table.parent
    else:
        raise _missing(cfg)
    if not root.is_dir():
        raise _missing(cfg)
    return root.absolute()  # a worker has another working directory


def _missing(cfg: SourceConfig) -> DataError:
    if cfg.kind in ("folder", "paths") and cfg.images and Path(cfg.images).expanduser().is_file():
        return DataError(
            "This is a file, and no folder of images",
            got=cfg.images,
            fix="Unpack it, or name what it is: ingest.from.kind (tar, parquet)",
        )
    what = "image folder" if cfg.kind in ("folder", "paths") else f"{cfg.kind} source"
    return DataError(f"The {what} does not exist", got=cfg.images, fix="Set ingest.from.images")
