"""Object stores: one object read or written whole, and what an error of a store means.

Everything goes through deltalake's object_store, so that a table and an object need the same
variables (AWS_*, AZURE_*, GOOGLE_*) and fail with the same words. `tables/` opens tables.
"""

from __future__ import annotations

import errno
import io
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

from raypipe.errors import hidden

# A dead store would be tried for three minutes.
PATIENCE = {"max_retries": "3", "retry_timeout": "20s", "connect_timeout": "5s"}
# One request each.
CHUNK = 8 * 2**20


def is_remote(uri: str) -> bool:
    """Is it in an object store, not a file of this machine?"""
    return "://" in uri and not uri.startswith("file://")


def local(uri: str) -> str:
    """The path of a local table or file: a plain one as it is, a file:// URL decoded."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri


def address(uri: str) -> str:
    """One text for one place: absolute, and without a slash at its end."""
    if is_remote(uri):
        return uri.rstrip("/")
    return str(Path(local(uri)).expanduser().absolute())


@contextmanager
def opened(uri: str) -> Iterator[BinaryIO]:
    """An object or a local file, for reading at any place. Raises OSError."""
    if not is_remote(uri):
        with Path(local(uri)).open("rb") as file:
            yield file
        return
    from pyarrow.fs import PyFileSystem

    handler, name = _folder_of(uri)
    with PyFileSystem(handler).open_input_file(name) as remote:
        # Small reads, as of a zip's index, would be a request each.
        yield io.BufferedReader(remote, CHUNK)


def put(file: Path, uri: str) -> None:
    """Copy a local file to an object or a local path. Whoever reads sees all of it or nothing.

    Raises OSError.
    """
    if is_remote(uri):
        handler, name = _folder_of(uri)
        send(handler, name, chunks(file))
    else:
        replace(Path(local(uri)), chunks(file))


def chunks(content: Path | bytes) -> Iterator[bytes]:
    """A file, or bytes, in parts of one request each."""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
        while chunk := source.read(CHUNK):
            yield chunk


def send(store: Any, name: str, content: Iterable[bytes]) -> None:
    """Write an object with deltalake's DeltaStorageHandler. Raises OSError."""
    # deltalake's public stream refuses the buffers that Arrow hands it (1.6). A store shows the
    # object when the stream is closed; one that is dropped leaves none.
    stream = store._handler.open_output_stream(name, None)
    for chunk in content:
        stream.write(chunk)
    stream.close()


def replace(file: Path, content: Iterable[bytes]) -> None:
    """Write a local file by a rename, in place of an earlier one. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Two processes, of two machines on a shared disk, may write the same file at once.
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as target:
            target.writelines(content)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _folder_of(uri: str) -> tuple[Any, str]:
    """deltalake's handler of the folder that holds the object, and the object's name in it."""
    from deltalake.exceptions import DeltaError
    from deltalake.fs import DeltaStorageHandler

    folder, _, name = uri.rpartition("/")
    try:
        return DeltaStorageHandler(folder, PATIENCE), name
    except DeltaError as e:
        # An unknown scheme, or options of the environment that contradict each other.
        raise OSError(str(e)) from None


class Cause(NamedTuple):
    """Why the object store failed. `pattern` finds it in a message of deltalake."""

    pattern: str
    cause: str
    rule: str
    fix: str


def is_full(error: Exception) -> bool:
    """Is a disk full, or a quota used up? deltalake says so only in its text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return bool(_NO_ROOM.search(message_of(error)))


def of_system(error: Exception) -> bool:
    """Did the system refuse? Arrow raises OSError for damaged files, too, without a number."""
    if isinstance(error, FileNotFoundError):
        return False
    return isinstance(error, OSError) and error.errno is not None


def cause(error: Exception, uri: str) -> Cause | None:
    """The cause when the object store failed; None when the table itself did, or is local."""
    if "://" not in uri:
        return None  # a local table
    message = message_of(error)
    for known in _CAUSES:
        if re.search(known.pattern, message):
            return known
    return None


# Rust, Arrow and Python all quote the system's own words; SQLite has its own.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|\(os error (28|122)\)|database or disk is full"
)
MAKE_ROOM = (
    "Make room, or write to another disk. Run the same command again: what was finished is kept"
)
WHERE_KEYS = (
    "Put them into the environment (AWS_*, AZURE_*, GOOGLE_*) of the driver and every node, "
    "or table.storage_options"
)
# The first pattern that matches decides.
_CAUSES = (
    Cause(
        pattern="NoSuchBucket|ContainerNotFound|FilesystemNotFound|bucket does not exist",
        cause="there is no such bucket or container",
        rule="raypipe makes tables, not buckets",
        fix="Make it, or correct the address",
    ),
    Cause(
        pattern="169.254.169.254|IMDS|credentials provider|No credentials",
        cause="there are no credentials",
        rule="",
        fix=WHERE_KEYS,
    ),
    Cause(
        pattern=(
            "Invalid Access Key|privileges|status code 40[13]|Unauthorized|Forbidden"
            "|SignatureDoesNotMatch|InvalidAccessKeyId"
        ),
        cause="the store refuses the credentials",
        rule="They must be valid for this bucket, for reading and for what is to be written",
        fix=WHERE_KEYS,
    ),
    Cause(
        pattern="Invalid table version",
        cause="the store lists a log from its beginning when asked for its end",
        rule="object_store 0.13 sends `startFrom` to Azure, which Azurite knows from 3.37 on",
        fix="Write to a store that knows it",
    ),
    Cause(
        pattern="scheme is not allowed",
        cause="the endpoint is plain http",
        rule="Only https is taken unasked",
        fix=(
            'Add AWS_ALLOW_HTTP: "true" (azure_allow_http) to table.storage_options, for a '
            "test server"
        ),
    ),
    Cause(
        pattern=(
            "dns error|error sending request|timed out|deadline has elapsed"
            "|[Cc]onnection (refused|reset|closed)"
        ),
        cause="the store cannot be reached",
        rule=(
            "It was tried for as long as max_retries (10) and retry_timeout (180s) of "
            "table.storage_options say"
        ),
        fix="Check the endpoint, the account's or the region's name, and the network",
    ),
)


def message_of(error: Exception) -> str:
    """The error on one line, without colours and without secrets."""
    # deltalake colours its messages and spreads them over several lines.
    uncoloured = re.sub(r"\x1b\[[0-9;]*m|↳", "", str(error))
    return " ".join(hidden(uncoloured).split())


def brief(text: str) -> str:
    """Code and message of an answer in XML; any other text is cut at 400 characters."""
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text)
    if answer is None:
        return text[:400]
    code, message = answer[1], answer[2]
    # A request id helps nobody here.
    message = message.split(" RequestId:")[0]
    return f"{code}: {message}".rstrip(".")
