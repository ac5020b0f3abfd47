"""The section `artifacts` of a configuration."""

from __future__ import annotations

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import Section
from raypipe.tables import storage
from raypipe.tables.storage import StorageOptions


class ArtifactsConfig(Section):
    """Where copies of reports, packages and logs go when a verb has ended."""

    uri: str | None = None
    """A place in an object store (s3://, abfss://, gs://), or a folder. When ingest, clean, train,
    tune, predict, evaluate, serve, drift or retrain ends, it copies its report, the model's package
    and its log to RUN-NAME/VERB-KEY/ there; if it failed, only its log. After Ctrl-C the next of
    these verbs sends the log. null: no copies."""

    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of the store, as those of a table. Credentials among them are never written; they
    may be in the environment instead."""

    @model_validator(mode="after")
    def _place(self) -> Self:
        if self.uri is None:
            return self
        scheme, separator, _ = self.uri.partition("://")
        if not self.uri.strip():
            raise ValueError("uri is empty. Name a folder or an object store, or set it to null")
        if separator and scheme not in (*storage.STORES, "file"):
            raise ValueError(
                f"{scheme}:// is no object store. It is s3, s3a, gs, az, abfs, abfss, or file"
            )
        storage.check(self.uri, self.storage_options)
        return self
