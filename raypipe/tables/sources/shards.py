"""Tar shards in the WebDataset layout: `key.jpg` beside `key.cls`, `key.txt` or `key.json` (key: the name up to its first dot).

A first pass reads the headers and the labels, seeking over the images; later each image is read at its offset, in the order of
the file, so nothing is extracted. Compressed tars have no offsets and are refused.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypipe.errors import DataError, nearest
from raypipe.images.decode import BadImage
from raypipe.tables.sources.candidate import Candidate, Part, Read, require_here, text

BESIDE = ("cls", "json", "txt")  # the first that is there names the class


@dataclass(frozen=True)
class Slices:
    """Reads (offset, size) pieces of one file."""

    file: str

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        require_here(Path(self.file))
        with open(self.file, "rb") as file:  # noqa: PTH123
            for candidate in candidates:
                offset, size = candidate.at
                file.seek(offset)
                data = file.read(size)
                short = BadImage("unreadable", f"{candidate.path}: {len(data)} of {size} bytes")
                yield data if len(data) == size else short


def shards(images: Path, label: str | None, split: str | None) -> list[Part]:
    """One part a shard; `label` and `split` are keys of `key.json`. Raises DataError for a shard that is not whole."""
    files = sorted(p for p in images.rglob("*") if p.name.endswith(".tar")) if images.is_dir() else [images]
    compressed = sorted(images.glob("*.tar.*")) + sorted(images.glob("*.tgz")) if images.is_dir() else []
    if compressed:
        files = [compressed[0]]  # refused below, by name
    if not files:
        raise DataError("There are no tar shards", got=str(images), rule="They end in .tar", fix="Check ingest.from.images")
    root = images if images.is_dir() else images.parent
    return [_shard(file, file.relative_to(root).as_posix(), label, split) for file in files]


def _shard(file: Path, name: str, label: str | None, split: str | None) -> Part:
    pictures: list[tuple[str, str, int, int]] = []
    beside: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                key, _, ending = _key(member.name)
                if not member.isreg() or member.issparse() or _hidden(member.name):
                    continue
                if ending in BESIDE:
                    held = tar.extractfile(member)
                    beside.setdefault(key, {})[ending] = held.read() if held else b""
                else:
                    pictures.append((member.name, key, member.offset_data, member.size))
    except (tarfile.TarError, OSError, EOFError) as e:
        raise DataError(
            f"The shard cannot be read: {e}",
            got=str(file),
            rule="Shards are whole and uncompressed",
            fix="gunzip it, or copy it again",
        ) from None
    if file.stat().st_size < max((offset + size for _, _, offset, size in pictures), default=0):
        raise DataError("The shard is cut off", got=str(file), fix="Copy it again")
    found = []
    for member_name, key, offset, size in pictures:
        around = beside.get(key, {})
        named = _label(around, label, f"{file}:{key}") if label else None
        part = text(_json(around).get(split)) if split else None
        found.append(Candidate(f"{name}/{member_name.removeprefix('./')}", named, part, size, (offset, size)))
    return Part(Slices(str(file.absolute())), found)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") and part != "." for part in name.split("/"))


def _key(name: str) -> tuple[str, str, str]:
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return folder + slash + stem, dot, ending.lower()


def _label(beside: dict[str, bytes], column: str, where: str) -> str | None:
    for ending in BESIDE:
        if ending == "json" and ending in beside:
            row = _json(beside)
            if column not in row:
                raise DataError(
                    f"{where}.json has no {column!r}", fix=f"{nearest(column, sorted(row))} Set ingest.from.label_column"
                )
            return text(row[column])
        if ending in beside:
            return text(beside[ending].decode(errors="replace"))
    return None


def _json(beside: dict[str, bytes]) -> dict[str, object]:
    try:
        row = json.loads(beside.get("json", b"{}"))
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
