"""What every source yields: candidates in a stable order, grouped by container.

A container (a file, a row group, a shard) is what one task reads from. Listing is cheap and decodes
nothing. Images are read later, perhaps on another machine, so a reader is a small picklable value.
Called with some of its candidates it yields, in their order, the bytes of each, or a BadImage for
one that cannot be read. When the whole container is missing it raises DataError: a worker without
the disk must not fill the quarantine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.tables.sources.fence import Fence, Read, require_here

__all__ = [
    "Candidate",
    "Files",
    "Part",
    "Read",
    "Reader",
    "printable",
    "require_here",
    "with_label",
]


class Candidate(NamedTuple):
    """An image that a source names; whether it decodes is checked later.

    With a `reason` it goes to the quarantine.
    """

    path: str
    """For the table's `path` column: with /, relative to what the source was given."""
    label: str | None
    split: str | None = None
    bytes: int = 0
    """Size in its container; 0 when unknown."""
    at: tuple[int, ...] = ()
    """Place in its container, as its reader understands it."""
    reason: str = ""
    detail: str = ""
    shut: bool = False
    """Never read its bytes. Without this, the quarantine keeps them."""

    def refused(self, reason: str, detail: str, shut: bool = False) -> Candidate:
        """The candidate for the quarantine, without label and split. A first reason stays."""
        # A second reason may only forbid to read the bytes.
        if self.reason:
            return self._replace(shut=self.shut or shut)
        return self._replace(
            label=None,
            split=None,
            reason=reason,
            detail=detail,
            shut=shut,
        )


class Reader(Protocol):
    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]: ...


@dataclass(frozen=True)
class Part:
    """A container: its reader and its candidates. One call reads at most `rows` of them."""

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


def with_label(candidate: Candidate, task: Kind, label: Any, split: Any) -> Candidate:
    """The candidate with label and split as its source gives them; refused when one is invalid."""
    # No label and no split are valid: both are None then.
    label_read = labels.read(task, label)
    if label_read.why:
        return candidate.refused("label", f"{candidate.path}: {label_read.why}")

    split_read = labels.name(split)
    if split_read.why:
        return candidate.refused("split", f"{candidate.path}: {split_read.why}")

    return candidate._replace(label=label_read.text, split=split_read.text)


def printable(name: str) -> str:
    """A file name as UTF-8, which Arrow needs. Other bytes become \\xe9, so names stay distinct."""
    return os.fsencode(name).decode(errors="backslashreplace")
