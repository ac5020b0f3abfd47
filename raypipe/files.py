"""Small files that are replaced in one step, and folders that one process owns or claims."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("raypipe")
LOCK = "lock"
_claims: dict[Path, tuple[str, int]] = {}  # of this process: for what, and the handle of its lock


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write `content` to `path`; a reader sees the old file or the new one, never half.

    Text is written as UTF-8. Makes the parent folder. The content goes to a `.partial` file of its
    own first, which then takes the name: of two processes that write one path, the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        return partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Return when a file's content, or the names in a folder, would outlive a power cut.

    Where the file system cannot say so, as volumes of Unity Catalog, nothing is waited for.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def is_there(text: str) -> bool:
    """Does this text of a user name a file or a folder? One that can be no name does not.

    pathlib raises for a name of more than 255 bytes, and for a folder that we may not look into.
    """
    try:
        return Path(text).exists()
    except OSError:
        return False


def in_name(text: str) -> str:
    """The text as part of a file's name. What cannot be one, or is too long, gets its hash."""
    plain = re.sub(r"[^\w.-]+", "-", text)
    # A file system counts bytes, and most allow 255.
    plain = plain.encode()[:100].decode(errors="ignore").strip(".-")
    if plain == text:
        return text
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".strip("-")


def by_content(path: str | None) -> str | None:
    """What a path means in a key: a file or folder that is named by a sha256 of its content is the
    same one everywhere.
    """
    if path is None:
        return None
    name = Path(path).name.partition(".")[0]
    return name if re.fullmatch("[0-9a-f]{64}", name) else path


def file_lock(path: Path) -> FileLock:
    """A lock of the file `path`, which need not exist.

    Some places that look like folders have no locks, as volumes of Unity Catalog (/Volumes/...). A
    lock of a path there lies on this machine's own disk. It then holds off other processes of this
    machine, but no other machine: what several may do at once is fenced by commits to tables.
    """
    return FileLock(path if has_locks(path.parent) else _of_this_machine(path))


@functools.lru_cache(maxsize=256)
def has_locks(folder: Path) -> bool:
    """Can files in this folder be locked? Its nearest parent that exists is tried, once."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        handle, name = tempfile.mkstemp(prefix=".raypipe-lock-", dir=folder)
    except OSError:
        return True  # whoever locks there gets the system's own message
    try:
        # flock alone: filelock would make do with a file that a killed process leaves behind.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        log.debug("The file system of %s has no locks: they lie on this machine's disk", folder)
        return False
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _of_this_machine(path: Path) -> Path:
    """A path on this machine's disk that stands for `path`. Each user has a folder of its own."""
    folder = Path(tempfile.gettempdir()) / f"raypipe-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:24]}.lock"


@contextmanager
def owned(folder: Path, says: bool = True) -> Iterator[None]:
    """Make `folder`, and own it: another process that wants it waits here until this one is done.

    Two terminals with the same command then do the work once. The kernel ends the ownership with
    the process, however that ends, so a lock file that was left behind means nothing. Where the
    file system has no locks, only processes of this machine wait (`file_lock`). A process that owns
    a folder may not ask for it again. says: tell the user if it waits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = file_lock(folder / LOCK)
    try:
        own.acquire(timeout=0)
    except Timeout:
        if says:
            log.info("Another process works on the same, in %s. Waiting until it ends", folder)
        own.acquire()
    try:
        yield
    finally:
        own.release()


def is_owned(folder: Path) -> bool:
    """Does another process own the folder now?"""
    own = file_lock(folder / LOCK)
    try:
        own.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False
    own.release()
    return False


def claim(path: Path, of: str) -> bool:
    """Claim `path` for `of` until this process ends. False if a living process has claimed it for
    something else.

    Several processes may claim it for the same. Nothing is written at the path, which need not
    exist: the claim lies on this machine's own disk, and other machines do not see it. Where
    nothing can be written there either, nothing is claimed, and the answer is True.
    """
    path = path.resolve()
    if path not in _claims:
        try:
            return _claim(path, of)
        except OSError as e:
            log.debug("%s cannot be claimed: %s", path, e)
            return True
    return _claims[path][0] == of


def _claim(path: Path, of: str) -> bool:
    note = _of_this_machine(path).with_suffix(".claim")
    # Two that ask at once: the second one waits until the first has written what it claims for.
    with FileLock(note.with_suffix(".lock")):
        handle = os.open(note, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.write(handle, of.encode())
        except BlockingIOError:
            if note.read_bytes() != of.encode():
                os.close(handle)
                return False
        # The system ends the claim with the process: a note that was left behind means nothing.
        fcntl.flock(handle, fcntl.LOCK_SH)
    _claims[path] = of, handle
    return True
