"""Tar shards in the WebDataset layout: `key.jpg` beside `key.cls`, `key.txt` or `key.json` (key: the name up to its first dot).

A first pass reads the headers and the labels, seeking over the images; later each image is read at its offset, in the order of
the file, so nothing is extracted. Compressed tars have no offsets and are refused.

Neighbours with one key are a sample. Shards that were joined hold a key more than once: each time it is a sample of its own. A
key whose parts lie apart is put together where that can mean one thing only, and quarantined where it cannot. Every member is
accounted for: a hard link reads the member it names, other links and devices are listed and never opened.
"""

from __future__ import annotations

import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from raypipe.errors import DataError, nearest
from raypipe.images.decode import BadImage
from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Part, Read, printable, require_here, told
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.folder import IMAGES
from raypipe.tables.sources.labels import json_of

BESIDE = ("cls", "json", "txt")  # the first that is there names the class
BESIDE_BYTES = 2**20  # a label is short
Place = tuple[int, int]  # offset and size in the shard


@dataclass(frozen=True)
class Slices:
    """Reads (offset, size) pieces of one file."""

    file: str
    fence: Fence

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        with open(self.file, "rb") as file:  # noqa: PTH123
            for candidate in candidates:
                offset, size = candidate.at
                if size > self.fence.max_bytes:
                    yield self.fence.too_large(candidate.path, size)
                    continue
                file.seek(offset)
                data = file.read(size)
                short = BadImage("unreadable", f"{candidate.path}: {len(data)} of {size} bytes")
                yield data if len(data) == size else short


@dataclass
class _Sample:
    """Neighbouring members of one key: what is beside the pictures, by ending, and the pictures by name."""

    key: str
    beside: dict[str, Place] = field(default_factory=dict)
    pictures: list[tuple[str, Place, str]] = field(
        default_factory=list
    )  # name, place, and why it is not one
    why: str = ""


def shards(
    images: Path, label: str | None, split: str | None, task: Kind, fence: Fence
) -> list[Part]:
    """One part a shard; `label` and `split` are keys of `key.json`. Raises DataError for a shard that is not whole."""
    files = (
        sorted(p for p in images.rglob("*") if p.name.endswith(".tar"))
        if images.is_dir()
        else [images]
    )
    compressed = (
        sorted(images.glob("*.tar.*")) + sorted(images.glob("*.tgz")) if images.is_dir() else []
    )
    if compressed:
        files = [compressed[0]]  # refused below, by name
    if not files:
        raise DataError(
            "There are no tar shards",
            got=str(images),
            rule="They end in .tar",
            fix="Check ingest.from.images",
        )
    root = images if images.is_dir() else images.parent
    if images.is_dir():
        for file in files:
            fence.require(str(file.absolute()), "A shard")
    return [
        _shard(file, file.relative_to(root).as_posix(), label, split, task, fence) for file in files
    ]


def _shard(
    file: Path, name: str, label: str | None, split: str | None, task: Kind, fence: Fence
) -> Part:
    found = []
    with file.open("rb") as opened:
        samples, others = _samples(opened, file)
        if split and not any("json" in s.beside for s in samples):
            raise DataError(
                f"{file} has no JSON beside its images",
                rule=f"It names the split {split!r}",
                fix=_NO_SPLIT,
            )
        for sample in samples:
            said = _said(opened, sample, label, split, task, str(file))
            for member, place, why in sample.pictures:
                candidate = Candidate(_path(name, member), None, None, place[1], place)
                if why:
                    candidate = candidate.refused("companion", f"{candidate.path}: {why}")
                elif isinstance(said, str):
                    candidate = candidate.refused("label", f"{candidate.path}: {said}")
                else:
                    candidate = told(candidate, task, *said)
                found.append(candidate)
    for member, why in others:
        found.append(
            Candidate(_path(name, member), None).refused(
                "link", f"{_path(name, member)}: {why}", shut=True
            )
        )
    return Part(Slices(str(file.absolute()), fence), found)


def _samples(opened: BinaryIO, file: Path) -> tuple[list[_Sample], list[tuple[str, str]]]:
    """Samples in the order of the file, and members that are not opened, with the reason."""
    samples: list[_Sample] = []
    others: list[tuple[str, str]] = []
    places: dict[str, Place] = {}  # of the last member with a name: what a hard link means
    for member in _members(opened, file):
        key, ending = _key(member.name)
        if member.isdir() or _hidden(member.name):
            continue
        if member.islnk() and (target := member.linkname.removeprefix("./")) in places:
            place = places[target]
        elif member.isreg() and not member.issparse():
            place = member.offset_data, member.size
        else:
            kind = (
                "a link"
                if member.islnk() or member.issym()
                else "a sparse file"
                if member.issparse()
                else "no file"
            )
            others.append((member.name, f"it is {kind} and was not opened"))
            continue
        places[member.name.removeprefix("./")] = place
        sample = samples[-1] if samples and samples[-1].key == key else None
        again = sample and (
            ending in sample.beside or any(n == member.name for n, _, _ in sample.pictures)
        )
        if sample is None or again:  # the next shard's sample, where two were joined
            sample = _Sample(key)
            samples.append(sample)
        if ending in BESIDE:
            sample.beside[ending] = place
        else:
            sample.pictures.append((member.name, place, ""))
    for sample in samples:
        _without_companions(sample)
    return _together(samples), others


