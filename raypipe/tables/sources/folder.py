"""Image files: a folder with a table of labels, a folder with a class a sub-folder, or just the files that a table names.

Only images decide what the folders mean: a Thumbs.db or README beside them is listed, quarantined, and changes nothing. What
can be read in two ways (class folders beside images, `train` and `val` beside folders of other names) is refused.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Files, Part, printable, told
from raypipe.tables.sources.fence import ROOTS, Fence
from raypipe.tables.sources.labels import Labels

IMAGES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp"}
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
_STARTS = (
    b"\xff\xd8\xff",
    b"\x89PNG",
    b"RIFF",
    b"II*\0",
    b"MM\0*",
    b"BM",
)  # JPEG, PNG, WebP, TIFF, BMP
_NOT_UTF8 = "the file's name is not UTF-8; rename it"
_MOVE = (
    "Move the images, set ingest.from.labels to a table with columns file,label, "
    "or ingest.from.labelled=false to ingest without"
)


@dataclass(frozen=True)
class File:
    """A file below the root. `shut` says why it is not opened; `image` is what its ending or its first bytes say."""

    bytes: int
    image: bool
    reason: str = ""
    detail: str = ""


def whole(
    root: Path, labels: Labels | None, labelled: bool, table: Path | None, task: Kind, fence: Fence
) -> tuple[list[Part], str]:
    """Every file below `root`: what is no image is for the quarantine to say. And one line on how the folder was understood.

    Without labels the first folder of a path is its class. Raises DataError when labels name files that are not there, and
    for folders that can be read in two ways.
    """
    files = _walk(fence)
    if table is not None and table.resolve().is_relative_to(root.resolve()):
        files.pop(table.resolve().relative_to(root.resolve()).as_posix(), None)
    if not files:
        raise DataError(
            "The image folder is empty",
            got=str(root),
            rule="It holds at least one file",
            fix="Check ingest.from.images",
        )
    if labels is not None:
        _require_all(sorted(set(labels) - set(files)), len(labels), fence, str(table))
        found, layout = labels, f"the labels of {table}"
    else:
        found, layout = _layout([name for name, file in files.items() if file.image], labelled)
    return [
        Part(Files(fence), [_candidate(name, file, found, task) for name, file in files.items()])
    ], layout


def named(labels: Labels, table: str, task: Kind, fence: Fence) -> list[Part]:
    """Only the files that the table names, in its order. Raises DataError for one that is missing or lies elsewhere."""
    sizes = {name: _size(fence, name) for name in labels}
    _require_all([name for name, size in sizes.items() if size is None], len(labels), fence, table)
    found = [_candidate(name, File(sizes[name] or 0, True), labels, task) for name in labels]
    return [Part(Files(fence), found)]


def _candidate(name: str, file: File, labels: Labels, task: Kind) -> Candidate:
    candidate = Candidate(printable(name), None, None, file.bytes)
    if file.reason:
        return candidate.refused(file.reason, file.detail, shut=True)
    if candidate.path != name:  # Arrow strings are UTF-8, and the reader finds a file by its path
        return candidate.refused("name", f"{candidate.path}: {_NOT_UTF8}", shut=True)
    return told(candidate, task, *labels[name]) if name in labels else candidate


def _walk(fence: Fence) -> dict[str, File]:
    """{relative posix path: file}, sorted; hidden ones left out. A folder is read once, under its own name before any link's.

    A link that leads out of the fence, or to a folder that was read already, is listed as a file that is not opened.
    """
    walk = _Walk(fence)
    try:
        walk.into(fence.base, "")
        for path, name in walk.links:  # grows while it is followed
            walk.follow(path, name)
    except OSError as e:
        raise DataError(f"The image folder cannot be read: {e}", got=fence.base) from None
    return dict(sorted(walk.found.items()))


class _Walk:
    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._been: dict[tuple[int, int], str] = {}  # which folder was read under which name
        self.found: dict[str, File] = {}
        self.links: list[tuple[str, str]] = []

    def into(self, start: str, prefix: str) -> None:
        ahead = [(start, prefix)]  # no recursion: folders may be nested deeper than Python's stack
        while ahead:
            folder, below = ahead.pop()
            self._been[_identity(folder)] = below
            with os.scandir(folder) as opened:  # 5 times pathlib's pace
                entries = list(opened)
            if any(
                entry.name == "_delta_log" for entry in entries
            ):  # maybe the one that is written
                name = below.rstrip("/") or "."
                self.found[name] = File(
                    0, False, "table", f"{name} is a Delta table: not searched for images"
                )
                continue
            for entry in entries:
                name = below + entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    self.links.append((entry.path, name))
                elif entry.is_dir():
                    ahead.append((entry.path, name + "/"))
                elif entry.is_file():  # pipes and sockets are not files
                    self.found[name] = File(entry.stat().st_size, _is_image(entry.path, name))

    def follow(self, path: str, name: str) -> None:
        try:
            real = Path(self._fence.place(path))
        except BadImage as bad:
            self.found[name] = File(0, _named(name), bad.reason, str(bad))
            return
        if real.is_dir():
            already = self._been.get(_identity(str(real)))
            if already is None:
                self.into(str(real), name + "/")
            elif not f"{name}/".startswith(
                already
            ):  # a link back up says nothing new, one to another folder another class
                self.found[name] = File(
                    0, False, "link", f"{name} links to {already}, whose images are read there"
                )
        elif real.is_file():
            self.found[name] = File(real.stat().st_size, _is_image(str(real), name))
        elif not real.exists():  # broken: kept, so that the quarantine names it
            self.found[name] = File(0, _named(name))


def _identity(folder: str) -> tuple[int, int]:
    about = os.stat(folder)  # noqa: PTH116
    return about.st_dev, about.st_ino


def _layout(images: list[str], labelled: bool) -> tuple[Labels, str]:
    """Classes and splits from the folders of the images alone. Raises DataError for folders that can be read in two ways."""
    parts = {name: PurePosixPath(name).parts for name in images}
    loose = [name for name, path in parts.items() if len(path) == 1]
    tops = {path[0] for path in parts.values() if len(path) > 1}
    splits = {top for top in tops if top.lower() in SPLITS}
    deep = {name for name, path in parts.items() if len(path) > 2}
    below = sorted(name for name in parts if parts[name][0] in splits and name not in loose)
    if not tops:
        return {}, "images without folders: no labels"
    if splits and splits == tops and not loose:
        if deep.issuperset(below):
            given = {
                name: (path[1] if labelled else None, SPLITS[path[0].lower()])
                for name, path in parts.items()
            }
            return given, f"a class a folder, below the splits {', '.join(sorted(tops))}"
        if not labelled:
            return {
                name: (None, SPLITS[path[0].lower()]) for name, path in parts.items()
            }, "a split a folder: no labels"
        if deep.isdisjoint(below):
            raise DataError(
                "There are no labels: the folders are splits and hold no class folders",
                got=", ".join(sorted(tops)),
                rule="Below train, val and test the next folder is the class",
                fix=_MOVE,
            )
        raise _two_ways("images lie beside class folders", next(n for n in below if n not in deep))
    if not labelled:
        return {}, "labels are not asked for"
    if loose:
        raise _two_ways("images lie beside the folders", loose[0])
    if splits and (
        len(splits) > 1 or not deep.isdisjoint(below)
    ):  # a single flat folder `train` may be a class: cars, trains
        raise _two_ways(
            f"{', '.join(sorted(splits))} would be splits, and others are not",
            sorted(tops - splits)[0],
        )
    return {name: (path[0], None) for name, path in parts.items()}, "a class a folder"


def _two_ways(what: str, example: str) -> DataError:
    return DataError(
        f"The folders can be read in two ways: {what}",
        got=example,
        rule="Either every first folder is a class, or every first folder is train, val or test and holds class folders",
        fix=_MOVE,
    )


def _named(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGES


def _is_image(path: str, name: str) -> bool:
    """By its ending; without a known one by its first bytes."""
    if _named(name):
        return True
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # noqa: PTH123
            return file.read(4).startswith(_STARTS)
    except OSError:
        return False


def _require_all(missing: list[str], of: int, fence: Fence, table: str) -> None:
    if not missing:
        return
    for name in missing:
        try:
            fence.place(name)
        except BadImage as bad:
            if bad.reason == "outside":
                raise DataError(
                    f"{table} names a file outside of {fence.base}",
                    got=printable(name),
                    rule="Nothing outside of the image folder is opened; nothing was written",
                    fix=ROOTS,
                ) from None
    raise DataError(
        f"{table} names {len(missing)} of {of} files that are not in {fence.base}",
        got=missing[0],
        rule="ingest.from.file_column holds paths relative to the folder",
        fix="Mend the labels or ingest.from.images; nothing was written",
    )


def _size(fence: Fence, name: str) -> int | None:
    """None for what is not there, or not for us."""
    try:
        path = Path(fence.place(name))
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError, BadImage):
        return None


def strays(parts: list[Part]) -> Counter[str]:
    """Files whose ending says that they are no images, by ending."""
    return Counter(
        PurePosixPath(c.path).suffix.lower() or c.path
        for p in parts
        for c in p.candidates
        if not _named(c.path)
    )
