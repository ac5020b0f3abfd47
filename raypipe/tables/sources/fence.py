"""Which files a source may open: those in its folder and in the user's `ingest.from.roots`.

A data set is not trusted. A row or a labels file may name `/proc/self/environ` or `../secret`, a
link may lead there, and bytes that do not decode are kept in the quarantine table, which others can
read. So raypipe resolves the real path of every file that data names, and of every link. A file
elsewhere is not opened, and none of its bytes are kept.

This does not protect against somebody who changes the folder while it is read, nor against hard
links that were made on this disk.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from raypipe.errors import DataError
from raypipe.images.decode import BadImage

# Arrow holds less than 2 GiB a value. The largest image that raypipe accepts, 64 megapixels, takes
# 192 MB decoded.
MAX_BYTES = 2**29
Read = bytes | memoryview | BadImage
ROOTS = "Copy it there, or set ingest.from.roots to the folders that paths and links may lead to"
# Opening a pipe would wait. O_NOFOLLOW: the path is resolved, so a link was put there since.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class Fence:
    """Files in `base` and `roots` may be opened."""

    base: str
    """Relative names start here."""
    roots: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES
    """Larger files are not read."""

    def place(self, name: str) -> str:
        """The real path of a name. Raises BadImage when it lies outside."""
        folders = (self.base, *self.roots)
        try:
            # os.path.join keeps an absolute name as it is.
            real = os.path.realpath(os.path.join(self.base, name))  # noqa: PTH118
            is_inside = any(_within(real, folder) for folder in folders)
        except (OSError, ValueError) as e:  # ValueError: a name with a null character
            raise BadImage("unreadable", f"{name!r}: {e}") from None
        if not is_inside:
            raise BadImage("outside", f"{name} is not in {self.base}: it was not opened", ROOTS)
        return real

    def read(self, name: str) -> Read:
        """The bytes of one file, or a BadImage that says why it cannot be read.

        Raises DataError when the folder itself is missing on this machine.
        """
        try:
            return self._read_regular(self.place(name), name)
        except BadImage as bad:
            return bad
        except (OSError, ValueError) as e:
            require_here(Path(self.base))
            why = e.strerror if isinstance(e, OSError) and e.strerror else e
            return BadImage("unreadable", f"{name}: {why}")

    def _read_regular(self, real: str, name: str) -> Read:
        # Opening a device may have effects, so its type is checked before.
        if not stat.S_ISREG(os.stat(real).st_mode):  # noqa: PTH116
            raise FileNotFoundError("no regular file")

        with open(os.open(real, _OPEN_FLAGS), "rb") as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            if size > self.max_bytes:
                return self.too_large(name, size)
            # The file may have grown meanwhile: one byte more than allowed shows it.
            data = file.read(self.max_bytes + 1)
        return self.bounded(data, name)

    def bounded(self, data: bytes | memoryview, name: str) -> Read:
        """The bytes, or a BadImage when they are more than `max_bytes`."""
        if len(data) > self.max_bytes:
            return self.too_large(name, len(data))
        return data

    def too_large(self, name: str, size: int) -> BadImage:
        most = f"at most {self.max_bytes:,} are read"
        return BadImage(
            "too_large",
            f"{name}: {size:,} bytes, {most}",
            "Set ingest.from.max_bytes, or make it smaller",
        )

    def require(self, name: str, what: str) -> str:
        """The real path of a container of images, like a shard.

        Raises DataError when it lies outside, or is a pipe or a device. A missing one is no error
        here.
        """
        try:
            real = self.place(name)
        except BadImage:
            raise DataError(
                f"{what} leads out of its folder",
                got=name,
                rule=f"Nothing outside of {self.base} is opened",
                fix=ROOTS,
            ) from None

        # os.path, because pathlib raises for a file that this user may not look at.
        is_usual = os.path.isdir(real) or os.path.isfile(real)  # noqa: PTH112, PTH113
        if os.path.exists(real) and not is_usual:  # noqa: PTH110
            raise DataError(
                f"{what} is no regular file",
                got=name,
                rule="A pipe or a device is not opened",
            )
        return real


def fence(images: Path, roots: list[str], max_bytes: int = MAX_BYTES) -> Fence:
    """The fence of a folder, or of the folder that a file is in.

    The user chose this folder, so it may itself be a link: files at its real place may be opened.
    """
    folder = images if images.is_dir() else images.parent
    resolved = []
    for root in roots:
        is_address = "://" in root
        resolved.append(root if is_address else str(Path(root).expanduser().absolute()))
    return Fence(str(folder.absolute()), tuple(resolved), max_bytes)


def require_here(path: Path) -> None:
    """Raise DataError when a source is missing on this machine."""
    if not path.exists():
        raise DataError(
            "A worker does not see the images",
            got=str(path),
            rule="Every machine that ingests reads the source under the same path",
            fix="Mount it there, or set ingest.workers=0",
        )


# Saves 40 us a file. When a root is changed to lead elsewhere meanwhile, its files are refused.
@lru_cache(maxsize=64)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def _within(real: str, folder: str) -> bool:
    root = _real(folder)
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)
