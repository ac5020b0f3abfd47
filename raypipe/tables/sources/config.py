"""Settings of a source: what to ingest, and which columns mean what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.models.labels import Kind as Task
from raypipe.tables import storage
from raypipe.tables.sources.fence import MAX_BYTES
from raypipe.tables.storage import StorageOptions

Kind = Literal["folder", "elpv", "paths", "tar", "parquet", "huggingface", "delta"]


class SourceConfig(Section):
    """Where images come from. `kind` says what `images` is."""

    kind: Kind = "folder"
    """folder: image files. Labels come from the table `labels`, else from the first folder of each
    path (below train/ val/ test/: from the second).
    paths: the folder that the paths in `labels` (CSV, JSONL, Parquet, Delta) are relative to;
    without `images`, the folder of `labels`.
    tar: a WebDataset shard, or a folder of them.
    parquet: a file, or a folder of them.
    huggingface: a folder that datasets' `save_to_disk` wrote.
    delta: the uri of a table; see `version`, `where` and `storage_options`.
    elpv: the installed solar cell data set; `images` is not used, `type` selects a part."""
    images: str = ""
    """A path or uri, as `kind` says."""
    labels: str | None = None
    """The table of labels for the kinds folder and paths. null: folders are the labels."""
    file_column: str = "file"
    """Column of `labels` with the path of each image."""
    image_column: str = "image"
    """Column with the images, for parquet, huggingface and delta."""
    label_column: str = "label"
    """Column with the label; for tar, the key in `key.json`; for elpv, label or probability."""
    split_column: str | None = None
    """Column with the split: train, val or test. null: the splits of a DatasetDict or of folders
    named train, val and test; other sources have their splits drawn."""
    version: int | str | None = None
    """For delta: a version number, a tag or a time. null: the newest version."""
    where: dict[str, str | list[str]] = Field(default={})
    """For delta: only rows whose columns have these values."""
    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of object_store for a delta source or a table of labels; see tables/storage.py."""
    type: Literal["mono", "poly", "all"] = "all"
    """For elpv: monocrystalline or polycrystalline solar cells, or all."""
    labelled: bool = True
    """false: ingest without labels."""
    task: Task | None = None
    """The type of a label, see models/labels.py. null: model.task."""
    roots: list[str] = Field(default=[])
    """Other folders that paths and links in the data may lead to. Nothing else outside of `images`
    is opened."""
    max_bytes: int = Field(default=MAX_BYTES, gt=0, le=2**30)
    """Largest image file that is read, in bytes. The default keeps one image within memory."""

    @model_validator(mode="after")
    def _check_storage_options(self) -> SourceConfig:
        uri = self.images if self.kind == "delta" else self.labels or ""
        storage.check(uri, self.storage_options)
        return self

    @property
    def label_task(self) -> Task:
        return self.task or "single_label"
