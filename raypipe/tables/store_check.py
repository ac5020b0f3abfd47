"""Tries what a verb will do with a table's store: open the table, write, list, read and delete.

For `raypipe doctor`, which runs it in a process of its own: deltalake's file handler holds the GIL
while it waits for a network. What is written is one small object, `_raypipe_doctor/NAME` beside the
table's files. Delta's readers and vacuum skip names that begin with an underscore.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem, PyFileSystem

from raypipe.errors import DataError, RaypipeError
from raypipe.stores import local
from raypipe.tables import storage
from raypipe.tables.address import UNITY, resolve
from raypipe.tables.table import ImageTable, TableConfig

FOLDER = "_raypipe_doctor"
CONTENT = b"raypipe doctor wrote this, and removes it"
# A dead endpoint would be tried for three minutes.
IMPATIENT = {"max_retries": "1", "retry_timeout": "5s", "connect_timeout": "3s", "timeout": "5s"}


def examine(settings: dict[str, Any], options: dict[str, str] | None) -> dict[str, Any]:
    """How the table and its store look from here.

    settings: `table` of a configuration. table: "" for none, else its address and version.
    table_error, and store_error by step (write, list, read, delete): an error's four parts.
    left: an object that could not be removed.
    """
    impatient = {**IMPATIENT, **(options or {})}
    cfg = TableConfig.model_validate({**settings, "storage_options": impatient})
    answer: dict[str, Any] = {"table": "", "table_error": None, "store_error": {}, "left": ""}
    try:
        if ImageTable.exists(cfg.uri, cfg.storage_options):
            answer["table"] = str(ImageTable.open_pinned(cfg)[1])
    except RaypipeError as e:
        answer["table_error"] = parts(e)
        # Each step would wait for the same silence again.
        if "cannot be reached" in e.what:
            answer["store_error"] = {"list": parts(e)}
            return answer
    # A catalog gives credentials for its own tables only.
    if not resolve(cfg.uri).startswith(UNITY):
        answer["store_error"], answer["left"] = _tried(resolve(cfg.uri), impatient)
    return answer


def parts(error: RaypipeError) -> list[Any]:
    """The four parts of an error, as JSON takes them."""
    got = None if error.got is None else str(error.got)
    return [error.what, got, error.rule, error.fix]


def _tried(uri: str, options: dict[str, str]) -> tuple[dict[str, list[Any]], str]:
    """The errors of each step, and the object that is left behind."""
    name = f"{FOLDER}/{uuid.uuid4().hex}"
    try:
        store, root = _opened(uri, options)
    except (OSError, DeltaError, ValueError) as e:
        return {"write": parts(_error(e, uri, "write"))}, ""
    path = f"{root}/{name}".lstrip("/") if not root.startswith("/") else f"{root}/{name}"
    folder = path.rpartition("/")[0]
    errors = {}

    def step(called: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except (OSError, DeltaError, ValueError) as e:
            errors[called] = parts(_error(e, uri, called))
        return called not in errors

    def write() -> None:
        if isinstance(store, LocalFileSystem):
            store.create_dir(folder, recursive=True)
        if not isinstance(store, LocalFileSystem):
            _put(store, path)
            return
        with store.open_output_stream(path) as out:
            out.write(CONTENT)

    def read() -> None:
        with store.open_input_file(path) as file:
            if file.read() != CONTENT:
                raise OSError("what was read is not what was written")

    def listed() -> None:
        found = store.get_file_info(FileSelector(folder, allow_not_found=True))
        if "write" not in errors and name.rpartition("/")[2] not in {i.base_name for i in found}:
            raise OSError("what was written is not in the list")

    # Listing is tried even where writing is refused: readers need it.
    written = step("write", write)
    step("list", listed)
    if not written:
        return errors, ""
    step("read", read)
    removed = step("delete", lambda: store.delete_file(path))
    if removed and isinstance(store, LocalFileSystem):
        # Another doctor may have its file there.
        with suppress(OSError):
            Path(folder).rmdir()
    return errors, "" if removed else f"{uri}/{name}"


def _put(store: PyFileSystem, path: str) -> None:
    """Write the object. deltalake's public stream refuses the buffers that Arrow hands it (1.6)."""
    stream = store.handler._handler.open_output_stream(path, None)
    stream.write(CONTENT)
    stream.close()


def _opened(uri: str, options: dict[str, str]) -> tuple[FileSystem, str]:
    """The store of a table and the table's folder in it.

    A local table that is not there yet is looked for in the nearest folder above that is.
    """
    if "://" in uri and not uri.startswith("file://"):
        return PyFileSystem(DeltaStorageHandler(uri, options)), ""
    folder = Path(local(uri))
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    return LocalFileSystem(), os.fspath(existing)


def _error(error: Exception, uri: str, step: str) -> DataError:
    to_whom = {"write": "take", "list": "list", "read": "give out", "delete": "delete"}[step]
    return storage.refusal(
        error,
        uri,
        f"The store does not {to_whom} an object",
        "Check that this user may write below table.uri",
    )
