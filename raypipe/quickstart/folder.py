"""The folder of a story: made by it, in use while it is told, and deleted by --fresh only then.

A file says that a quickstart has made the folder. A story holds a lock of the folder itself, which
the kernel takes back with the process: nothing is left behind, and --fresh sees who is at work.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raypipe.errors import ConfigError
from raypipe.stores import address, is_remote

MARKER = ".quickstart"


@contextmanager
def told_in(root: Path, table: str, fresh: bool) -> Iterator[None]:
    """Make the folder of a story, anew if `fresh`; it is in use within.

    table: the address of the story's table. Raises ConfigError for a folder that --fresh may not
    delete, and for a new folder with a table that exists: its cells are another story's.
    """
    if fresh and root.exists():
        _delete(root)
    is_new = not root.exists() or not any(root.iterdir())
    if is_new and not is_remote(table) and Path(address(table), "_delta_log").exists():
        raise ConfigError(
            "run.dir is new, and the table is not",
            got=table,
            rule="A quickstart begins with a table of its own: another one's keeps its splits",
            fix=f"Set both: run.dir={root} table.uri={root / 'tables' / 'cells'}",
        )
    root.mkdir(parents=True, exist_ok=True)
    # A folder that had files is somebody's: a later --fresh must not delete them.
    if is_new:
        (root / MARKER).touch()
    handle = os.open(root, os.O_RDONLY)
    try:
        # Some file systems have no locks of folders.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _delete(root: Path) -> None:
    if not (root / MARKER).exists():
        raise ConfigError(
            "--fresh deletes run.dir, and this was not made by a quickstart",
            got=str(root),
            fix="Set run.dir",
        )
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "Another quickstart is at work in run.dir, and --fresh would delete it",
            got=str(root),
            fix="Wait until it ends, or set run.dir and table.uri",
        ) from None
    except OSError:
        pass  # no locks here
    finally:
        os.close(handle)
    shutil.rmtree(root)
