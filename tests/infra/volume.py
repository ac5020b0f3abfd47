"""A folder that behaves as a volume of Unity Catalog does under /Volumes: a FUSE file system.

    python volume.py FOLDER MOUNTPOINT

It passes everything on to FOLDER but what Databricks' page on volumes says they do not support:
appending, writes that are not sequential, sparse files; and what such mounts lack besides: locks,
links, special modes. These answer EOPNOTSUPP, as on Databricks, where the page says so. It needs
/dev/fuse and libfuse.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import mfusepy as fuse

ATTRIBUTES = ["st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks"]
TIMES = ["st_atime", "st_mtime", "st_ctime"]


def refuse(*given: Any) -> Any:
    raise fuse.FuseOSError(errno.EOPNOTSUPP)


class Volume(fuse.Operations):
    use_ns = True

    def __init__(self, root: str) -> None:
        self.root = root
        self.written: dict[int, int] = {}  # handle: bytes written so far, all from the beginning

    def _real(self, path: str) -> str:
        return self.root + path

    # Reading

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = Path(self._real(path)).lstat()
        told = {name: getattr(found, name) for name in ATTRIBUTES}
        return told | {name: getattr(found, f"{name}_ns") for name in TIMES}

    def access(self, path: str, mode: int) -> int:
        if not os.access(self._real(path), mode):
            raise fuse.FuseOSError(errno.EACCES)
        return 0

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *(entry.name for entry in Path(self._real(path)).iterdir())]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        names = "f_bavail f_bfree f_blocks f_bsize f_favail f_ffree f_files f_frsize f_namemax"
        return {name: getattr(found, name) for name in names.split()}

    def open(self, path: str, flags: int) -> int:
        real = self._real(path)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            if flags & os.O_APPEND:
                refuse()
            # Opened for writing and not emptied: what is written now would be in its middle.
            is_new = flags & os.O_TRUNC or Path(real).stat().st_size == 0
            handle = os.open(real, flags & ~os.O_APPEND)
            self.written[handle] = 0 if is_new else -1
            return handle
        return os.open(real, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    # Writing, from the beginning to the end

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        handle = os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        self.written[handle] = 0
        return handle

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if offset != self.written.get(fh):
            refuse()
        count = os.pwrite(fh, data, offset)
        self.written[fh] += count
        return count

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        if length != 0:
            refuse()
        os.truncate(self._real(path), 0)
        if fh is not None:
            self.written[fh] = 0
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        self.written.pop(fh, None)
        os.close(fh)
        return 0

    # Names

    def mkdir(self, path: str, mode: int) -> int:
        Path(self._real(path)).mkdir(mode)
        return 0

    def rmdir(self, path: str) -> int:
        Path(self._real(path)).rmdir()
        return 0

    def unlink(self, path: str) -> int:
        Path(self._real(path)).unlink()
        return 0

    def rename(self, old: str, new: str, *flags: int) -> int:
        if any(flags):
            refuse()  # neither "only if it is absent" nor exchange
        Path(self._real(old)).rename(self._real(new))
        return 0

    # Modes and times are not kept, and asking for them is no error.

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    link = symlink = mknod = flock = lock = fallocate = refuse


if __name__ == "__main__":
    fuse.FUSE(Volume(sys.argv[1]), sys.argv[2], foreground=True, allow_other=False)
