"""What is left to prepare, and whether a prepared table may be where it is wanted."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from raypipe import stores
from raypipe.config import key_of
from raypipe.errors import DataError
from raypipe.images.smaller import Shape
from raypipe.models.labels import BAR
from raypipe.tables import between, commits, prepared, scan
from raypipe.tables.address import UNITY, resolve
from raypipe.tables.between import Rows
from raypipe.tables.conditions import is_listed
from raypipe.tables.fragment import Options
from raypipe.tables.prepare.parts import out_schema
from raypipe.tables.prepare.staged import FOLDER
from raypipe.tables.prepared import Origin
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

FORMAT = 1  # another one makes other rows of the same source
WAY_OUT = "Choose another DST, or pass --full to make this table anew"


@dataclass(frozen=True)
class Work:
    """What is prepared, how, and where to."""

    table: ImageTable
    version: TableVersion
    source: TableConfig
    shape: Shape
    dst: str

    @property
    def options(self) -> Options:
        return self.table.storage_options

    @property
    def line(self) -> str:
        """Names all that determines the rows but the source's version, and the roles of columns."""
        # A condition on tags finds each of their orders; an older raypipe looked for the text.
        tags = ["in each order"] if self._wants_tags else []
        return self._line(*tags)

    def _line(self, *more: object) -> str:
        chosen = (self.source.where, self.source.sample_key, self.table.columns.image)
        return key_of("prepared", FORMAT, self.version.table_id, *chosen, self.shape, *more)

    @property
    def _wants_tags(self) -> bool:
        wanted = self.source.where.get(self.table.columns.label, ())
        texts = [wanted] if isinstance(wanted, str) else wanted
        return any(BAR in text for text in texts)

    @property
    def roles(self) -> str:
        """Names the columns whose role decides which rows there are: a sample goes by id, and a
        condition on labels finds each spelling of a class.
        """
        return key_of(*self._deciding)

    @property
    def _deciding(self) -> tuple[str, str]:
        """The columns of ids and of labels, where they decide; "" where they do not."""
        columns = self.table.columns
        by_id = columns.id if self.source.sample < 1 else ""
        return by_id, columns.label if columns.label in self.source.where else ""

    def is_of(self, origin: Origin) -> bool:
        """Does the record say of its rows what this work asks for?"""
        if origin.roles:
            return (origin.line, origin.roles) == (self.line, self.roles)
        # An older raypipe wrote no roles apart. For a while it wrote unusual ones into the line.
        if origin.line == self._line(self._deciding):
            return True
        # Of tags in a column of texts it may have missed some orders, in a column of lists none.
        return origin.line == self._line() and (self._has_lists or not self._wants_tags)

    @property
    def _has_lists(self) -> bool:
        """Are the source's labels lists of tags?"""
        schema, name = source_schema(self), self.table.columns.label
        return name in schema.names and is_listed(schema.field(name).type)

    def state(self, version: TableVersion) -> str:
        """A hash of all rows of a version of the source, as its log tells. Raises DataError.

        Of the files' names without their folders: a table may be moved.
        """
        snapshot = self.table.snapshot(version)
        paths = snapshot.paths(self.table.uri).items()
        files = sorted((path.rpartition("/")[2], what.hex()) for path, what in paths)
        columns = sorted(snapshot.columns(self.table.uri, snapshot.schema().names).items())
        return key_of("state", files, columns)

    def open(self) -> DeltaTable | None:
        """The newest version of the prepared table. Raises DataError if something else is there."""
        base = commits.newest(self.dst, self.options)
        if base is None:
            _refuse_files(self.dst)
            return None
        if str(base.metadata().id) == self.version.table_id:
            raise _same(self.dst)
        if not prepared.is_prepared(base):
            raise DataError(
                "Another table is here",
                got=self.dst,
                rule="raypipe table prepare writes only to tables that it made itself",
                fix="Choose another DST",
            )
        return base


def address(dst: str, src: str) -> str:
    """The address of the prepared table. Raises DataError where it cannot be."""
    uri = resolve(dst)
    if uri.startswith(UNITY):
        raise DataError(
            "A prepared table cannot be made in Unity Catalog",
            got=dst,
            rule="raypipe writes its files itself, and the catalog gives out no place for them",
            fix="Name a folder or an object store, and register it there as an external table",
        )
    own, other = _real(uri), _real(src)
    if own == other:
        raise _same(dst)
    if own.startswith(other + "/") or other.startswith(own + "/"):
        raise DataError(
            "One table lies inside the other",
            got=f"{src} and {dst}",
            rule="VACUUM of the outer one would remove the files of the inner one",
            fix="Choose another DST",
        )
    return uri


def _real(uri: str) -> str:
    """Without links and closing slashes."""
    path = stores.local(uri)
    return uri.rstrip("/") if "://" in path else os.path.realpath(path)


def _same(dst: str) -> DataError:
    return DataError(
        "A table cannot be prepared into itself",
        got=dst,
        rule="The source stays as it is",
        fix="Choose another DST",
    )


def _refuse_files(dst: str) -> None:
    """Raise DataError for a local place with files of somebody else."""
    folder = Path(stores.local(dst))
    if "://" in str(folder) or not folder.exists() or (folder / FOLDER).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise DataError(
            "There is something else here",
            got=dst,
            rule="A prepared table needs a new or empty folder",
            fix="Choose another DST",
        )


