"""ImageTable: any Delta table with an image column, its versions and its tags.

A version is resolved once and pinned, so that train, validation, search, drift and prediction read the same rows while others
append. Tags are table properties (`raypipe.tag.NAME = version`): they travel with the table and need no second store.

Images are written uncompressed and PLAIN, without dictionary or statistics, in small row groups: encoded images do not
compress, and a reader holds one row group at a time (139 MB instead of 854 MB RSS on a 690 MB table).
"""

from __future__ import annotations

import getpass
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError, nearest
from raypipe.tables import history, protocol, storage
from raypipe.tables.storage import StorageOptions, message_of

ROWS_PER_GROUP = 128
ATTEMPTS = 20  # at one commit, while others write
TAG_SECONDS = 60  # how long a tag waits for its turn: 32 at once take 2 s
TAG_PREFIX = "raypipe.tag."
UNITY = "uc://"  # deltalake asks the catalog for the place and for short-lived credentials, on every worker anew
FROM = "raypipe.from"  # commit property: the version that this commit's rows are from, uri@vN, or @vN of the same table


def writer(image: str = "image") -> WriterProperties:
    """How tables with this image column are written, by whatever writes them."""
    plain = ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE", encoding="PLAIN")
    return WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=ROWS_PER_GROUP,
        column_properties={image: plain},
    )


WRITER = writer()
SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),  # sha256 of the bytes as the source had them
        ("label", pa.string()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("path", pa.string()),
        ("format", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("bytes", pa.int64()),
        ("look", pa.string()),  # 256-bit perceptual hash, hex
        (
            "family",
            pa.string(),
        ),  # image_id of the first near-duplicate seen: what the split is drawn from
        (
            "sha256",
            pa.string(),
        ),  # of the bytes stored here, which may be smaller: what a reader checks for bit rot
        ("image", pa.binary()),
    ]
)


class Columns(Section):
    """Which columns of a table mean what; the defaults are what `raypipe ingest` writes."""

    image: str = "image"
    label: str = "label"
    id: str = "image_id"
    split: str = "split"
    source: str = "source"


class TableConfig(Section):
    """A Delta table of images.

    `version` is a number, a tag, a time (2026-11-01T12:00:00Z: the newest version then), or null for the newest when the job
    starts. `sample` is a share of the rows, always the same ones: for trying things out. `storage_options` are object_store's;
    credentials among them are never written, and may stand in the environment instead (see storage.py).
    """

    uri: str
    version: int | str | None = None
    sample: float = Field(default=1.0, gt=0, le=1)
    where: dict[str, str | list[str]] = Field(default={})
    columns: Columns = Columns()
    storage_options: StorageOptions = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _storage(self) -> TableConfig:
        storage.check(self.uri, self.storage_options)
        return self


@dataclass(frozen=True)
class TableVersion:
    """One immutable state of a table: what every result names as its input."""

    uri: str
    version: int

    def __str__(self) -> str:
        return f"{self.uri}@v{self.version}"


