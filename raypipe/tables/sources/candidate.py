"""What every source yields: candidates in a stable order, grouped by the container that one task reads them from.

Listing is cheap and decodes nothing. Reading happens later, maybe on another machine, so a reader is a small picklable value:
called with some of its own candidates it yields, in their order, the bytes of each, or a BadImage for one that cannot be had.
A container that is missing as a whole raises DataError: a worker without the disk must not fill the quarantine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.tables.sources.fence import Fence, Read, require_here

__all__ = ["Candidate", "Files", "Part", "Read", "Reader", "printable", "require_here", "told"]


class Candidate(NamedTuple):
    """An image somebody says is worth having. `at` is its place in its container, `bytes` its size there (0: unknown).

    With a `reason` it is quarantined whatever its bytes are; they are kept too, unless `shut`: then nothing is read.
    """

    path: str  # posix, relative to what the source was given: what the table's `path` column keeps
    label: str | None
    split: str | None = None
    bytes: int = 0
    at: tuple[int, ...] = ()
    reason: str = ""
    detail: str = ""
    shut: bool = False

    def refused(self, reason: str, detail: str, shut: bool = False) -> Candidate:
        """The first reason stays."""
        if self.reason:
            return self._replace(shut=self.shut or shut)
        return self._replace(label=None, split=None, reason=reason, detail=detail, shut=shut)


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

    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        for candidate in candidates:
            yield self.fence.read(candidate.path)


def told(candidate: Candidate, task: Kind, label: Any, split: Any) -> Candidate:
    """The candidate with the label and the split that its source gives it, or refused with the reason."""
    read, part = labels.read(task, label), labels.name(split)
    if read.why:
        return candidate.refused("label", f"{candidate.path}: {read.why}")
    if part.why:
        return candidate.refused("split", f"{candidate.path}: {part.why}")
    return candidate._replace(label=read.text, split=part.text)


def printable(name: str) -> str:
    """A file name as Arrow can keep it: bytes that are not UTF-8 as \\xe9, so that two names stay two."""
    return os.fsencode(name).decode(errors="backslashreplace")
