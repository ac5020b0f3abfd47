"""Only images decide what sub-folders mean, and users see how a folder is understood first."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from raypipe.errors import DataError
from raypipe.tables.sources import SourceConfig, candidates
from raypipe.tables.table import ImageTable

Draw = Callable[..., bytes]
Cli = Callable[..., tuple[int, str, str]]
SPLIT = [
    f"{split}/{label}/{i}.png"
    for split in ("train", "val", "test")
    for label in ("cat", "dog")
    for i in range(2)
]
CLASSES = [f"{label}/{i}.png" for label in ("cat", "dog") for i in range(2)]


def made(root: Path, names: list[str], data: bytes = b"x") -> SourceConfig:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return SourceConfig(images=str(root))


def read(cfg: SourceConfig) -> dict[str, tuple[str | None, str | None]]:
    return {c.path: (c.label, c.split) for part in candidates(cfg).parts for c in part.candidates}


@pytest.mark.parametrize(
    "stray",
    [
        "train/Thumbs.db",
        "train/README.txt",
        "README.md",
        "notes/a/notes.txt",
        "train/cat/list.csv",
        "other/.DS_Store",
    ],
)
@pytest.mark.parametrize("names", [SPLIT, CLASSES], ids=["splits", "classes"])
def test_a_file_that_is_no_image_changes_no_label_and_no_split(
    stray: str, names: list[str], tmp_path: Path
) -> None:
    alone = read(made(tmp_path / "clean", names))
    with_it = read(made(tmp_path / "stray", [*names, stray]))
    assert {name: with_it[name] for name in names} == alone
    assert {label for label, _ in alone.values()} == {"cat", "dog"}
    assert {split for _, split in alone.values()} == (
        {"train", "val", "test"} if names is SPLIT else {None}
    )
    assert with_it.get(stray, (None, None)) == (
        None,
        None,
    )  # still listed: the quarantine says what it is


def test_images_without_an_ending_decide_too(tmp_path: Path, textured: Draw) -> None:
    cfg = made(tmp_path, [name.removesuffix(".png") for name in SPLIT], textured(1))
    made(tmp_path, ["train/Thumbs"])
    assert {read(cfg)[name.removesuffix(".png")] for name in SPLIT} == {
        (label, split) for label in ("cat", "dog") for split in ("train", "val", "test")
    }


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            [*SPLIT, "train/loose.png"],
            r"two ways: images lie beside class folders \(got 'train/loose\.png'\)",
        ),
        (
            [*SPLIT, "extra/cat/1.png"],
            r"two ways: test, train, val would be splits, and others are not \(got 'extra'\)",
        ),
        ([*CLASSES, "loose.png"], r"two ways: images lie beside the folders \(got 'loose\.png'\)"),
        (
            ["train/1.png", "val/2.png"],
            r"the folders are splits and hold no class folders .*labelled=false",
        ),
    ],
)
def test_folders_that_can_be_read_in_two_ways_are_refused_by_name(
    names: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        candidates(made(tmp_path, names))


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    names = ["car/1.png", "train/2.png", "plane/3.png"]
    assert read(made(tmp_path, names)) == {name: (name.split("/")[0], None) for name in names}


def test_splits_of_folders_hold_without_labels_too(tmp_path: Path) -> None:
    made(tmp_path, SPLIT)
    found = read(SourceConfig(images=str(tmp_path), labelled=False))
    assert found == {name: (None, name.split("/")[0]) for name in SPLIT}


def test_a_dry_run_says_what_was_understood_and_writes_nothing(
    cli: Cli, tmp_path: Path, textured: Draw
) -> None:
    for i, name in enumerate(SPLIT):
        made(tmp_path / "photos", [name], textured(i))
    made(tmp_path / "photos", ["train/Thumbs.db"])
    config = tmp_path / "mine.yaml"
    table = tmp_path / "tables" / "cells"
    config.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\n"
        f"table: {{uri: {table}}}\n"
        f"ingest: {{from: {{images: {tmp_path / 'photos'}}}}}\n"
    )
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli("ingest", config, "--dry-run", "--json")
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])["understood"]
    assert told["labels"] == {"cat": 6, "dog": 6}
    assert told["splits"] == {"test": 4, "train": 4, "val": 4}
    assert told["understood as"] == "a class a folder, below the splits test, train, val"
    assert told["not images by name"] == {".db": 1}
    assert "cat 6, dog 6" in err and "nothing was written" in err
    assert sorted(tmp_path.rglob("*")) == before
    code, out, err = cli("ingest", config, "ingest.workers=0")
    assert code == 0, err
    assert out.index("understood as") < out.index("accepted")
    assert ImageTable.exists(str(table))


def test_labels_beside_class_folders_are_not_read_and_named(tmp_path: Path) -> None:
    cfg = made(tmp_path, [*CLASSES, "labels.csv"])
    assert f"labels.csv is not read (ingest.from.labels={tmp_path}" in candidates(cfg).layout
    assert "labels.csv" not in candidates(made(tmp_path / "other", CLASSES)).layout


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["_delta_log/0.json", "a.parquet"], "delta"),
        (["a.parquet", "b.parquet", "c.txt"], "parquet"),
        (["a.tar"], "tar"),
    ],
)
def test_a_folder_without_an_image_is_perhaps_of_another_kind(
    names: list[str], kind: str, tmp_path: Path
) -> None:
    """The way out was to ingest it without labels."""
    with pytest.raises(DataError, match=rf"no image in this folder.*ingest\.from\.kind={kind}"):
        candidates(made(tmp_path, names))


def test_a_file_is_no_folder_of_images(tmp_path: Path) -> None:
    file = tmp_path / "photos.zip"
    file.write_bytes(b"PK")
    with pytest.raises(DataError, match="This is a file, and no folder of images"):
        candidates(SourceConfig(images=str(file)))


def test_names_are_found_in_whatever_way_letters_are_composed(tmp_path: Path) -> None:
    """An archive of macOS beside a CSV of Linux: the file is there, and was called missing."""
    apart, whole = (unicodedata.normalize(form, "ä.png") for form in ("NFD", "NFC"))
    cfg = made(tmp_path / "one", [apart])
    (tmp_path / "labels.csv").write_text(f"file,label\n{whole},x\n")
    named = SourceConfig(images=cfg.images, labels=str(tmp_path / "labels.csv"))
    assert read(named) == {apart: ("x", None)}
    # Two files whose names look alike are two.
    both = made(tmp_path / "two", [apart, whole])
    (tmp_path / "labels.csv").write_text(f"file,label\n{whole},x\n{apart},y\n")
    named = SourceConfig(images=both.images, labels=str(tmp_path / "labels.csv"))
    assert read(named) == {apart: ("y", None), whole: ("x", None)}


@pytest.mark.parametrize(("mark", "named"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_csv_of_other_marks_says_so(mark: str, named: str, tmp_path: Path) -> None:
    """ "Did you mean 'file;label'?" """
    cfg = made(tmp_path / "one", ["a.png"])
    (tmp_path / "labels.csv").write_text(f"file{mark}label\na.png{mark}x\n")
    with pytest.raises(DataError, match=rf"no column 'file': {named} separate its fields"):
        candidates(SourceConfig(images=cfg.images, labels=str(tmp_path / "labels.csv")))


def test_splits_that_are_not_read_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other splits were drawn, without a word: test images of the source were trained on."""
    cfg = made(tmp_path / "one", ["a.png"])
    (tmp_path / "labels.csv").write_text("file,label,split\na.png,x,test\n")
    named = {"images": cfg.images, "labels": str(tmp_path / "labels.csv")}
    assert read(SourceConfig(**named)) == {"a.png": ("x", None)}
    assert "ingest.from.split_column=split keeps its splits" in caplog.text
    caplog.clear()
    assert read(SourceConfig(**named, split_column="split")) == {"a.png": ("x", "test")}
    assert caplog.text == ""
