"""Settings of a source: what to ingest, and which columns mean what."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.models.labels import Kind as Task
from raypipe.tables import storage
from raypipe.tables.sources.fence import MAX_BYTES
from raypipe.tables.storage import StorageOptions

SOLAR_CELLS = "raypipe.quickstart.elpv:cells"
Kind = Literal["folder", "paths", "tar", "parquet", "huggingface", "delta", "python", "feedback"]


class SourceConfig(Section):
    """Where images come from. `kind` says what `images` is."""

    kind: Kind = "folder"
    """folder: image files. Labels come from the table `labels`, else from the first folder of each
    path (if that is train, val or test: from the second).
    paths: the folder that the paths in `labels` (CSV, JSONL, Parquet, Delta) are relative to;
    without `images`, the folder of `labels`.
    tar: a WebDataset shard, or a folder of them.
    parquet: a file, or a folder of them.
    huggingface: a folder that datasets' `save_to_disk` wrote.
    delta: the uri of a table; see `version`, `where` and `storage_options`.
    python: `module:function`; the function returns the images' folder and a dict for each
    image: its path, its label and any other columns.
    feedback: the request log of `raypipe serve`; labels are those that users sent to /feedback."""
    images: str = ""
    """A path or uri, as `kind` says."""
    labels: str | None = None
    """The table of labels for the kinds folder and paths. null: the folders' names are the
    labels."""
    file_column: str = "file"
    """Column of `labels`, or of a function's rows, with the path of each image."""
    image_column: str = "image"
    """Column with the images, for parquet, huggingface and delta."""
    label_column: str = "label"
    """Column with the label; for tar, the key in `key.json`."""
    split_column: str | None = None
    """Column with the split: train, val or test. null: the splits of a DatasetDict, or of folders
    named train, val and test; otherwise raypipe draws splits (`ingest.splits`)."""
    version: int | str | None = None
    """For delta: a version number, a tag or a time. null: the newest version."""
    where: dict[str, str | list[str]] = Field(default={})
    """For delta and python: only rows whose columns have these values."""
    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of object_store for a delta or feedback source or a table of labels, as
    table.storage_options."""
    labelled: bool = True
    """false: ingest without labels."""
    task: Task | None = None
    """The type of a label, as in model.task. null: model.task itself."""
    roots: list[str] = Field(default=[])
    """Other folders that paths and links in the data may lead to. Nothing else outside `images` is
    opened."""
    max_bytes: int = Field(default=MAX_BYTES, gt=0, le=2**30)
    """Largest image file that is read, in bytes. The limit protects memory."""

    @model_validator(mode="before")
    @classmethod
    def _no_solar_cells(cls, given: Any) -> Any:
        """Until 0.1 the demonstration's data was a kind of its own."""
        if isinstance(given, dict) and given.get("kind") == "elpv":
            kind = given.get("type", "all")
            part = "" if kind == "all" else f", where: {{type: {kind}}}"
            raise ValueError(
                f"the solar cells are now {{kind: python, images: '{SOLAR_CELLS}'{part}}}"
            )
        return given

    @model_validator(mode="after")
    def _check_where(self) -> SourceConfig:
        """Refuse settings that the kind would ignore: a wrong selection would look right."""
        if self.where and self.kind not in ("delta", "python"):
            raise ValueError(f"where is for delta and python, not for {self.kind}")
        if self.labels is not None and self.kind not in ("folder", "paths"):
            raise ValueError(f"labels is a table for folder and paths; {self.kind} brings its own")
        if self.version is not None and self.kind != "delta":
            raise ValueError(f"version is that of a delta source; {self.kind} has none")
        return self

    @model_validator(mode="after")
    def _check_storage_options(self) -> SourceConfig:
        uri = self.images if self.kind in ("delta", "feedback") else self.labels or ""
        storage.check(uri, self.storage_options)
        return self

    @property
    def label_task(self) -> Task:
        return self.task or "single_label"
