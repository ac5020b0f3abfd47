"""What every source yields: candidates in a stable order, grouped by the container that one task reads them from.

Listing is cheap and decodes nothing. Reading happens later, maybe on another machine, so a reader is a small picklable value:
called with some of its own candidates it yields, in their order, the bytes of each, or a BadImage for one that cannot be had.
A container that is missing as a whole raises DataError: a worker without the disk must not fill the quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raypipe.errors import DataError
from raypipe.images.decode import BadImage

Read = bytes | memoryview | BadImage


class Candidate(NamedTuple):
    """An image somebody says is worth having. `at` is its place in its container, `bytes` its size there (0: unknown)."""

    path: str  # posix, relative to what the source was given: what the table's `path` column keeps
    label: str | None
    split: str | None = None
    bytes: int = 0
    at: tuple[int, ...] = ()


class Reader(Protocol):
    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]: ...


@dataclass(frozen=True)
class Part:
    """A container's reader and all it holds. At most `rows` candidates are read by one call."""

    read: Reader
    candidates: list[Candidate]
    rows: int = 32


@dataclass(frozen=True)
class Files:
    """Reads files below a folder."""

    root: str

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        for candidate in candidates:
            yield read_file(Path(self.root), candidate.path)


def read_file(root: Path, name: str) -> Read:
    """The bytes of one file, or why they cannot be had. Raises DataError when the folder itself is not here."""
    try:
        path = root / name
        if not path.is_file():  # a pipe would be waited for, a folder is no image
            raise FileNotFoundError("no such file")
        return path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a name with a null character
        require_here(root)
        return BadImage("unreadable", f"{name}: {e}")


def require_here(path: Path) -> None:
    if not path.exists():
        raise DataError(
            "A worker does not see the images",
            got=str(path),
            rule="Every machine that ingests reads the source under the same path",
            fix="Mount it there, or set ingest.workers=0",
        )


def text(value: Any) -> str | None:
    """A label or split as the table keeps it; blank is none."""
    return (str(value).strip() or None) if value is not None else None