@dataclass(frozen=True)
class Plan:
    """rows: to prepare. base: the version they are committed on. before: its record.

    anew: they replace what is there; else they are appended.
    """

    rows: Rows
    base: DeltaTable | None
    before: Origin | None
    anew: bool

    @property
    def since(self) -> int | None:
        """The source's version that the rows are added to."""
        return self.before.version if self.before and not self.anew else None


def plan(work: Work, base: DeltaTable | None, full: bool) -> Plan | None:
    """What is to do; None: nothing. Raises DataError where the table cannot be brought up; with
    `full` all is made anew there.
    """
    if base is None or prepared.number_of(base) < 0:
        return Plan(_all(work), base, None, anew=False)
    try:
        return _missing(work, base)
    except DataError as e:
        if not full or e.fix != WAY_OUT:
            raise
    return Plan(_all(work), base, None, anew=True)


def _missing(work: Work, base: DeltaTable) -> Plan | None:
    """The rows that the source has got since; None: it has none. Raises DataError."""
    origin = prepared.origin_of(base)
    if origin is None:
        raise DataError(
            f"{work.dst} does not say any more what it was made from",
            rule="An earlier version was restored, or its properties were changed",
            fix=WAY_OUT,
        )
    if not work.is_of(origin):
        raise DataError(
            f"{work.dst} was prepared from something else, or in another way",
            got=f"{origin}, side {origin.side_px}, format {origin.coding}",
            rule="A prepared table has one source, one side, format and quality, one condition",
            fix=WAY_OUT,
        )
    if origin.version == work.version.version:
        _require_state(work, work.version, origin)
        return None
    if origin.version > work.version.version:
        raise DataError(
            f"{work.dst} was prepared from a newer version",
            got=f"{work.version}, and it stands for v{origin.version}",
            fix=WAY_OUT,
        )
    return Plan(_appended(work, base, origin), base, origin, anew=False)


def _require_state(work: Work, version: TableVersion, origin: Origin) -> None:
    """Raise DataError if the source's version has other rows now than when it was prepared: a table
    that was restored from a backup has its numbers again.
    """
    if origin.state and work.state(version) != origin.state:
        raise DataError(
            f"v{version.version} of {work.table.uri} has other rows now than those that were "
            "prepared",
            rule="The table was restored from a backup, and went on from there",
            fix=WAY_OUT,
        )


def _all(work: Work) -> Rows:
    rows = _selected(work)
    if not rows.fragments:
        raise DataError(
            f"{work.version} has no rows to prepare",
            got=work.source.where or None,
            fix="Check the table's version and --where",
        )
    return rows


def _selected(work: Work, only: Collection[str] | None = None) -> Rows:
    """As `between.selected`; the table needs no ids."""
    table, where = work.table, work.source.where
    table.require(table.at(work.version), *where)
    fragments, schema = scan.plan(table, work.version, where, only)
    named, where = scan.with_names(table, schema, [], where)
    counts = scan.counted(fragments, named, where, work.options)
    # Row groups that have none of the rows are not read.
    pairs = [pair for pair in zip(fragments, counts, strict=True) if pair[1]]
    return Rows([one for one, _ in pairs], named, where, [count for _, count in pairs])


def _appended(work: Work, base: DeltaTable, origin: Origin) -> Rows:
    """The rows that were appended to the source since. Raises DataError if others have changed.

    Their labels may have changed, too: that is told by the files, not by the images.
    """
    table, version = work.table, work.version
    try:
        earlier = table.pin(origin.version)
        _require_state(work, earlier, origin)
        changed = _other_columns(work, earlier)
        old = table.snapshot(earlier).paths(table.uri)
        now = table.snapshot(version).paths(table.uri)
        went = {path for path, deleted in old.items() if now.get(path) != deleted}
        came = {path for path, deleted in now.items() if old.get(path) != deleted}
        # OPTIMIZE: all rows are the same in other files.
        if went and between.only_moved(table, earlier, version):
            went = set()
            came = set()
    except DataError as e:
        raise DataError(
            f"What changed since v{origin.version} cannot be told from the log ({e.what})",
            fix=WAY_OUT,
        ) from None
    if went:
        raise DataError(
            f"Rows of {table.uri} were changed, removed or moved since v{origin.version}",
            got=str(version),
            rule="Rows that were appended are added to a prepared table; others are not changed",
            fix=WAY_OUT,
        )
    # Column mapping gives a new column the name of a dropped one, and no file changes.
    if changed:
        raise DataError(
            f"{table.uri} has another column {changed[0]!r} than at v{origin.version}",
            got=str(version),
            rule="It was dropped and added again, or its type was changed",
            fix=WAY_OUT,
        )
    rows = _selected(work, came)
    have = out_schema(source_schema(work)).names
    stored = pa.schema(base.schema().to_arrow()).names
    if have != stored:
        raise DataError(
            f"{table.uri} has other columns than at v{origin.version}",
            got=", ".join(sorted(set(have) ^ set(stored))),
            fix=WAY_OUT,
        )
    return rows


def _other_columns(work: Work, earlier: TableVersion) -> list[str]:
    """The columns that both versions have by one name, and that are not the same or have another
    type.
    """
    table = work.table
    names = table.snapshot(work.version).schema().names
    old = table.snapshot(earlier).columns(table.uri, names)
    now = table.snapshot(work.version).columns(table.uri, names)
    return [name for name in names if old.get(name, now[name]) != now[name]]


def source_schema(work: Work) -> pa.Schema:
    """The source's columns in their own types, as files are read (names as they are stored)."""
    return work.table.snapshot(work.version).schema()
