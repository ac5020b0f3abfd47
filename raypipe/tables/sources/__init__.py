"""Where images come from before they are a table: one file a kind, each lists candidates cheaply and decodes nothing.

A source checks everything that can be checked without reading an image (is the folder there, has the table that column, does
it name files that exist), so that a typo costs a second and not a half-written table. A candidate takes some 300 bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.models.labels import NUMERIC
from raypipe.models.labels import Kind as Task
from raypipe.tables import storage
from raypipe.tables.sources import delta, elpv, folder, huggingface, labels, parquet, shards
from raypipe.tables.sources.candidate import Candidate, Part
from raypipe.tables.sources.columns import Wanted
from raypipe.tables.sources.fence import MAX_BYTES, Fence, fence
from raypipe.tables.storage import StorageOptions

__all__ = ["Candidate", "Listed", "Part", "SourceConfig", "candidates", "understood"]

Kind = Literal["folder", "elpv", "paths", "tar", "parquet", "huggingface", "delta"]


class SourceConfig(Section):
    """`kind` says what `images` is:

    folder       files, labelled by the table `labels`, else by their first folder (below train/ val/ test/: by their second)
    paths        the folder that the paths in `labels` (CSV, JSONL, Parquet, Delta) start from; left out: where `labels` is
    tar          a WebDataset shard or a folder of them      parquet  a file or a folder of them
    huggingface  what datasets' save_to_disk wrote           delta    a table's uri, with `version`, `where`, `storage_options`
    elpv         nothing: the installed solar cells, of which `type` picks a part; label_column is label or probability

    task: what a label is (models/labels.py); null means model.task. roots: other folders that paths and links in the data may
    lead to; nothing outside of `images` is opened otherwise. max_bytes: of one image file, so that memory holds it.
    """

    kind: Kind = "folder"
    images: str = ""
    labels: str | None = None
    file_column: str = "file"
    image_column: str = "image"
    label_column: str = "label"
    split_column: str | None = None
    version: int | str | None = None
    where: dict[str, str | list[str]] = Field(default={})
    storage_options: StorageOptions = Field(default=None, repr=False)
    type: Literal["mono", "poly", "all"] = "all"
    labelled: bool = True
    task: Task | None = None
    roots: list[str] = Field(default=[])
    max_bytes: int = Field(default=MAX_BYTES, gt=0, le=2**30)

    @model_validator(mode="after")
    def _storage(self) -> SourceConfig:
        storage.check(
            self.images if self.kind == "delta" else self.labels or "", self.storage_options
        )
        return self


@dataclass(frozen=True)
class Listed:
    """All candidates in a stable order, by container; `lineage` names the table version they are from, if any, and `layout`
    says how the source was understood."""

    parts: list[Part]
    lineage: str = ""
    layout: str = ""


def candidates(cfg: SourceConfig) -> Listed:
    """Every candidate. Raises DataError for what the user can mend."""
    listed = _list(cfg)
    found = [c for part in listed.parts for c in part.candidates]
    if not found:
        raise DataError(
            "There is nothing to ingest",
            got=cfg.images or cfg.kind,
            rule="A source has at least one image",
        )
    if cfg.labelled and not any(c.label is not None for c in found):
        refused = [c.detail for c in found if c.reason == "label"]
        if refused:
            raise DataError(
                f"None of {len(found)} labels is one of model.task={_task(cfg)}",
                got=refused[0],
                rule="single_label: one name; multi_label: a list or a|b; probability and regression: a number",
                fix="Set model.task, or mend the labels",
            )
        raise DataError(
            "There are no labels",
            got=cfg.labels,
            fix="Set ingest.from.labels to a CSV with columns file,label, or ingest.from.labelled=false to ingest without",
        )
    return listed


CLASSES_SHOWN = 20


def understood(cfg: SourceConfig, layout: str, parts: list[Part]) -> dict[str, Any]:
    """What the source was taken for: how many images, which labels and splits, what will be quarantined. For people."""
    found = [c for part in parts for c in part.candidates]
    held = [c for c in found if not c.reason]
    facts: dict[str, Any] = {
        "from": f"{cfg.kind} {cfg.images or cfg.labels or ''}".strip(),
        "files": len(found),
    }
    facts |= {"understood as": layout} if layout else {}
    named = [c.label for c in held if c.label is not None]
    if cfg.labelled:
        facts |= {"task": _task(cfg), "labels": _labels(_task(cfg), named)}
    # Files that do not look like images get no label; each stands in the quarantine with its own reason later.
    strays = folder.strays(parts) if cfg.kind == "folder" else Counter[str]()
    without = len(held) - len(named) - (strays.total() if cfg.labels is None else 0)
    facts |= {"without a label": without} if without > 0 else {}
    given = Counter(c.split for c in held if c.split)
    facts["splits"] = dict(sorted(given.items())) if given else "drawn"
    if given and given.total() < len(held) - strays.total():
        facts["splits"] |= {"drawn": len(held) - strays.total() - given.total()}
    if strays:
        facts["not images by name"] = dict(strays.most_common(5))
    for reason, many in Counter(c.reason for c in found if c.reason).items():
        facts[f"refused: {reason}"] = (
            f"{many}, like {next(c.detail for c in found if c.reason == reason)}"
        )
    return facts


def _labels(task: Task, named: list[str]) -> Any:
    if task in NUMERIC and named:
        numbers = [float(n) for n in named]
        return f"{len(numbers)} numbers from {min(numbers):g} to {max(numbers):g}"
    many = Counter(tag for n in named for tag in (n.split("|") if task == "multi_label" else [n]))
    shown = {name[:40] or "(no tag)": count for name, count in many.most_common(CLASSES_SHOWN)}
    return shown | (
        {"others": f"{len(many) - CLASSES_SHOWN} more"} if len(many) > CLASSES_SHOWN else {}
    )


def _task(cfg: SourceConfig) -> Task:
    return cfg.task or "single_label"


def _list(cfg: SourceConfig) -> Listed:
    label = cfg.label_column if cfg.labelled else None
    wanted = Wanted(cfg.image_column, label, cfg.split_column, _task(cfg))
    if cfg.kind == "elpv":
        return Listed(elpv.cells(cfg.type, label, _task(cfg)))
    images = Path(cfg.images).expanduser()
    around = fence(images, cfg.roots, cfg.max_bytes)
    if cfg.kind == "delta":
        _require(bool(cfg.images), cfg)
        parts, pinned = delta.row_groups(
            cfg.images, cfg.version, cfg.where, wanted, around, cfg.storage_options
        )
        return Listed(parts, str(pinned))
    if cfg.kind in ("folder", "paths"):
        return _files(cfg)
    _require(
        bool(cfg.images) and (images.is_dir() or images.is_file()), cfg
    )  # a pipe would be waited for
    if cfg.kind == "tar":
        return Listed(shards.shards(images, label, cfg.split_column, _task(cfg), around))
    return Listed(
        {"parquet": parquet.row_groups, "huggingface": huggingface.saved}[cfg.kind](
            images, wanted, around
        )
    )


def _files(cfg: SourceConfig) -> Listed:
    table = Path(cfg.labels).expanduser() if cfg.labels else None
    if cfg.kind == "paths":
        if table is None:
            raise DataError(
                "No table names the images",
                rule="kind: paths reads them",
                fix="Set ingest.from.labels to the table",
            )
        root = Path(cfg.images).expanduser() if cfg.images else table.parent
    else:
        root = Path(cfg.images).expanduser()
    _require(bool(cfg.images or cfg.kind == "paths") and root.is_dir(), cfg)
    root = root.absolute()  # a worker has another working directory
    around: Fence = fence(root, cfg.roots, cfg.max_bytes)
    named = None
    if cfg.labels and table:
        # labelled=false does not ask for labels; a folder's table has them all the same, a list of paths need not
        label = cfg.label_column if cfg.labelled or cfg.kind == "folder" else None
        columns = cfg.file_column, label, cfg.split_column
        named = labels.read(cfg.labels, *columns, _task(cfg), around, cfg.storage_options)
    if cfg.kind == "paths":
        return Listed(folder.named(named or {}, str(cfg.labels), _task(cfg), around))
    parts, layout = folder.whole(root, named, cfg.labelled, table, _task(cfg), around)
    return Listed(parts, layout=layout)


def _require(there: bool, cfg: SourceConfig) -> None:
    if not there:
        what = "image folder" if cfg.kind in ("folder", "paths") else f"{cfg.kind} source"
        raise DataError(f"The {what} does not exist", got=cfg.images, fix="Set ingest.from.images")
