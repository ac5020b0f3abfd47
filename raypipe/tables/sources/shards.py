"""Tar shards in the WebDataset layout: `key.jpg` beside `key.cls`, `key.txt` or `key.json`.

The key is the name up to its first dot. A first pass reads headers and labels (tar_samples.py) and
skips the images. Later each image is read at its offset, in the order of the file, so nothing is
extracted. Compressed tars have no such offsets and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from raypipe.errors import DataError, nearest
from raypipe.images.decode import BadImage
from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.tables.sources import inside
from raypipe.tables.sources.candidate import (
    Candidate,
    Part,
    Read,
    printable,
    require_here,
    with_label,
)
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import json_of, tell_of_split
from raypipe.tables.sources.tar_samples import Sample, read_samples, split_key

COMPANION_BYTES = 2**20  # a label is short
ENDINGS_SHOWN = 5
# A shard, also a compressed one, which is refused with its name. `0.tar.idx` is an index beside it.
_SHARD = re.compile(r"\.(tar|t[gbx]z2?|tar\.(gz|bz2|xz|zst|lz4|z))$", re.IGNORECASE)
_NO_SPLIT = "Leave ingest.from.split_column out, or write a JSON with that key beside each image"


@dataclass(frozen=True)
class Slices:
    """Reads pieces of one file; `at` of a candidate is (offset, size)."""

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
                # The shard may have been cut since it was listed.
                if len(data) == size:
                    yield data
                else:
                    detail = f"{candidate.path}: {len(data)} of {size} bytes"
                    yield BadImage("unreadable", detail)


@dataclass(frozen=True)
class _Keys:
    """Keys of `key.json` that hold label and split (None: not wanted); `task` types the label.

    seen: the keys of all JSON files that were read.
    """

    label: str | None
    split: str | None
    task: Kind
    seen: set[str] = field(default_factory=set)


def shards(
    images: Path, label: str | None, split: str | None, task: Kind, fence: Fence
) -> list[Part]:
    """One part a shard; `label` and `split` are keys of `key.json`.

    Raises DataError for a shard that is incomplete or compressed, and where `label` is wanted and
    no shard has any.
    """
    keys = _Keys(label, split, task)
    if not images.is_dir():
        one = _shard(images, images.name, keys, fence)
        tell_of_split(images, sorted(keys.seen), [label, split])
        _require_labels([images], [one], keys)
        return [one]

    named = [path for path in images.rglob("*") if _SHARD.search(path.name)]
    found = [path for path in named if not path.is_dir()]
    # macOS leaves a file ._0.tar beside 0.tar.
    files = sorted(path for path in found if not inside.is_hidden(path.relative_to(images)))
    if not files:
        raise DataError(
            "There are no tar shards",
            got=str(images),
            rule="They end in .tar",
            fix="Check ingest.from.images",
        )

    # Check every shard before the first is read.
    for file in files:
        fence.require(str(file.absolute()), "A shard")
    parts = []
    for file in files:
        name = file.relative_to(images).as_posix()
        parts.append(_shard(file, name, keys, fence))
    tell_of_split(images, sorted(keys.seen), [label, split])
    _require_labels(files, parts, keys)
    return parts


def _require_labels(files: list[Path], parts: list[Part], keys: _Keys) -> None:
    """Raise DataError if labels are wanted, and no picture of any shard has one."""
    if not keys.label:
        return
    found = [candidate for part in parts for candidate in part.candidates]
    # A label that does not fit the task is another mistake; and so are shards without a picture.
    if not found or any(one.label is not None or one.reason == "label" for one in found):
        return
    file, part = next((f, p) for f, p in zip(files, parts, strict=True) if p.candidates)
    # Labels under an ending that is not read are among them.
    have = sorted({f".{split_key(one.path)[1]}" for one in part.candidates})
    more = f", one of {len(files)} shards without any" if len(files) > 1 else ""
    raise DataError(
        "There are no labels",
        got=f"{file}{more}: files that end in {', '.join(have[:ENDINGS_SHOWN])}",
        rule=f"The label of KEY.jpg is in KEY.cls, KEY.txt or KEY.json (as {keys.label!r})",
        fix="Write one of them beside each image, or set ingest.from.labelled=false to ingest "
        "without",
    )


def _shard(file: Path, name: str, keys: _Keys, fence: Fence) -> Part:
    """All images of one shard as candidates, then the members that are not opened."""
    candidates: list[Candidate] = []
    with file.open("rb") as opened:
        samples, skipped = read_samples(opened, file)
        # A split that no sample can have is a mistake in the configuration.
        if keys.split and not any("json" in sample.companions for sample in samples):
            raise DataError(
                f"{file} has no JSON beside its images",
                rule=f"It names the split {keys.split!r}",
                fix=_NO_SPLIT,
            )
        for sample in samples:
            candidates += _candidates(opened, sample, keys, str(file), name)

    # Members that were not opened are listed in the quarantine.
    for member, why in skipped:
        path = _path(name, member)
        link = Candidate(path, None).refused("link", f"{path}: {why}", shut=True)
        candidates.append(link)
    return Part(Slices(str(file.absolute()), fence), candidates)


def _candidates(
    opened: BinaryIO, sample: Sample, keys: _Keys, where: str, shard: str
) -> Iterator[Candidate]:
    """One candidate a picture of the sample, with the sample's label and split."""
    problem, label, split = "", None, None
    try:
        label, split = _label_and_split(opened, sample, keys, where)
    except _UnclearLabel as e:
        problem = str(e)

    # A picture may be refused for itself, or because its sample has no certain label.
    for picture in sample.pictures:
        offset, size = picture.place
        candidate = Candidate(_path(shard, picture.name), None, None, size, (offset, size))
        if picture.why:
            yield candidate.refused("companion", f"{candidate.path}: {picture.why}")
        elif problem:
            yield candidate.refused("label", f"{candidate.path}: {problem}")
        else:
            yield with_label(candidate, keys.task, label, split)


