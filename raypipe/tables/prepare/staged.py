"""Files of a table that is being made, before a commit names them.

Workers write Parquet files into the table's folder, and for each a note (JSON) with its size and
statistics into `_raypipe_prepare/KEY`. No reader looks there, and VACUUM neither. A note counts if
its file is there in full. So a run that was killed leaves its finished parts to the next one, and
two runs at once share the work: each takes what the other has noted. One commit names all files in
the end.

A part that two runs made at the same time has two files. The commit names one; `raypipe table
vacuum` removes the other, as it does with files that a kill cut off.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow.fs import (
    FileSelector,
    FileSystem,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from raypipe import stores
from raypipe.tables import fragment
from raypipe.tables.fragment import Options

FOLDER = "_raypipe_prepare"
BEGUN = "begun"  # this file is there while the work is


@dataclass(frozen=True)
class Made:
    """A part whose file is written.

    name: of the file. size: its bytes. stats: as the log wants them, in JSON. broken: images that
    were kept as they are, by reason. bytes_before, bytes_after: of the images.
    """

    number: int
    name: str
    size: int
    rows: int
    stats: str
    broken: dict[str, int]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Staged:
    """The files and notes of one piece of work, named by `key`, for the table at `uri`."""

    uri: str
    key: str
    options: Options = field(repr=False)  # may hold secrets

    @property
    def files(self) -> FileSystem:
        """The table's folder; names are relative to it."""
        store = fragment.remote(self.uri, tuple(sorted((self.options or {}).items())))
        return store or SubTreeFileSystem(stores.local(self.uri), LocalFileSystem())

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.key}"

    def begin(self) -> None:
        """Make the folder of the notes. Raises OSError."""
        files = self.files
        files.create_dir(self.folder, recursive=True)
        self._write(f"{self.folder}/{BEGUN}", b"{}")

    def new_name(self, number: int) -> str:
        """A name that no other file has. Sorted by name, files are in the order of their parts."""
        return f"part-{number:06d}-{uuid.uuid4().hex}.parquet"

    def note(self, made: Made) -> None:
        files = self.files
        files.create_dir(self.folder, recursive=True)
        self._write(self._note(made.number), json.dumps(asdict(made)).encode())

    def _write(self, name: str, content: bytes) -> None:
        files = self.files
        if isinstance(files, PyFileSystem):
            # A stream of Arrow's would hand over buffers, which deltalake refuses.
            stores.send(files.handler, name, [content])
            return
        with files.open_output_stream(name) as out:
            out.write(content)

    def noted(self, number: int) -> Made | None:
        """The part, if it is finished."""
        made = self._read(number)
        if made is None:
            return None
        # The file may have been removed since, or cut off by a crash of the machine.
        info = self.files.get_file_info([made.name])[0]
        return made if info.size == made.size else None

    def _read(self, number: int) -> Made | None:
        try:
            with self.files.open_input_stream(self._note(number)) as file:
                return Made(**json.loads(file.read()))
        # A note that is being written is no JSON yet.
        except (OSError, ValueError, TypeError, pa.ArrowException):
            return None

    def all(self) -> dict[int, Made]:
        """The finished parts."""
        have = self.sizes()
        found: dict[int, Made] = {}
        for info in self._listed(self.folder):
            number = info.base_name.removesuffix(".json")
            made = self._read(int(number)) if number.isdecimal() else None
            if made is not None and have.get(made.name) == made.size:
                found[made.number] = made
        return found

    def is_over(self) -> bool:
        """Has somebody finished this work, and cleared it away?"""
        info = self.files.get_file_info([f"{self.folder}/{BEGUN}"])[0]
        return info.type == FileType.NotFound

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in the table's folder, as this process sees it."""
        return {info.base_name: info.size for info in self._listed("")}

    def clear(self) -> None:
        """Remove the notes; the files stay."""
        files = self.files
        with suppress(OSError):
            # First this one: whoever works on the same sees that it is over.
            files.delete_file(f"{self.folder}/{BEGUN}")
        with suppress(OSError):
            files.delete_dir(self.folder)
        with suppress(OSError):
            if not self._listed(FOLDER):
                files.delete_dir(FOLDER)

    def _note(self, number: int) -> str:
        return f"{self.folder}/{number:06d}.json"

    def _listed(self, folder: str) -> list[Any]:
        selector = FileSelector(folder, allow_not_found=True)
        return list(self.files.get_file_info(selector))
