"""One version of a table, opened once: its log, its deletion vectors and its files' footers.

A version never changes, so whoever holds it reads none of this twice. On an object store that is
what a run waits for: opening a table takes 2 requests and 2 more for each commit since the last
checkpoint, and a footer takes 2. A run of `raypipe train` opened its table 45
times and read each footer 21 times before this module.

What is kept belongs to an ImageTable and ends with it; it does not travel to other processes. They
get the footers of the files that they read, in their fragments.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from raypipe.tables import log, protocol
from raypipe.tables.conditions import Where
from raypipe.tables.footer import Footer, read_footer
from raypipe.tables.fragment import Fragment, Options

THREADS = 8  # reading footers waits for storage more than it computes
AT_ONCE = 16  # files that one of them reads, before it asks for more
WAVE = 1024  # files
KEPT = 32 * 2**20  # bytes of footers: 300,000 files have 400 MB and more


class Snapshot:
    """A version that is read many times. Threads may share it."""

    def __init__(self, delta: DeltaTable) -> None:
        self.delta = delta
        self._lock = threading.Lock()
        self._masks: dict[str, np.ndarray] | None = None
        # By address and image column, then by path.
        self._footers: dict[tuple[str, str], dict[str, Footer]] = {}
        self._schemas: dict[bytes, pa.Schema] = {}
        self._schema = pa.schema([])  # the last of them
        self._kept_bytes = 0

    def files(
        self,
        uri: str,
        where: Where,
        image: str,
        options: Options,
        only: Collection[str] | None = None,
    ) -> tuple[Iterator[list[Fragment]], pa.Schema]:
        """The row groups of each file that may hold a match, oldest first, and the table's schema.

        uri: the name that the table is opened by. image: the column with the images. only: the
        names of the files to look at (None: all); of others not even the footer is read. Raises
        DataError.
        """
        # One thread reads what is missing, and the others find it.
        with self._lock:
            files, schema = self._listed(uri, where)
            if only is not None:
                files = [file for file in files if file.name in only]
            footers = self._footers_of(files, schema, image, options)
        return _row_groups(files, footers, log.Names(schema), image), schema

    def schema(self) -> pa.Schema:
        """The table's schema, as `files` returns it."""
        return log.schema_of(self.delta)

    def paths(self, uri: str) -> dict[str, bytes]:
        """Each file's name, and a hash of which of its rows are deleted, and of its partition.

        Opens no file. Raises DataError.
        """
        with self._lock:
            files, _ = self._listed(uri, {})
        paths = {}
        for file in files:
            deleted = b"" if file.keep_N is None else np.packbits(file.keep_N).tobytes()
            # A mask that deletes nothing may be shorter than its file, or missing.
            is_whole = file.keep_N is None or bool(file.keep_N.all())
            # A file may get another partition under the same path.
            values = [(name, value.as_py()) for name, value in file.partition]
            what = repr((b"" if is_whole else deleted, values))
            paths[file.name] = hashlib.sha256(what.encode()).digest()
        return paths

    def columns(self, uri: str, names: Collection[str]) -> dict[str, str]:
        """Where the files store each of these columns, and its type; no entry for one that the
        table lacks.

        Column mapping may give a name to another column, and no file changes. Raises DataError.
        """
        with self._lock:
            _, schema = self._listed(uri, {})
        return {name: log.stored_as(schema.field(name)) for name in names if name in schema.names}

    def stored_names(self, uri: str) -> dict[str, str]:
        """What finds each column in the files: its own name, or with column mapping another name
        or a number, which stays when the column is renamed. Raises DataError.
        """
        with self._lock:
            _, schema = self._listed(uri, {})
        return {field.name: log.stored_name(field) for field in schema}

    def state(self, uri: str, names: Collection[str]) -> str:
        """A hash of the rows of these columns, as the log tells: equal only if they are the same.

        A version's number does not tell: a table that was restored from a backup has the number
        again, with other rows. Raises DataError.
        """
        files = sorted(self.paths(uri).items())
        columns = sorted(self.columns(uri, names).items())
        text = repr((files, columns))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _listed(self, uri: str, where: Where) -> tuple[list[log.File], pa.Schema]:
        """The files that the log names, and the schema. The caller has the lock."""
        # A deletion vector may belong to a feature that raypipe refuses.
        protocol.preflight(self.delta)
        if self._masks is None:
            self._masks = log.deletion_masks(self.delta)
        return log.files(self.delta, uri, where, self._masks)

    def _footers_of(
        self, files: Sequence[log.File], schema: pa.Schema, image: str, options: Options
    ) -> list[Footer]:
        """The footers of these files. Reads those that were never read."""

        def read(some: Sequence[log.File]) -> list[Footer]:
            found = []
            for file in some:
                found.append(read_footer(file.uri, file.path, schema, image, options))
            return found

        known = {uri: self._footers.setdefault((uri, image), {}) for uri in _addresses(files)}
        missing = [file for file in files if file.path not in known[file.uri]]
        with ThreadPoolExecutor(THREADS) as pool:
            # One wave after the other, so that bytes that are not kept go soon.
            for first in range(0, len(missing), WAVE):
                wave = missing[first : first + WAVE]
                runs = [wave[start : start + AT_ONCE] for start in range(0, len(wave), AT_ONCE)]
                footers = itertools.chain.from_iterable(pool.map(read, runs))
                for file, footer in zip(wave, footers, strict=True):
                    known[file.uri][file.path] = self._kept(footer)
        return [known[file.uri][file.path] for file in files]

    def _kept(self, footer: Footer) -> Footer:
        """The footer as it is kept: equal schemas are one object, and bytes are kept up to KEPT.

        Who reads a file whose footer was not kept reads it again, on its own node.
        """
        # Most files of a table have the schema of the file before.
        if not footer.schema.equals(self._schema, check_metadata=True):
            text = footer.schema.serialize().to_pybytes()
            self._schema = self._schemas.setdefault(text, footer.schema)
        data = footer.data
        if data is not None:
            self._kept_bytes += len(data)
            data = data if self._kept_bytes <= KEPT else None
        return Footer(data, self._schema, footer.packed)


def _row_groups(
    files: list[log.File], footers: list[Footer], names: log.Names, image: str
) -> Iterator[list[Fragment]]:
    """The row groups of each file. A file is forgotten when its row groups are made: there may be
    hundreds of thousands.
    """
    files.reverse()
    footers.reverse()
    while files:
        yield log.row_groups(files.pop(), footers.pop(), names, image)


def _addresses(files: Sequence[log.File]) -> set[str]:
    """What the files are opened under: the table, and the tables that it was cloned from."""
    return {file.uri for file in files}


class Snapshots:
    """The versions that one ImageTable has opened, by number and the table's id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: dict[tuple[int, str], Snapshot] = {}

    def keep(self, version: int, table_id: str, delta: DeltaTable) -> Snapshot:
        """The snapshot of a version that was just opened, or the one that is kept of it."""
        with self._lock:
            return self._by_version.setdefault((version, table_id), Snapshot(delta))

    def get(self, version: int, table_id: str) -> Snapshot | None:
        with self._lock:
            return self._by_version.get((version, table_id))

    def __reduce__(self) -> tuple[Any, ...]:
        # An open table is of this process: another one begins with none.
        return Snapshots, ()
