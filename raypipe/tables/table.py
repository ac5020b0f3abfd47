"""ImageTable: any Delta table with an image column, its versions and its tags.

A version is resolved once and pinned. Training, validation, search, drift check and prediction then
read the same rows, while others append to the table. `tags.py` has the names of versions,
`schema.py` the layout of the files.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError
from pydantic import Field, model_validator

from raypipe import stores
from raypipe.config import Section
from raypipe.errors import DataError, nearest
from raypipe.stores import message_of
from raypipe.tables import history, prepared, protocol, storage, tags
from raypipe.tables.address import UNITY, resolve
from raypipe.tables.provenance import commit_properties, history_row
from raypipe.tables.schema import writer_properties
from raypipe.tables.snapshot import Snapshot, Snapshots
from raypipe.tables.storage import StorageOptions
from raypipe.tables.tags import Tags


class Columns(Section):
    """The names of the columns that raypipe uses; the defaults are what `raypipe ingest` writes."""

    image: str = "image"
    """Column with the bytes of the image files (binary)."""

    label: str = "label"
    """Column with the label: a name, several names, or a number, as `model.task` says."""

    id: str = "image_id"
    """Column that names an image. `raypipe ingest` writes the sha256 of its bytes."""

    split: str = "split"
    """Column with the split: train, val or test."""

    source: str = "source"
    """Column with the name of the ingest that added the row."""


class TableConfig(Section):
    """A Delta table of images: where it is, and which of its rows are read."""

    uri: str
    """Address: a folder, an object store (s3://, abfss://, gs://), or a name of Unity Catalog."""

    version: int | str | None = None
    """A number, a tag, or a time (2026-11-01T12:00:00Z: the newest version then).

    Null: the newest version when the job starts."""

    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the rows to read, chosen by their ids. 1: all rows."""

    where: dict[str, str | list[str]] = Field(default={})
    """Read only rows whose columns have these values: one value, or a list of allowed ones.

    Empty: all rows."""

    columns: Columns = Columns()
    """Names of the columns, for a table that `raypipe ingest` did not write."""

    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of object_store, the library that reads object stores.

    raypipe never writes credentials among them; they may be in the environment instead."""

    @property
    def sample_key(self) -> float | str:
        """What keys hold of `sample`. raypipe 0.1 chose other rows: by their place in a file."""
        return self.sample if self.sample == 1 else f"{self.sample} by id"

    @model_validator(mode="after")
    def _storage(self) -> TableConfig:
        storage.check(self.uri, self.storage_options)
        return self


@dataclass(frozen=True)
class TableVersion:
    """One immutable state of a table: what every result names as its input."""

    uri: str
    version: int
    # Delta's id of the table. A table that was deleted and made again has the same address, starts
    # at version 0 again, and has another id.
    table_id: str = field(default="", compare=False, repr=False)
    # Of a prepared table: the version that its images were made from.
    origin: str = field(default="", compare=False, repr=False)
    # Delta's id of the table of that version.
    origin_id: str = field(default="", compare=False, repr=False)

    @property
    def identity(self) -> str:
        """What keys hold. The address and the number may mean another table tomorrow."""
        return f"{self}#{self.table_id}" if self.table_id else str(self)

    @property
    def uris(self) -> tuple[str, ...]:
        """The address, and of a prepared table that of its source."""
        return (self.uri, self.origin.rpartition("@v")[0]) if self.origin else (self.uri,)

    def __str__(self) -> str:
        return f"{self.uri}@v{self.version}"


@dataclass(frozen=True)
class ImageTable:
    """A readable Delta table with an image column."""

    uri: str
    columns: Columns = field(default_factory=Columns)
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    sample: float = 1.0
    # Shared by copies (dataclasses.replace): a sample of a version is read from the same files.
    _snapshots: Snapshots = field(default_factory=Snapshots, repr=False, compare=False)

    @classmethod
    def open(cls, cfg: TableConfig) -> ImageTable:
        """The table at `cfg.uri`, checked.

        Raises DataError when there is none, when it uses a feature that we would read wrong, or
        when it has no image column.
        """
        table = cls(resolve(cfg.uri), cfg.columns, cfg.storage_options, cfg.sample)
        table._checked(cfg)
        return table

    @classmethod
    def open_pinned(cls, cfg: TableConfig) -> tuple[ImageTable, TableVersion]:
        """`open`, and the version that `cfg` names, with at most two readings of the log.

        Raises DataError as `open` and `pin` do.
        """
        table = cls(resolve(cfg.uri), cfg.columns, cfg.storage_options, cfg.sample)
        newest, pinned = table._checked(cfg)
        return table, pinned or table._pin(cfg.version, newest)

    def _checked(self, cfg: TableConfig) -> tuple[DeltaTable, TableVersion | None]:
        """The newest version, and the one that `cfg` names; None if there is no such version."""
        newest = self.delta()
        protocol.preflight(newest)
        # That version may have other columns than the newest. If it does not exist, the verb that
        # pins it reports that; other verbs do not need it.
        delta, pinned = newest, None
        with suppress(DataError):
            pinned = self._pin(cfg.version, newest)
            delta = self.at(pinned)
        self.require(delta, cfg.columns.image, *cfg.where)
        self._require_binary(delta, cfg.columns.image)
        return newest, pinned

    @staticmethod
    def exists(uri: str, storage_options: dict[str, str] | None = None) -> bool:
        """Is there a Delta table? Raises DataError for an address that cannot hold one."""
        try:
            return DeltaTable.is_deltatable(resolve(uri), storage_options)
        except OSError as e:
            raise storage.refusal(
                e, uri, "No table can be here", "Set table.uri to a folder"
            ) from None

    def delta(self, version: int | None = None) -> DeltaTable:
        """This version of the table (None: the newest), opened by deltalake. Raises DataError when
        that fails.
        """
        try:
            return DeltaTable(self.uri, version=version, storage_options=self.storage_options)
        except TableNotFoundError:
            raise self._not_there(version) from None
        except Exception as e:  # deltalake's errors share no base class
            raise self._not_opened(e, version) from None

    def newest(self) -> TableVersion:
        """The newest version; the files are not listed. Raises DataError."""
        options = self.storage_options
        try:
            delta = DeltaTable(self.uri, storage_options=options, without_files=True)
            return TableVersion(self.uri, delta.version(), str(delta.metadata().id))
        except Exception as e:  # deltalake's errors share no base class
            raise self._not_opened(e, None) from None

    def require(self, delta: DeltaTable, *names: str) -> None:
        """Raise DataError for the first column that the table lacks, with the nearest name that it
        has.
        """
        have = [f.name for f in delta.schema().fields]
        for name in names:
            if name not in have:
                raise DataError(
                    f"{self.uri}@v{delta.version()} has no column {name!r}",
                    rule=nearest(name, have),
                    fix="Name your columns in table.columns (of a batch: watch.batch.columns), or "
                    "ingest the table (ingest.from.kind=delta), which adds image_id and split",
                )

    def pin(self, version: int | str | None = None) -> TableVersion:
        """The version for a number, a tag, a time, or None (the newest). Raises DataError when
        there is none.
        """
        return self._pin(version, None)

    def _pin(self, version: int | str | None, newest: DeltaTable | None) -> TableVersion:
        """`pin`, where the newest version may have been opened a moment ago."""
        number = self._number(version, newest) if isinstance(version, str) else version
        delta = newest
        if delta is None or number not in (None, delta.version()):
            delta = self.delta(number)
        origin = prepared.origin_of(delta)
        table_id = str(delta.metadata().id)
        came_from = (str(origin), origin.table_id) if origin else ("", "")
        pinned = TableVersion(self.uri, delta.version(), table_id, *came_from)
        self._snapshots.keep(pinned.version, pinned.table_id, delta)
        return pinned

    def snapshot(self, pinned: TableVersion) -> Snapshot:
        """A version, opened once: by whoever pinned it with this object, else now."""
        kept = self._snapshots.get(pinned.version, pinned.table_id)
        if kept is None:
            delta = self.delta(pinned.version)
            kept = self._snapshots.keep(pinned.version, pinned.table_id, delta)
        return kept

    def at(self, pinned: TableVersion) -> DeltaTable:
        """A pinned version, to be read. Whoever writes takes `delta`, which nobody else holds."""
        return self.snapshot(pinned).delta

    def tags(self) -> Tags:
        """The tags of the newest version: name -> version."""
        return tags.read(self.delta())

    def tag(self, name: str, version: int | None = None, move: bool = False) -> TableVersion:
        """Name a version (None: the newest). Naming the same version again does nothing, nor does
        naming the newest one if no row has changed since the tagged one: a tag is a commit, too.

        Returns the version that has the tag. Raises DataError for a name that cannot be a tag, and
        for a tag of another version unless `move`.
        """
        tags.check_name(name)
        pinned = self.pin(version)
        kept: list[int] = []

        def new_value(current: Tags) -> str | None:
            tagged = current.get(name)
            if tagged == pinned.version:
                return None
            if tagged is not None and not move:
                if version is None and self._has_same_rows(tagged, pinned.version):
                    kept.append(tagged)
                    return None
                raise DataError(
                    f"Tag {name!r} already names v{tagged} of {self.uri}",
                    got=f"v{pinned.version}",
                    rule="Readers of a tag expect the same version",
                    fix="Pass --move to move it",
                )
            return str(pinned.version)

        tags.change(self.delta, self.uri, name, new_value, f"tag {name}")
        return self.pin(kept[-1]) if kept else pinned

    def untag(self, name: str) -> int:
        """Remove a tag and return its version, which stays. Raises DataError if there is no tag."""
        removed: list[int] = []  # the tag's version at each attempt

        def new_value(current: Tags) -> str | None:
            if name in current:
                removed.append(current[name])
                return tags.REMOVED
            if removed:  # somebody else removed it between two attempts
                return None
            fix = nearest(name, list(current)) if current else "It has no tags"
            raise DataError(f"{self.uri} has no tag {name!r}", fix=fix)

        tags.change(self.delta, self.uri, name, new_value, f"remove tag {name}")
        return removed[-1]

    def commits(self, after: int = -1) -> tuple[DeltaTable, list[dict[str, Any]]]:
        """The newest version, and the log entries after version `after`, newest first."""
        delta = self.delta()
        return delta, history.commits(delta, self.uri, self.storage_options, after)

    def _has_same_rows(self, tagged: int, newest: int) -> bool:
        """Does the log say that no row has changed between these versions?"""
        _, entries = self.commits(after=tagged)
        since = [entry for entry in entries if entry["version"] <= newest]
        # Of a log that was cleaned up, commits are missing.
        return len(since) == newest - tagged and not any(entry["changes"] for entry in since)

    def without_sample(self) -> ImageTable:
        """The same table with all its rows."""
        return replace(self, sample=1.0)

    def history(self) -> list[dict[str, Any]]:
        """One row for each version, newest first.

        Columns: version, timestamp_ms, operation, who, why, from (the version that the rows come
        from), added, removed and relabelled (numbers of rows, None if unknown), changes (did any
        row change), tags.
        """
        delta, entries = self.commits()
        current = tags.read(delta)
        rows = []
        for entry in entries:
            version = entry["version"]
            names = sorted(name for name, tagged in current.items() if tagged == version)
            rows.append(history_row(entry, names))
        return rows

    def _number(self, text: str, newest: DeltaTable | None) -> int:
        """The version for a time, a number in digits, or a tag. Raises DataError without one."""
        time = tags.time_of(text)
        if time is not None:
            return history.at(newest or self.delta(), self.uri, self.storage_options, time)
        if text.isdecimal() and text.isascii():
            return int(text)
        current = tags.read(newest or self.delta())
        if text not in current:
            raise DataError(
                f"{self.uri} has no tag {text!r}",
                fix=nearest(text, list(current)) if current else "It has no tags yet",
            )
        return current[text]

    def _require_binary(self, delta: DeltaTable, name: str) -> None:
        """Raise DataError unless column `name` holds bytes."""
        kind = pa.schema(delta.schema().to_arrow()).field(name).type
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise DataError(
                f"Column {name!r} of {self.uri} holds no images",
                got=str(kind),
                rule="An image column is binary: the bytes of the image files, not paths to them",
                fix="Set columns.image of this table (table.columns.image, or "
                "watch.batch.columns.image of a batch), or let raypipe ingest read the files",
            )

    def _not_there(self, version: int | None) -> DataError:
        """The error for a table, or a version of it, that does not exist."""
        if version is not None and self.exists(self.uri, self.storage_options):
            return DataError(
                f"{self.uri} has no version {version} any more",
                rule="Its log was cleaned up, and files with it",
                fix="raypipe table list shows the versions that are left; "
                "table tag NAME --remove removes a tag",
            )
        return DataError(
            "No Delta table here",
            got=self.uri,
            rule="A table has a _delta_log folder",
            fix="Check table.uri, or run raypipe ingest",
        )

    def _not_opened(self, error: Exception, version: int | None) -> DataError:
        """The error for a table that deltalake cannot open: a feature, the catalog, the store, the
        version.
        """
        unreadable = protocol.named_by_delta(error)
        if unreadable:
            return protocol.refusal(self.uri, unreadable)
        if self.uri.startswith(UNITY):
            return DataError(
                f"Unity Catalog does not give out this table: {message_of(error)}",
                got=self.uri.removeprefix(UNITY),
                rule="The catalog is at DATABRICKS_HOST and takes DATABRICKS_TOKEN, "
                "on the driver and on every worker",
                fix="Set both, and grant EXTERNAL USE SCHEMA; or name a folder with a slash",
            )
        if version is None or stores.cause(error, self.uri):
            return storage.refusal(error, self.uri, "The Delta table cannot be opened")
        return DataError(
            f"{self.uri} has no version {version}: {message_of(error)}",
            fix="raypipe table list shows versions and tags",
        )


def append(
    uri: str,
    rows: pa.Table | pa.RecordBatchReader,
    why: str,
    storage_options: dict[str, str] | None = None,
) -> TableVersion:
    """Append rows in one commit: all of them or none. Creates the table on first use.

    `why` is the reason that the history shows. Raises DataError when the table cannot be written.
    """
    path = resolve(uri)
    configuration = None
    if {"image_id", "image"} <= set(rows.schema.names):
        configuration = {"delta.dataSkippingStatsColumns": "image_id,label,split,source"}
    try:
        write_deltalake(
            path,
            rows,
            mode="append",
            writer_properties=writer_properties(),
            storage_options=storage_options,
            configuration=configuration,
            commit_properties=commit_properties(why),
        )
    # Among deltalake's errors is TableNotFoundError: the table's folder cannot be made.
    except (OSError, DeltaError) as e:
        raise storage.refusal(
            e, path, "The table cannot be written", "Check that the folder can be written"
        ) from e
    written = DeltaTable(path, storage_options=storage_options, without_files=True)
    return TableVersion(path, written.version())
