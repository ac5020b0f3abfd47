"""The samples of a WebDataset tar: which members belong together, and where their bytes are.

Neighbouring members with one key are a sample. Four cases need care:
- shards that were joined (`cat a.tar b.tar`) repeat a key: each time it is a sample of its own;
- parts of one key may lie apart (all images first, then all labels): they are put together when
  only one way is possible; otherwise the sample is quarantined;
- a hard link reads the member that it names;
- other links and devices are listed and never opened.
Every member is accounted for.
"""

from __future__ import annotations

import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from raypipe.errors import DataError
from raypipe.tables.sources.candidate import printable
from raypipe.tables.sources.walk import IMAGES

COMPANIONS = ("cls", "json", "txt")  # endings of files with a label
Place = tuple[int, int]  # offset and size in the shard


class Picture(NamedTuple):
    """A member that may be an image. `why` says why it is not one; "" when it may be."""

    name: str
    place: Place
    why: str = ""


@dataclass
class Sample:
    """Members of one key: files with a label by ending, and pictures.

    `why` says why it is uncertain which label belongs to which picture; "" when it is certain.
    """

    key: str
    companions: dict[str, Place] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)
    why: str = ""

    def has(self, name: str, ending: str) -> bool:
        """Whether the sample has such a companion or picture already."""
        return ending in self.companions or any(p.name == name for p in self.pictures)

    def parts(self) -> list[str]:
        """The endings of its companions and the names of its pictures."""
        return [*self.companions, *(picture.name for picture in self.pictures)]


def read_samples(opened: BinaryIO, file: Path) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Samples in the order of the file, and (name, reason) of members that are not opened.

    Raises DataError for a shard that is incomplete.
    """
    samples: list[Sample] = []
    skipped: list[tuple[str, str]] = []
    # The place of the last member with a name: a hard link means that one.
    places: dict[str, Place] = {}
    for member in _members(opened, file):
        if member.isdir() or _is_hidden(member.name):
            continue
        place = _place(member, places)
        if place is None:
            skipped.append((member.name, f"it is {_kind(member)} and was not opened"))
            continue
        places[member.name.removeprefix("./")] = place

        # A repeated part of the same key starts the next sample: two shards were joined here.
        key, ending = split_key(member.name)
        sample = samples[-1] if samples else None
        if sample is None or sample.key != key or sample.has(member.name, ending):
            sample = Sample(key)
            samples.append(sample)

        if ending in COMPANIONS:
            sample.companions[ending] = place
        else:
            sample.pictures.append(Picture(member.name, place))

    for sample in samples:
        _mark_fields(sample)
    return _join_parts(samples), skipped


def _place(member: tarfile.TarInfo, places: dict[str, Place]) -> Place | None:
    """Where the member's bytes are; None for a member that is not opened."""
    target = member.linkname.removeprefix("./")
    if member.islnk() and target in places:
        return places[target]
    if member.isreg() and not member.issparse():
        return member.offset_data, member.size
    return None


def _kind(member: tarfile.TarInfo) -> str:
    if member.islnk() or member.issym():
        return "a link"
    return "a sparse file" if member.issparse() else "no file"


def _mark_fields(sample: Sample) -> None:
    """Mark pictures that are fields of a sample: `a.mask.png` is the field mask.png of `a`.

    It may also be an image whose name has a dot, so it is quarantined with a reason.
    """
    marked = []
    for picture in sample.pictures:
        _, ending = split_key(picture.name)
        suffix = "." + ending.rpartition(".")[2]
        if "." in ending and suffix in IMAGES:
            key = sample.key.rpartition("/")[2]
            why = (
                f"it is the field {ending!r} of the sample {key!r}: "
                "a key ends at the first dot; rename it if it is an image"
            )
            picture = picture._replace(why=why)
        marked.append(picture)
    sample.pictures = marked


def _join_parts(samples: list[Sample]) -> list[Sample]:
    """One sample for every key whose parts lie apart.

    Where the parts could be joined in two ways, they stay apart and each gets a reason in `why`.
    """
    by_key: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)

    joined: list[Sample] = []
    for sample in samples:
        same_key = by_key[sample.key]
        if len(same_key) == 1:
            joined.append(sample)
        elif _each_part_once(same_key):
            # For example images first, labels later. The sample stands at its first part.
            if sample is same_key[0]:
                joined.append(_merged(same_key))
        else:
            # Samples of joined shards are complete in themselves; others are ambiguous.
            if not _all_complete(same_key):
                sample.why = (
                    f"the shard holds the key {sample.key!r} {len(same_key)} times, "
                    "and which label is whose cannot be told"
                )
            joined.append(sample)
    return joined


def _each_part_once(samples: list[Sample]) -> bool:
    parts: list[str] = []
    for sample in samples:
        parts += sample.parts()
    return len(set(parts)) == len(parts)


def _all_complete(samples: list[Sample]) -> bool:
    """Whether all have pictures and the same companions."""
    endings = samples[0].companions.keys()
    return all(sample.pictures and sample.companions.keys() == endings for sample in samples)


def _merged(samples: list[Sample]) -> Sample:
    merged = Sample(samples[0].key)
    for sample in samples:
        merged.companions |= sample.companions
        merged.pictures += sample.pictures
    return merged


def _members(opened: BinaryIO, file: Path) -> Iterator[tarfile.TarInfo]:
    """Every member, also behind an end mark (`cat a.tar b.tar`).

    Raises DataError for a shard that is incomplete: tarfile itself stops at a damaged header and at
    the first end mark without an error.
    """
    size = os.fstat(opened.fileno()).st_size
    at = 0
    has_ended = False
    try:
        while at < size:
            # Blocks of zeros are an end mark; another tar may follow.
            opened.seek(at)
            block = opened.read(tarfile.BLOCKSIZE)
            if not block.strip(b"\0"):
                at += len(block)
                has_ended = True
                continue

            opened.seek(at)
            has_ended = False
            start = at
            with tarfile.open(fileobj=opened, mode="r:") as tar:
                for member in tar:
                    _check_member(member, at, size, file)
                    at = member.offset_data
                    yield member
                # Without progress this loop would never end.
                if tar.offset <= start:
                    raise tarfile.ReadError(f"there is no member at byte {at}")
                at = tar.offset
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as e:
        raise DataError(
            f"The shard cannot be read: {e}",
            got=str(file),
            rule="Shards are whole and uncompressed",
            fix="gunzip it, or copy it again",
        ) from None
    if not has_ended:
        raise DataError(
            "The shard is cut off: it has no end mark",
            got=str(file),
            rule="A tar ends with blocks of zeros",
            fix="Copy it again",
        )


def _check_member(member: tarfile.TarInfo, at: int, size: int, file: Path) -> None:
    """Raise an error for a member that starts before byte `at` or ends behind the file."""
    # A negative size would lead back to the start, and the loop would not end.
    if member.offset < at or member.size < 0:
        raise tarfile.ReadError(f"{printable(member.name)} has a negative size")
    if member.isreg() and member.offset_data + member.size > size:
        raise DataError("The shard is cut off", got=str(file), fix="Copy it again")


def split_key(name: str) -> tuple[str, str]:
    """(key, ending) of a member's name: the file name is cut at its first dot."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part != "." for part in name.split("/"))