class _UnclearLabel(Exception):
    """The files beside the pictures give no certain label; the message says why."""


def _label_and_split(opened: BinaryIO, sample: Sample, keys: _Keys, where: str) -> tuple[Any, Any]:
    """(label, split) of a sample; None where there is none.

    The label is in `key.cls`, else in `key.json`, else in `key.txt`. Raises _UnclearLabel, and
    DataError when JSON files lack the label's key.
    """
    if not sample.pictures or not (keys.label or keys.split):
        return None, None
    if sample.why:
        raise _UnclearLabel(sample.why)

    # The split is always in the JSON.
    contents = _companions(opened, sample)
    fields = contents.get("json", {})
    if not isinstance(fields, dict):
        raise _UnclearLabel("its JSON is no object")
    keys.seen.update(fields)
    split = fields.get(keys.split) if keys.split else None
    if not keys.label:
        return None, split

    # cls comes before JSON. Without cls, the JSON must have the label.
    labels_given = [contents["cls"]] if "cls" in contents else []
    if keys.label in fields:
        labels_given.append(fields[keys.label])
    elif "json" in contents and not labels_given:
        raise DataError(
            f"{where}:{printable(sample.key)}.json has no {keys.label!r}",
            rule=nearest(keys.label, sorted(fields)),
            fix="Set ingest.from.label_column",
        )
    if not labels_given:
        return contents.get("txt"), split

    # cls and JSON may both name the label, as long as they mean the same.
    if len(labels_given) == 2:
        cls, other = labels_given
        if labels.read(keys.task, cls) != labels.read(keys.task, other):
            raise _UnclearLabel(f"its cls says {cls.strip()!r} and its JSON {other!r}")
    return labels_given[0], split


def _companions(opened: BinaryIO, sample: Sample) -> dict[str, Any]:
    """The contents of cls, txt (text) and json (parsed) by ending. Raises _UnclearLabel."""
    contents: dict[str, Any] = {}
    for ending, (offset, size) in sample.companions.items():
        # A huge file beside an image is no label.
        if size > COMPANION_BYTES:
            raise _UnclearLabel(f"{ending} has {size:,} bytes")
        opened.seek(offset)
        try:
            text = opened.read(size).decode("utf-8-sig")
            contents[ending] = json_of(text) if ending == "json" else text
        except UnicodeDecodeError:
            raise _UnclearLabel(f"its {ending} is not UTF-8") from None
        except ValueError as e:
            raise _UnclearLabel(f"its JSON cannot be read: {e}") from None
    return contents


def _path(shard: str, member: str) -> str:
    return f"{shard}/{printable(member.removeprefix('./'))}"
