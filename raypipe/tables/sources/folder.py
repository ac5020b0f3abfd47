"""Image files: a folder with a table of labels, a folder with a class a sub-folder, or just the files that a table names."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from raypipe.errors import DataError
from raypipe.tables.sources.candidate import Candidate, Files, Part
from raypipe.tables.sources.labels import Labels

IMAGES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp"}
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def whole(root: Path, labels: Labels | None, labelled: bool, table: Path | None) -> list[Part]:
    """Every file below `root`: what is no image is for the quarantine to say, not for a list of endings.

    Without labels the first folder of a path is its class. Raises DataError when labels name files that are not there.
    """
    itself = table.resolve() if table else None
    files = {name: size for name, size in _walk(root).items() if itself is None or (root / name).resolve() != itself}
    if not files:
        raise DataError(
            "The image folder is empty", got=str(root), rule="It holds at least one file", fix="Check ingest.from.images"
        )
    found = (_classes(files) or {}) if labels is None and labelled else (labels or {})
    if labels:
        _require_all(sorted(set(labels) - set(files)), len(labels), root, str(table))
    return [Part(Files(str(root)), [Candidate(_plain(n), *found.get(n, (None, None)), size) for n, size in files.items()])]


def named(root: Path, labels: Labels, table: str) -> list[Part]:
    """Only the files that the table names, in its order."""
    sizes = {name: _size(root / name) for name in labels}
    _require_all([name for name, size in sizes.items() if size is None], len(labels), root, table)
    return [Part(Files(str(root)), [Candidate(name, *labels[name], sizes[name] or 0) for name in labels])]


def _walk(root: Path) -> dict[str, int]:
    """{relative posix path: bytes} of all files, sorted; hidden ones left out. Links are followed, a folder is read once."""
    found: dict[str, int] = {}
    been: set[tuple[int, int]] = set()

    def into(folder: str, prefix: str) -> None:
        stat = os.stat(folder)  # noqa: PTH116  (os.scandir is 5 times pathlib's pace)
        if (stat.st_dev, stat.st_ino) in been:  # a link back up, or two links to one place
            return
        been.add((stat.st_dev, stat.st_ino))
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    into(entry.path, f"{prefix}{entry.name}/")
                elif entry.is_file():
                    found[prefix + entry.name] = entry.stat().st_size
                elif entry.is_symlink():  # broken: kept, so that the quarantine names it. Pipes and sockets are not files
                    found[prefix + entry.name] = 0

    try:
        into(str(root), "")
    except OSError as e:
        raise DataError(f"The image folder cannot be read: {e}", got=str(root)) from None
    return dict(sorted(found.items()))


def _classes(files: dict[str, int]) -> Labels | None:
    """Labels from the first folder, or the second when the first are all splits; None when images lie beside the folders."""
    deep = {name: PurePosixPath(name).parts for name in files if "/" in name}
    if any("/" not in name and PurePosixPath(name).suffix.lower() in IMAGES for name in files):
        return None
    if deep and all(parts[0].lower() in SPLITS and len(parts) > 2 for parts in deep.values()):
        return {name: (parts[1], SPLITS[parts[0].lower()]) for name, parts in deep.items()}
    return {name: (parts[0], None) for name, parts in deep.items()}


def _require_all(missing: list[str], of: int, root: Path, table: str) -> None:
    if missing:
        raise DataError(
            f"{table} names {len(missing)} of {of} files that are not in {root}",
            got=missing[0],
            rule="ingest.from.file_column holds paths relative to the folder",
            fix="Mend the labels or ingest.from.images; nothing was written",
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _plain(name: str) -> str:
    """Arrow strings are UTF-8; a file name need not be. Such a name is not found again and lands in the quarantine."""
    return os.fsencode(name).decode(errors="replace")
