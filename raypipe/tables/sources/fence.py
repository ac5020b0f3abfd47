"""Which files a source may open: those in its own folder, and in folders that the user named (`ingest.from.roots`).

A data set is not trusted. A row or a labels file may name `/proc/self/environ` or `../secret`, a link may lead there, and
what does not decode is kept in the quarantine table for everybody to read. So every file that data names, and every link,
is followed to its real place first. What lies elsewhere is not opened, and none of its bytes are kept.

Not a defence against somebody who changes the folder while it is read, nor against hard links that were made on this disk.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from raypipe.errors import DataError
from raypipe.images.decode import BadImage

MAX_BYTES = (
    2**29
)  # Arrow holds less than 2 GiB a value, and the 64 megapixels we accept take 192 MB
Read = bytes | memoryview | BadImage
ROOTS = "Copy it there, or set ingest.from.roots to the folders that paths and links may lead to"
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(
    os, "O_NOFOLLOW", 0
)  # a pipe would be waited for


@dataclass(frozen=True)
class Fence:
    """`base` is where relative names start, and open; so are `roots`. No file of more than `max_bytes` is read."""

    base: str
    roots: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES

    def place(self, name: str) -> str:
        """The real path of a name. Raises BadImage when it lies outside."""
        try:
            real = os.path.realpath(os.path.join(self.base, name))  # noqa: PTH118  (joins an absolute name as we want it)
            open_to_us = any(_within(real, root) for root in (self.base, *self.roots))
        except (OSError, ValueError) as e:  # ValueError: a name with a null character
            raise BadImage("unreadable", f"{name!r}: {e}") from None
        if not open_to_us:
            raise BadImage("outside", f"{name} is not in {self.base}: it was not opened", ROOTS)
        return real

    def read(self, name: str) -> Read:
        """The bytes of one file, or why they cannot be had. Raises DataError when the folder itself is not here."""
        try:
            real = self.place(name)
            if not stat.S_ISREG(os.stat(real).st_mode):  # noqa: PTH116  (opening a device may do something)
                raise FileNotFoundError("no regular file")
            with open(os.open(real, os.O_RDONLY | _WITHOUT_WAITING), "rb") as file:  # noqa: PTH123
                size = os.fstat(file.fileno()).st_size
                data = file.read(self.max_bytes + 1) if size <= self.max_bytes else b""
            return (
                data
                if max(size, len(data)) <= self.max_bytes
                else self.too_large(name, max(size, len(data)))
            )
        except BadImage as bad:
            return bad
        except (OSError, ValueError) as e:
            require_here(Path(self.base))
            return BadImage(
                "unreadable",
                f"{name}: {e.strerror if isinstance(e, OSError) and e.strerror else e}",
            )

    def bounded(self, data: bytes | memoryview, name: str) -> Read:
        """Bytes that a container already gave out."""
        return data if len(data) <= self.max_bytes else self.too_large(name, len(data))

    def too_large(self, name: str, size: int) -> BadImage:
        most = f"at most {self.max_bytes:,} are read"
        return BadImage(
            "too_large",
            f"{name}: {size:,} bytes, {most}",
            "Set ingest.from.max_bytes, or make it smaller",
        )

    def require(self, name: str, what: str) -> str:
        """The real path of a file the source consists of. Raises DataError when it lies outside, or would be waited for."""
        try:
            real = self.place(name)
            if os.path.exists(real) and not os.path.isdir(real) and not os.path.isfile(real):  # noqa: PTH110, PTH112, PTH113
                raise DataError(
                    f"{what} is no regular file", got=name, rule="A pipe or a device is not opened"
                )
            return real
        except BadImage:
            raise DataError(
                f"{what} leads out of its folder",
                got=name,
                rule=f"Nothing outside of {self.base} is opened",
                fix=ROOTS,
            ) from None


def fence(images: Path, roots: list[str], max_bytes: int = MAX_BYTES) -> Fence:
    """Around a folder, or around the folder of a file."""
    folder = images if images.is_dir() else images.parent
    # The folder is the user's own word, and may itself be a link: its real place is what is open.
    named = (r if "://" in r else str(Path(r).expanduser().absolute()) for r in roots)
    return Fence(str(folder.absolute()), tuple(named), max_bytes)


def require_here(path: Path) -> None:
    if not path.exists():
        raise DataError(
            "A worker does not see the images",
            got=str(path),
            rule="Every machine that ingests reads the source under the same path",
            fix="Mount it there, or set ingest.workers=0",
        )


@lru_cache(
    maxsize=64
)  # 40 us a file. A root that is made to lead elsewhere meanwhile refuses what it holds, loudly
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def _within(real: str, folder: str) -> bool:
    root = _real(folder)
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)
