"""Whole files in an object store, or in a folder, with the options and credentials of tables.

An object is there whole or not at all: stores show it when its upload has ended, and a folder gets
it by a rename. deltalake's own file system is used, so that what opens a table opens this too; it
reads AWS_*, AZURE_* and GOOGLE_* as tables do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileType

from raypipe import stores
from raypipe.tables import storage

# Of one request. A store that is down must not hold up the end of a run.
LIMIT = {"timeout": "60s"}


class Objects:
    """Objects below `uri`, by names like reports/drift.html.

    Its methods raise DataError (Unreachable) when the store refuses or does not answer.
    """

    def __init__(self, uri: str, options: dict[str, str] | None) -> None:
        self.uri = uri
        self._folder: Path | None = None
        if "://" not in uri or uri.startswith("file://"):
            self._folder = Path(stores.local(uri)).expanduser().absolute()
            return
        with self._told("The store cannot be opened"):
            self._store = DeltaStorageHandler(uri, {**stores.PATIENCE, **LIMIT, **(options or {})})

    def read(self, name: str) -> bytes | None:
        """The bytes of a small object; None if it does not exist."""
        with self._told("The store does not give out an object"):
            try:
                if self._folder is not None:
                    return (self._folder / name).read_bytes()
                return bytes(self._store.open_input_file(name).read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write an object, in place of an earlier one. content: all of it, or its parts."""
        parts = [content] if isinstance(content, bytes) else content
        with self._told("The store does not take an object"):
            if self._folder is not None:
                stores.replace(self._folder / name, parts)
            else:
                stores.send(self._store, name, parts)

    def sizes(self, place: str) -> dict[str, int]:
        """Bytes of each object below `place`, by its name from there."""
        if self._folder is not None:
            folder = self._folder / place
            with self._told("The store does not list its objects"):
                return dict(_sizes_below(folder))
        selector = FileSelector(place, allow_not_found=True, recursive=True)
        with self._told("The store does not list its objects"):
            found = self._store.get_file_info_selector(selector)
        files = [info for info in found if info.type == FileType.File]
        return {info.path.removeprefix(f"{place}/"): int(info.size) for info in files}

    def delete(self, name: str) -> None:
        with self._told("The store does not delete an object"):
            if self._folder is not None:
                (self._folder / name).unlink(missing_ok=True)
            else:
                self._store.delete_file(name)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Errors of the store as one DataError each."""
        try:
            yield
        except (OSError, DeltaError, ValueError) as e:
            fix = "Check that this user may read and write there"
            raise storage.refusal(e, self.uri, what, fix) from e


def _sizes_below(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.rglob("*"):
        # Another writer's half-written file may get its name meanwhile.
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path.stat().st_size