@dataclass(frozen=True)
class ImageTable:
    """A readable Delta table with an image column."""

    uri: str
    columns: Columns = field(default_factory=Columns)
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    sample: float = 1.0

    @classmethod
    def open(cls, cfg: TableConfig) -> ImageTable:
        """Check that the table exists, can be read right, and has an image column. Raises DataError."""
        table = cls(resolve(cfg.uri), cfg.columns, cfg.storage_options, cfg.sample)
        delta = table.delta()
        protocol.preflight(delta)
        if cfg.version is not None:  # its columns may be others than the newest version's
            with suppress(
                DataError
            ):  # a verb that pins it says what is wrong, others need no such version
                delta = table.delta(table.pin(cfg.version).version)
        table.require(delta, cfg.columns.image, *cfg.where)
        held = pa.schema(delta.schema().to_arrow()).field(cfg.columns.image).type
        if not (pa.types.is_binary(held) or pa.types.is_large_binary(held)):
            raise DataError(
                f"Column {cfg.columns.image!r} of {table.uri} holds no images",
                got=str(held),
                rule="An image column is binary: the bytes of the image files, not paths to them",
                fix="Set table.columns.image, or let raypipe ingest read the files",
            )
        return table

    @staticmethod
    def exists(uri: str, storage_options: dict[str, str] | None = None) -> bool:
        try:
            return DeltaTable.is_deltatable(resolve(uri), storage_options)
        except OSError as e:
            raise storage.refusal(
                e, uri, "No table can be here", "Set table.uri to a folder"
            ) from None

    def delta(self, version: int | None = None) -> DeltaTable:
        try:
            return DeltaTable(self.uri, version=version, storage_options=self.storage_options)
        except TableNotFoundError:
            if version is not None and self.exists(self.uri, self.storage_options):
                raise DataError(
                    f"{self.uri} has no version {version} any more",
                    rule="Its log was cleaned up, and files with it",
                    fix="raypipe table list shows the versions that are left; table tag NAME --remove takes a tag away",
                ) from None
            raise DataError(
                "No Delta table here",
                got=self.uri,
                rule="A table has a _delta_log folder",
                fix="Check table.uri, or run raypipe ingest",
            ) from None
        except Exception as e:
            if unreadable := protocol.named_by_delta(e):
                raise protocol.refusal(self.uri, unreadable) from None
            if self.uri.startswith(UNITY):
                raise DataError(
                    f"Unity Catalog does not give out this table: {message_of(e)}",
                    got=self.uri.removeprefix(UNITY),
                    rule="The catalog is asked at DATABRICKS_HOST with DATABRICKS_TOKEN, on the driver and on every worker",
                    fix="Set both, and grant EXTERNAL USE SCHEMA; or name a folder with a slash",
                ) from None
            if version is None or storage.cause(e, self.uri):
                raise storage.refusal(e, self.uri, "The Delta table cannot be opened") from e
            raise DataError(
                f"{self.uri} has no version {version}: {message_of(e)}",
                fix="raypipe table list shows versions and tags",
            ) from None

    def require(self, delta: DeltaTable, *names: str) -> None:
        """Raise DataError for the first column the table lacks, naming the nearest it has."""
        have = [f.name for f in delta.schema().fields]
        for name in names:
            if name not in have:
                raise DataError(
                    f"{self.uri}@v{delta.version()} has no column {name!r}",
                    fix=f"{nearest(name, have)} Set table.columns to map names",
                )

    def pin(self, version: int | str | None = None) -> TableVersion:
        """The version meant by a number, a tag, a time, or None (newest). Raises DataError when there is none."""
        if isinstance(version, str) and (moment := _moment(version)) is not None:
            version = history.at(self.delta(), self.uri, self.storage_options, moment)
        elif isinstance(version, str) and not version.isdigit():
            tags = self.tags()
            if version not in tags:
                raise DataError(
                    f"{self.uri} has no tag {version!r}",
                    fix=nearest(version, list(tags)) if tags else "It has no tags yet",
                )
            version = tags[version]
        return TableVersion(
            self.uri, self.delta(None if version is None else int(version)).version()
        )

    def tags(self) -> dict[str, int]:
        return _tags(self.delta())

    def tag(self, name: str, version: int | None = None, move: bool = False) -> TableVersion:
        """Name a version. Naming the same one again does nothing; moving a tag must be asked for."""
        odd = name != name.strip() or not name.isprintable()
        if not name or odd or name.isdigit() or _moment(name) is not None:
            raise DataError(
                "This cannot be a tag",
                got=name,
                rule="A tag has no blanks around it and no control characters"
                if odd
                else "A number means a version, a date a time",
                fix="Take a word, like golden",
            )
        pinned = self.pin(version)

        def change(tags: dict[str, int]) -> str | None:
            at = tags.get(name)
            if at is not None and at != pinned.version and not move:
                raise DataError(
                    f"Tag {name!r} already names v{at} of {self.uri}",
                    got=f"v{pinned.version}",
                    rule="Tags are promises to whoever reads them",
                    fix="Pass --move to move it",
                )
            return None if at == pinned.version else str(pinned.version)

        self._set_tag(name, change, f"tag {name}")
        return pinned

    def untag(self, name: str) -> int:
        """Remove a tag; the version that it named stays. Returns that version. Raises DataError when there is no such tag."""
        named: list[int] = []

        def change(tags: dict[str, int]) -> str | None:
            if name not in tags and not named:
                fix = nearest(name, list(tags)) if tags else "It has no tags"
                raise DataError(f"{self.uri} has no tag {name!r}", fix=fix)
            named.extend(tags[n] for n in (name,) if n in tags)
            return "" if name in tags else None

        self._set_tag(name, change, f"remove tag {name}")
        return named[-1]

    def _set_tag(self, name: str, change: Callable[[dict[str, int]], str | None], why: str) -> None:
        """Write what `change` says of the tags as they are now (None: nothing), again until nobody came in between."""
        give_up = time.monotonic() + TAG_SECONDS
        while True:
            delta = self.delta()
            value = change(_tags(delta))
            if value is None:
                return
            try:
                _set_property(delta, TAG_PREFIX + name, value, told(why))
                return
            except Exception as e:  # deltalake's errors share no base
                if (
                    not isinstance(e, CommitFailedError)
                    or self.delta().version() == delta.version()
                ):
                    raise storage.refusal(e, self.uri, f"Tag {name!r} cannot be written") from None
                if time.monotonic() > give_up:
                    raise DataError(
                        f"Others keep writing to {self.uri}",
                        got=f"{TAG_SECONDS} s",
                        fix="Run again when they are done",
                    ) from None
                time.sleep(
                    random.uniform(0, 0.05)
                )  # racers that lost together shall not race again together

    def commits(self, after: int = -1) -> tuple[DeltaTable, list[dict[str, Any]]]:
        """The newest version and what the log says of each commit after version `after`, newest first; see history.py."""
        delta = self.delta()
        return delta, history.commits(delta, self.uri, self.storage_options, after)

    def history(self) -> list[dict[str, Any]]:
        """One row a version, newest first: version, when (ms), operation, who, why, from what, rows added and removed, tags."""
        delta, entries = self.commits()
        tags = _tags(delta)
        rows = []
        for entry in entries:
            metrics = entry.get("operationMetrics") or {}
            rows.append(
                {
                    "version": entry["version"],
                    "timestamp_ms": entry["timestamp"],
                    "operation": entry["operation"],
                    "who": entry.get("raypipe.by")
                    or entry.get("userName")
                    or entry.get("engineInfo", ""),
                    "why": entry.get("raypipe", ""),
                    "from": entry.get(FROM, ""),
                    "added": _number(metrics, "num_added_rows", "numOutputRows"),
                    "removed": _number(
                        {**metrics, **entry},
                        "raypipe.removed",
                        "num_deleted_rows",
                        "numDeletedRows",
                    ),
                    "relabelled": _number(entry, "raypipe.relabelled"),
                    "changes": entry["changes"],
                    "tags": sorted(
                        name for name, version in tags.items() if version == entry["version"]
                    ),
                }
            )
        return rows


