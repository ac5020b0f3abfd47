"""Where images come from before they are a table: one file a kind, each lists candidates cheaply and decodes nothing.

A source checks everything that can be checked without reading an image (is the folder there, has the table that column, does
it name files that exist), so that a typo costs a second and not a half-written table. A candidate takes some 300 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.tables import storage
from raypipe.tables.sources import delta, elpv, folder, huggingface, labels, parquet, shards
from raypipe.tables.sources.candidate import Candidate, Part
from raypipe.tables.sources.columns import Wanted
from raypipe.tables.storage import StorageOptions

__all__ = ["Candidate", "Listed", "Part", "SourceConfig", "candidates"]

Kind = Literal["folder", "elpv", "paths", "tar", "parquet", "huggingface", "delta"]


class SourceConfig(Section):
    """`kind` says what `images` is:

    folder       files, labelled by the table `labels`, else by their first folder (below train/ val/ test/: by their second)
    paths        the folder that the paths in `labels` (CSV, JSONL, Parquet, Delta) start from; left out: where `labels` is
    tar          a WebDataset shard or a folder of them      parquet  a file or a folder of them
    huggingface  what datasets' save_to_disk wrote           delta    a table's uri, with `version`, `where`, `storage_options`
    elpv         nothing: the installed solar cells, of which `type` picks a part; label_column is label or probability
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

    @model_validator(mode="after")
    def _storage(self) -> SourceConfig:
        storage.check(self.images if self.kind == "delta" else self.labels or "", self.storage_options)
        return self


@dataclass(frozen=True)
class Listed:
    """All candidates in a stable order, by container; `lineage` names the table version they are from, if any."""

    parts: list[Part]
    lineage: str = ""


def candidates(cfg: SourceConfig) -> Listed:
    """Every candidate. Raises DataError for what the user can mend."""
    listed = _list(cfg)
    found = [c for part in listed.parts for c in part.candidates]
    if not found:
        raise DataError("There is nothing to ingest", got=cfg.images or cfg.kind, rule="A source has at least one image")
    if cfg.labelled and not any(c.label for c in found):
        raise DataError(
            "There are no labels",
            got=cfg.labels,
            fix="Set ingest.from.labels to a CSV with columns file,label, or ingest.from.labelled=false to ingest without",
        )
    return listed


def _list(cfg: SourceConfig) -> Listed:
    label = cfg.label_column if cfg.labelled else None
    wanted = Wanted(cfg.image_column, label, cfg.split_column)
    if cfg.kind == "elpv":
        return Listed(elpv.cells(cfg.type, label))
    if cfg.kind == "delta":
        _require(bool(cfg.images), cfg)
        parts, pinned = delta.row_groups(cfg.images, cfg.version, cfg.where, wanted, cfg.storage_options)
        return Listed(parts, str(pinned))
    if cfg.kind in ("folder", "paths"):
        return Listed(_files(cfg))
    images = Path(cfg.images).expanduser()
    _require(bool(cfg.images) and images.exists(), cfg)
    if cfg.kind == "tar":
        return Listed(shards.shards(images, label, cfg.split_column))
    return Listed({"parquet": parquet.row_groups, "huggingface": huggingface.saved}[cfg.kind](images, wanted))


def _files(cfg: SourceConfig) -> list[Part]:
    table = Path(cfg.labels).expanduser() if cfg.labels else None
    if cfg.kind == "paths":
        if table is None:
            raise DataError(
                "No table names the images", rule="kind: paths reads them", fix="Set ingest.from.labels to the table"
            )
        root = Path(cfg.images).expanduser() if cfg.images else table.parent
    else:
        root = Path(cfg.images).expanduser()
    _require(bool(cfg.images or cfg.kind == "paths") and root.is_dir(), cfg)
    root = root.absolute()  # a worker has another working directory
    named = None
    if cfg.labels and table:
        # labelled=false does not ask for labels; a folder's table has them all the same, a list of paths need not
        label = cfg.label_column if cfg.labelled or cfg.kind == "folder" else None
        named = labels.read(cfg.labels, cfg.file_column, label, cfg.split_column, root, cfg.storage_options)
    if cfg.kind == "paths":
        return folder.named(root, named or {}, str(cfg.labels))
    return folder.whole(root, named, cfg.labelled, table)


def _require(there: bool, cfg: SourceConfig) -> None:
    if not there:
        what = "image folder" if cfg.kind in ("folder", "paths") else f"{cfg.kind} source"
        raise DataError(f"The {what} does not exist", got=cfg.images, fix="Set ingest.from.images")
