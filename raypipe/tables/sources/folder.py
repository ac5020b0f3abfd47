"""Image files as a source, in one of three ways.

- a folder with a table of labels;
- a folder whose sub-folders are the classes;
- only the files that a table names.

Only images decide what the folders mean. A Thumbs.db or README beside them is listed, quarantined,
and changes nothing. A layout with two possible meanings is refused: class folders beside images, or
`train` and `val` beside folders of other names.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from pathlib import Path, PurePosixPath

from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Files, Part, printable, with_label
from raypipe.tables.sources.fence import ROOTS, Fence
from raypipe.tables.sources.labels import Labels
from raypipe.tables.sources.walk import File, has_image_suffix, walk

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
LABELS = "labels.csv"
KINDS = {".parquet": "parquet", ".pq": "parquet", ".tar": "tar", ".arrow": "huggingface"}
_NOT_UTF8 = "the file's name is not UTF-8; rename it"
_MOVE = (
    "Move the images, set ingest.from.labels to a table with columns file,label, "
    "or ingest.from.labelled=false to ingest without"
)


def all_files(
    root: Path, labels: Labels | None, labelled: bool, table: Path | None, task: Kind, fence: Fence
) -> tuple[list[Part], str]:
    """Every file below `root`, and one line that says how the folder was understood.

    Files that are no images are listed too; the quarantine says why. Without `labels` the first
    folder of a path is the class. Raises DataError when labels name missing files, and for a layout
    with two possible meanings.
    """
    files = walk(fence)
    # The labels' own table may lie between the images.
    if table is not None and table.resolve().is_relative_to(root.resolve()):
        inside = table.resolve().relative_to(root.resolve())
        files.pop(inside.as_posix(), None)
    if not files:
        raise DataError(
            "The image folder is empty",
            got=str(root),
            rule="It holds at least one file",
            fix="Check ingest.from.images",
        )

    if labels is not None:
        labels = _as_on_disk(labels, files)
        missing = sorted(set(labels) - set(files))
        _require_no_missing(missing, len(labels), fence, str(table))
        layout = f"the labels of {table}"
    else:
        images = [name for name, file in files.items() if file.image]
        if labelled and not images:
            raise _no_image(root, files)
        labels, layout = _labels_of_folders(images, labelled)
        if labels and LABELS in files:
            layout += f"; {LABELS} is not read (ingest.from.labels={root / LABELS} reads it)"
    candidates = [_candidate(name, file, labels, task) for name, file in files.items()]
    return [Part(Files(fence), candidates)], layout


def _as_on_disk(labels: Labels, files: dict[str, File]) -> Labels:
    """The names as the folder spells them: macOS and Linux write é with other code points."""
    composed: dict[str, list[str]] = {}
    for name in files:
        composed.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    found: Labels = {}
    for name, given in labels.items():
        same = composed.get(unicodedata.normalize("NFC", name), [])
        is_other = name not in files and len(same) == 1 and same[0] not in labels
        found[same[0] if is_other else name] = given
    return found


def _no_image(root: Path, files: dict[str, File]) -> DataError:
    """The error for a folder without an image: often it is a source of another kind."""
    endings = Counter(PurePosixPath(name).suffix.lower() or name for name in files)
    kind = next((KINDS[one] for one, _ in endings.most_common() if one in KINDS), "")
    if "." in files and files["."].reason == "table":
        kind = "delta"
    return DataError(
        "There is no image in this folder",
        got=f"{root}: {dict(endings.most_common(3))}",
        rule="ingest.from.kind=folder reads image files",
        fix=f"Set ingest.from.kind={kind}" if kind else "Check ingest.from.images",
    )


def named_files(labels: Labels, table: str, task: Kind, fence: Fence) -> list[Part]:
    """Only the files that the table names, in its order.

    Raises DataError for one that is missing or outside of the fence.
    """
    # Missing files are an error before anything is read.
    sizes = {name: _size(fence, name) for name in labels}
    missing = [name for name, size in sizes.items() if size is None]
    _require_no_missing(missing, len(labels), fence, table)

    candidates = []
    for name, size in sizes.items():
        file = File(size or 0, image=True)
        candidates.append(_candidate(name, file, labels, task))
    return [Part(Files(fence), candidates)]


def _candidate(name: str, file: File, labels: Labels, task: Kind) -> Candidate:
    candidate = Candidate(printable(name), None, None, file.bytes)
    if file.reason:
        return candidate.refused(file.reason, file.detail, shut=True)
    # Arrow strings are UTF-8, and the reader opens a file by the path in the candidate.
    if candidate.path != name:
        detail = f"{candidate.path}: {_NOT_UTF8}"
        return candidate.refused("name", detail, shut=True)
    # A file that no label names is an image without a label.
    if name not in labels:
        return candidate
    label, split = labels[name]
    return with_label(candidate, task, label, split)


def _labels_of_folders(images: list[str], labelled: bool) -> tuple[Labels, str]:
    """Classes and splits from the folders of the images, and one line that explains them.

    Raises DataError for a layout with two possible meanings.
    """
    paths = {name: PurePosixPath(name).parts for name in images}
    loose = [name for name, path in paths.items() if len(path) == 1]
    folders = {path[0] for path in paths.values() if len(path) > 1}
    splits = {folder for folder in folders if folder.lower() in SPLITS}
    if not folders:
        return {}, "images without folders: no labels"

    # Either all first folders are splits, or they are classes.
    if splits == folders and not loose:
        return _labels_below_splits(paths, sorted(folders), labelled)
    if not labelled:
        return {}, "labels are not asked for"
    if loose:
        raise _two_meanings("images lie beside the folders", loose[0])

    # A single flat folder `train` may be a class: cars, trains.
    in_splits = [path for path in paths.values() if path[0] in splits]
    has_class_folders = any(len(path) > 2 for path in in_splits)
    if len(splits) > 1 or has_class_folders:
        raise _two_meanings(
            f"{', '.join(sorted(splits))} would be splits, and others are not",
            sorted(folders - splits)[0],
        )

    labels: Labels = {name: (path[0], None) for name, path in paths.items()}
    return labels, "a class a folder"


def _labels_below_splits(
    paths: dict[str, tuple[str, ...]], splits: list[str], labelled: bool
) -> tuple[Labels, str]:
    """The labels when every first folder is a split: the second folder is the class."""
    # Flat images lie in a split's own folder and have no class folder.
    flat = sorted(name for name, path in paths.items() if len(path) == 2)
    is_flat = len(flat) == len(paths)
    if flat and labelled:
        if is_flat:
            raise DataError(
                "There are no labels: the folders are splits and hold no class folders",
                got=", ".join(splits),
                rule="Below train, val and test the next folder is the class",
                fix=_MOVE,
            )
        raise _two_meanings("images lie beside class folders", flat[0])

    labels: Labels = {}
    for name, path in paths.items():
        label = path[1] if labelled else None
        labels[name] = (label, SPLITS[path[0].lower()])
    if flat:
        return labels, "a split a folder: no labels"
    return labels, f"a class a folder, below the splits {', '.join(splits)}"


def _two_meanings(what: str, example: str) -> DataError:
    return DataError(
        f"The folders can be read in two ways: {what}",
        got=example,
        rule=(
            "Either every first folder is a class, "
            "or every first folder is train, val or test and holds class folders"
        ),
        fix=_MOVE,
    )


def _require_no_missing(missing: list[str], total: int, fence: Fence, table: str) -> None:
    """Raise DataError when `missing` is not empty; files outside of the fence have their own."""
    if not missing:
        return
    # A file outside of the fence may exist; its message must not say that it is missing.
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
        f"{table} names {len(missing)} of {total} files that are not in {fence.base}",
        got=missing[0],
        rule="ingest.from.file_column holds paths relative to the folder",
        fix="Mend the labels or ingest.from.images; nothing was written",
    )


def _size(fence: Fence, name: str) -> int | None:
    """Bytes of a file; None when it is missing, no file, or outside of the fence."""
    try:
        path = Path(fence.place(name))
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError, BadImage):
        return None


def strays(parts: list[Part]) -> Counter[str]:
    """How many files have no image suffix, by suffix (by path for a file without one)."""
    counts: Counter[str] = Counter()
    for part in parts:
        for candidate in part.candidates:
            path = candidate.path
            if not has_image_suffix(path):
                counts[PurePosixPath(path).suffix.lower() or path] += 1
    return counts