def _tags(delta: DeltaTable) -> dict[str, int]:
    named = dict(delta.metadata().configuration)
    for column in delta.schema().fields:
        named |= column.metadata
    found = {
        k.removeprefix(TAG_PREFIX): str(v)
        for k, v in named.items()
        if k.startswith(TAG_PREFIX) and v is not None
    }
    return {
        name: int(version) for name, version in found.items() if version.isdigit()
    }  # a removed tag is an empty one


def _set_property(delta: DeltaTable, key: str, value: str, why: CommitProperties) -> None:
    """A property that travels with the table, in one commit directly after this version."""
    why = CommitProperties(custom_metadata=why.custom_metadata, max_commit_retries=0)
    if delta.protocol().reader_features:
        # deltalake 1.6 adds `variantType` to the protocol of such a table with any property it sets, which shuts out older
        # readers for good. The metadata of a column travels with the table as properties do.
        columns = delta.schema().fields
        tagged = [c for c in columns if any(k.startswith(TAG_PREFIX) for k in c.metadata)]
        delta.alter.set_column_metadata(
            [*tagged, *columns][0].name, {key: value}, commit_properties=why
        )
    else:
        delta.alter.set_table_properties(
            {key: value}, raise_if_not_exists=False, commit_properties=why
        )


def _number(facts: dict[str, Any], *names: str) -> int | None:
    """The first of these facts that is there; engines write numbers as text too."""
    found = str(next((facts[n] for n in names if facts.get(n) is not None), ""))
    return int(found) if found.isdigit() else None


def append(
    uri: str,
    rows: pa.Table | pa.RecordBatchReader,
    why: str,
    storage_options: dict[str, str] | None = None,
) -> TableVersion:
    """Append rows in one commit: all of them or none. Creates the table on first use; `why` stands in the history."""
    path = resolve(uri)
    has_ids = "image_id" in rows.schema.names
    try:
        write_deltalake(
            path,
            rows,
            mode="append",
            writer_properties=WRITER,
            storage_options=storage_options,
            configuration={"delta.dataSkippingStatsColumns": "image_id,label,split,source"}
            if has_ids and "image" in rows.schema.names
            else None,
            commit_properties=told(why),
        )
    except (OSError, TableNotFoundError) as e:  # the latter when its folder cannot be made
        raise storage.refusal(
            e, path, "The table cannot be written", "Check that the folder can be written"
        ) from e
    return TableVersion(
        path, DeltaTable(path, storage_options=storage_options, without_files=True).version()
    )


def resolve(uri: str) -> str:
    """Local paths become absolute, so that a worker with another working directory finds them; URLs stay.

    A name of three parts (main.vision.photos) that is no folder here is one of Unity Catalog, as is unity://main.vision.photos.
    """
    name = uri.removeprefix("unity://").removeprefix(UNITY)
    if name != uri or (
        re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}", uri) and not Path(uri).exists()
    ):
        return UNITY + name
    if "://" in uri:
        return uri
    folder = str(Path(uri).expanduser().absolute())
    if escaped := re.search(r"%[0-9A-Fa-f]{2}", folder):
        raise DataError(
            "No table can be in a folder of this name",
            got=folder,
            rule=f"deltalake takes {escaped[0]} for another character and writes to another folder",
            fix="Rename the folder",
        )
    return folder


def _moment(text: str) -> datetime | None:
    """The time that an ISO 8601 text names, in UTC when it names no zone; None when it is none."""
    if not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise DataError(
            "This is no time", got=text, rule="ISO 8601, like 2026-11-01T12:00:00Z"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def told(why: str, source: str = "") -> CommitProperties:
    """What the history says about a commit: who, why and, for rows derived from others, from which version."""
    try:
        by = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        by = ""
    facts = {"raypipe": why, "raypipe.by": by, FROM: source}
    return CommitProperties(custom_metadata={k: v for k, v in facts.items() if v})