def _without_companions(sample: _Sample) -> None:
    """`a.mask.png` is a field of the sample `a`, not an image of its own; alone it may be either."""

    def why(name: str) -> str:
        ending = _key(name)[1]
        if "." not in ending or f".{ending.rpartition('.')[2]}" not in IMAGES:
            return ""
        key = sample.key.rpartition("/")[2]
        return f"it is the field {ending!r} of the sample {key!r}: a key ends at the first dot; rename it if it is an image"

    sample.pictures = [(name, place, why(name)) for name, place, _ in sample.pictures]


def _together(samples: list[_Sample]) -> list[_Sample]:
    """One sample of every key whose parts lie apart; where they could be put together in two ways, each says so in `why`."""
    by_key: defaultdict[str, list[_Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)
    merged: list[_Sample] = []
    for sample in samples:
        same = by_key[sample.key]
        names = [n for s in same for n in (*s.beside, *(picture[0] for picture in s.pictures))]
        if len(same) == 1:
            merged.append(sample)
        elif len(set(names)) == len(names):  # images first, labels later: each part is there once
            if sample is same[0]:
                pictures = [picture for s in same for picture in s.pictures]
                merged.append(
                    _Sample(sample.key, {e: p for s in same for e, p in s.beside.items()}, pictures)
                )
        else:
            whole = all(s.pictures and s.beside.keys() == same[0].beside.keys() for s in same)
            why = f"the shard holds the key {sample.key!r} {len(same)} times, and which label is whose cannot be told"
            sample.why = "" if whole else why
            merged.append(sample)
    return merged


def _members(opened: BinaryIO, file: Path) -> Iterator[tarfile.TarInfo]:
    """Every member, also behind an end mark (`cat a.tar b.tar`). Raises DataError for a shard that is not whole.

    tarfile itself stops at a damaged header and at the first end mark without a word.
    """
    size, at = os.fstat(opened.fileno()).st_size, 0
    ended = False
    try:
        while at < size:
            opened.seek(at)
            block = opened.read(tarfile.BLOCKSIZE)
            if not block.strip(b"\0"):
                at, ended = at + len(block), True
                continue
            opened.seek(at)
            ended, start = False, at
            with tarfile.open(fileobj=opened, mode="r:") as tar:
                for member in tar:
                    if (
                        member.offset < at or member.size < 0
                    ):  # a negative size would lead back to the start, for ever
                        raise tarfile.ReadError(f"{printable(member.name)} has a negative size")
                    at = member.offset_data
                    if member.isreg() and member.offset_data + member.size > size:
                        raise DataError("The shard is cut off", got=str(file), fix="Copy it again")
                    yield member
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
    if not ended:
        raise DataError(
            "The shard is cut off: it has no end mark",
            got=str(file),
            rule="A tar ends with blocks of zeros",
            fix="Copy it again",
        )


def _said(
    opened: BinaryIO, sample: _Sample, label: str | None, split: str | None, task: Kind, where: str
) -> tuple[Any, Any] | str:
    """(label, split) as the files beside the pictures give them, or why they cannot be told."""
    if not sample.pictures or not (label or split):
        return None, None
    if sample.why:
        return sample.why
    beside: dict[str, Any] = {}
    for ending, (offset, size) in sample.beside.items():
        if size > BESIDE_BYTES:
            return f"{ending} has {size:,} bytes"
        opened.seek(offset)
        try:
            text = opened.read(size).decode("utf-8-sig")
            beside[ending] = json_of(text) if ending == "json" else text
        except UnicodeDecodeError:
            return f"its {ending} is not UTF-8"
        except ValueError as e:
            return f"its JSON cannot be read: {e}"
    row = beside.get("json", {})
    if not isinstance(row, dict):
        return "its JSON is no object"
    part = row.get(split) if split else None
    if not label:
        return None, part
    named = [beside["cls"]] if "cls" in beside else []
    if label in row:
        named.append(row[label])
    elif "json" in beside and not named:
        raise DataError(
            f"{where}:{printable(sample.key)}.json has no {label!r}",
            fix=f"{nearest(label, sorted(row))} Set ingest.from.label_column",
        )
    if len(named) > 1 and labels.read(task, named[0]) != labels.read(task, named[1]):
        return f"its cls says {named[0].strip()!r} and its JSON {named[1]!r}"
    return (named or [beside.get("txt")])[0], part


_NO_SPLIT = "Leave ingest.from.split_column out, or write a JSON with that key beside each image"


def _path(shard: str, member: str) -> str:
    return f"{shard}/{printable(member.removeprefix('./'))}"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") and part != "." for part in name.split("/"))


def _key(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()
