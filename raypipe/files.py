"""Small text files that are replaced in one step, and folders that one process owns."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("raypipe")
LOCK = "lock"
# A file system without locks: some network mounts, and cloud folders that look like a disk.
NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL


def write_atomic(path: Path, text: str) -> Path:
    """Write `text` to `path` as UTF-8; a reader sees the old file or the new one, never half.

    Makes the parent folder. The text goes to `NAME.partial` first, which then takes the name.
    Two processes that write the same path at the same time are not supported.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make `folder`, and own it: another process that wants it waits here until this one is done.

    Two terminals with the same command then do the work once. The kernel ends the ownership with
    the process, however that ends, so a lock file that was left behind means nothing. Where the
    file system has no locks, nobody waits. A process that owns a folder may not ask for it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Closed on exec: a Ray process that outlives this one does not keep the lock.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Another process works on the same, in %s. Waiting until it ends", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(lock)
