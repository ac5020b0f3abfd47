"""Every candidate is accounted for, exactly once; what is no image is kept aside with its reason and its bytes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.tables import ingest as room
from raypipe.tables import scan, verdicts
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, quarantine_uri
from raypipe.tables.table import SCHEMA, ImageTable, TableConfig, append

Draw = Callable[..., bytes]
TEXT = b"These are only words.\n" * 20


@pytest.fixture
def table(tmp_path: Path) -> TableConfig:
    return TableConfig(uri=str(tmp_path / "tables" / "cells"))


@pytest.fixture
def mixed(tmp_path: Path, textured: Draw) -> Path:
    """12 good images of three formats, one of them twice; text renamed .jpg, a truncated JPEG, an empty file and a GIF."""
    folder = tmp_path / "mixed"
    (folder / "more").mkdir(parents=True)
    lines = ["file,label,part"]
    for seed in range(12):
        kind = ("PNG", "JPEG", "WEBP")[seed % 3]
        name = f"{'more/' * (seed % 2)}{seed:02d}.{kind.lower()}"
        (folder / name).write_bytes(textured(seed, kind=kind))
        lines.append(f"{name},{'ab'[seed % 2]},{'first' if seed < 4 else 'second'}")
    (folder / "again.png").write_bytes(textured(0))
    (folder / "words.jpg").write_bytes(TEXT)
    (folder / "half.jpg").write_bytes(textured(1, kind="JPEG")[:900])
    (folder / "nothing.png").write_bytes(b"")
    gif = io.BytesIO()
    Image.new("P", (8, 8)).save(gif, "GIF")
    (folder / "moving.gif").write_bytes(gif.getvalue())
    (folder / "labels.csv").write_text("\n".join([*lines, "words.jpg,a,first"]) + "\n")
    return folder


def source(folder: Path, **more: Any) -> IngestConfig:
    settings = {k: more.pop(k) for k in list(more) if k not in IngestConfig.model_fields}
    return validate(IngestConfig, {"from": {"images": str(folder), "labels": str(folder / "labels.csv"), **settings}, **more})


def everything(uri: str, columns: list[str]) -> list[dict[str, Any]]:
    table = ImageTable(uri)
    return scan.rows(table, table.pin(), columns).to_pylist()


def adds_up(done: IngestResult) -> bool:
    return done.seen == done.accepted + done.present + done.duplicates + done.quarantined


def test_a_folder_and_its_csv_become_rows_that_say_what_they_are(photos: Path, table: TableConfig) -> None:
    ticks: list[tuple[int, int]] = []
    done = ingest(table, source(photos, name="line 3"), lambda *tick: ticks.append(tick))
    assert (done.seen, done.accepted, done.unlabelled, done.quarantined) == (60, 60, 0, 0)
    assert ticks == [(i, 60) for i in range(1, 61)]
    rows = everything(table.uri, SCHEMA.names)
    labels = dict(line.split(",") for line in (photos / "labels.csv").read_text().splitlines()[1:])
    assert {r["path"]: r["label"] for r in rows} == labels
    for r in rows:
        data = (photos / r["path"]).read_bytes()
        assert (r["image"], r["image_id"], r["bytes"]) == (data, hashlib.sha256(data).hexdigest(), len(data))
        assert (r["format"], r["width"], r["height"], r["source"]) == ("PNG", 32, 32, "line 3")
        assert r["split"] in ("train", "val", "test")
    assert sum(done.splits.values()) == 60
    assert not ImageTable.exists(quarantine_uri(table.uri))


def test_every_candidate_is_counted_once(mixed: Path, table: TableConfig) -> None:
    done = ingest(table, source(mixed))
    assert (done.seen, done.accepted, done.present, done.duplicates, done.quarantined) == (17, 12, 0, 1, 4)
    assert adds_up(done)
    assert done.reasons == {"broken": 1, "empty": 1, "not_an_image": 2}
    assert len(everything(table.uri, ["image_id"])) == 12
    assert {r["format"] for r in everything(table.uri, ["format"])} == {"PNG", "JPEG", "WEBP"}


def test_rejects_are_kept_with_reason_label_and_bytes(mixed: Path, table: TableConfig) -> None:
    ingest(table, source(mixed, name="line 3"))
    kept = {r["path"]: r for r in everything(quarantine_uri(table.uri), room.QUARANTINE.names)}
    assert {path: r["reason"] for path, r in kept.items()} == {
        "words.jpg": "not_an_image",
        "moving.gif": "not_an_image",
        "half.jpg": "broken",
        "nothing.png": "empty",
    }
    for path, r in kept.items():
        assert r["image"] == (mixed / path).read_bytes()
        assert r["detail"].startswith(r["reason"] + ": ")
        assert r["source"] == "line 3"
    assert kept["words.jpg"]["label"] == "a"


def test_a_second_run_adds_nothing_to_either_table(mixed: Path, table: TableConfig) -> None:
    first = ingest(table, source(mixed))
    quarantine = ImageTable(quarantine_uri(table.uri))
    before = quarantine.pin()
    again = ingest(table, source(mixed))
    assert (again.version, again.accepted, again.present, again.quarantined) == (first.version, 0, 13, 4)
    assert adds_up(again)
    assert quarantine.pin() == before


def test_new_images_are_added_and_old_ones_keep_their_row(mixed: Path, table: TableConfig, textured: Draw) -> None:
    ingest(table, source(mixed))
    before = {r["image_id"]: r for r in everything(table.uri, SCHEMA.names)}
    (mixed / "new.png").write_bytes(textured(99))
    done = ingest(table, source(mixed))
    assert (done.accepted, done.present, done.unlabelled) == (1, 13, 1)
    after = {r["image_id"]: r for r in everything(table.uri, SCHEMA.names)}
    assert len(after) == 13
    assert {i: after[i] for i in before} == before


def test_a_run_killed_between_two_commits_is_finished_by_the_next(
    mixed: Path, table: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ROWS_PER_COMMIT", 5)
    whole, calls = append, []

    def dies(uri: str, *rest: Any) -> Any:
        calls.append(uri)
        if calls.count(table.uri) == 2:
            raise KeyboardInterrupt("killed")
        return whole(uri, *rest)

    monkeypatch.setattr(room, "append", dies)
    with pytest.raises(KeyboardInterrupt, match="killed"):
        ingest(table, source(mixed))
    there = len(everything(table.uri, ["image_id"]))
    assert 0 < there < 12
    monkeypatch.setattr(room, "append", whole)
    done = ingest(table, source(mixed))
    assert done.accepted == 12 - there
    assert adds_up(done)
    ids = [r["image_id"] for r in everything(table.uri, ["image_id"])]
    assert len(ids) == len(set(ids)) == 12


def test_images_that_cleaning_dropped_do_not_come_back(photos: Path, table: TableConfig) -> None:
    first = ingest(table, source(photos)).version
    opened = ImageTable.open(table)
    gone = sorted(r["image_id"] for r in everything(table.uri, ["image_id"]))[:3]
    found = [verdicts.row(i, "dark", value=1.0, limit=8.0) | {"dropped": i != gone[2]} for i in gone]
    verdicts.write(table.uri, first, "policy", found, 60, None)
    opened.drop(first, gone[:2], "clean")
    done = ingest(table, source(photos))
    assert (done.accepted, done.present) == (0, 60)
    left = {r["image_id"] for r in everything(table.uri, ["image_id"])}
    assert len(left) == 58
    assert gone[2] in left


def test_splits_can_come_from_a_column_of_the_csv(mixed: Path, table: TableConfig) -> None:
    done = ingest(table, source(mixed, split_column="part"))
    assert done.splits == {"first": 4, "second": 8}
    rows = everything(table.uri, ["path", "split"])
    assert {r["path"] for r in rows if r["split"] == "first"} == {"00.png", "01.jpeg", "02.webp", "03.png"}


def test_near_duplicates_share_family_and_split_even_across_runs(tmp_path: Path, table: TableConfig, textured: Draw) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, kind in zip(folders, ({"compress_level": 1}, {"compress_level": 9}), strict=True):
        folder.mkdir()
        for seed in range(20):
            (folder / f"{seed}.png").write_bytes(textured(seed, **kind))
        (folder / "labels.csv").write_text("file,label\n" + "".join(f"{s}.png,a\n" for s in range(20)))
    for folder in folders:
        assert ingest(table, source(folder)).accepted == 20
    rows = everything(table.uri, ["image_id", "path", "family", "split"])
    for name in {r["path"] for r in rows}:
        twins = [r for r in rows if r["path"] == name]
        assert len({r["image_id"] for r in twins}) == 2
        assert len({(r["family"], r["split"]) for r in twins}) == 1
    assert len({r["family"] for r in rows}) == 20
    assert len({r["split"] for r in rows}) > 1


def test_shares_by_name_are_disjoint_and_complete(photos: Path, table: TableConfig) -> None:
    low = ingest(table, source(photos, share=[0.0, 0.5]))
    high = ingest(table, source(photos, share=[0.5, 1.0]))
    assert low.accepted + high.accepted == 60
    assert 15 <= low.accepted <= 45
    assert high.present == 0


def test_images_without_labels_are_taken_when_asked_for(photos: Path, table: TableConfig) -> None:
    cfg = validate(IngestConfig, {"from": {"images": str(photos), "labelled": False}})
    done = ingest(table, cfg)
    assert (done.accepted, done.unlabelled) == (60, 60)
    assert done.reasons == {"not_an_image": 1}  # labels.csv was not named, so it is a file like any other


def test_a_csv_that_names_missing_files_writes_nothing(mixed: Path, table: TableConfig) -> None:
    with (mixed / "labels.csv").open("a") as f:
        f.write("nowhere.png,a,first\nneither.png,b,first\n")
    with pytest.raises(DataError, match=r"labels\.csv names 2 of 15 files .*\(got 'neither\.png'\).*nothing was written"):
        ingest(table, source(mixed))
    assert not Path(table.uri).parent.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file;label\n00.png;a\n", r"no column 'file'.*file;label"),
        ("file,lable\n00.png,a\n", r"no column 'label'\. Did you mean 'lable'"),
        ("", r"no column 'file'"),
        ("file,label\n00.png,a\n00.png,b\n", r"gives 00\.png two labels \(got 'a, b'\)\. One label a file"),
        ("label,file\na,00.png\nb\n", r"names 1 of 2 files that are not in .*\(got ''\)"),
        ("file,label\n00.png,\n02.webp, \n", "There are no labels .*ingest.from.labelled=false"),
        ("file,label\n", "There are no labels"),
    ],
    ids=["semicolons", "misspelt", "empty", "two labels", "short line", "blank labels", "header only"],
)
def test_a_labels_file_that_cannot_be_right_is_named_before_anything_is_written(
    text: str, says: str, mixed: Path, table: TableConfig
) -> None:
    (mixed / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        ingest(table, source(mixed))
    assert not Path(table.uri).parent.exists()


def test_files_that_are_not_there_or_not_text_are_named(mixed: Path, table: TableConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for settings, says in (
        ({"images": "nowhere"}, "image folder does not exist .*'nowhere'.*ingest.from.images"),
        ({}, "image folder does not exist"),
        ({"images": str(tmp_path / "empty")}, "image folder is empty .*empty"),
        ({"images": str(mixed), "labels": "nowhere.csv"}, r"labels file does not exist .*nowhere\.csv"),
        ({"images": str(mixed), "labels": str(mixed)}, r"labels file cannot be read"),
        ({"images": str(mixed), "labels": str(mixed / "00.png")}, r"labels file cannot be read as a UTF-8 CSV"),
        ({"images": str(mixed)}, r"There are no labels"),
    ):
        with pytest.raises(DataError, match=says):
            ingest(table, validate(IngestConfig, {"from": settings}))
    assert not Path(table.uri).parent.exists()


def test_a_folder_of_nothing_but_text_is_quarantined_whole_and_makes_no_table(tmp_path: Path, table: TableConfig) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.jpg").write_bytes(TEXT + b"%d" % i)
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{i}.jpg,a\n" for i in range(5)))
    for _ in range(2):  # and again: no second copies
        with pytest.raises(
            DataError, match=r"None of 5 files is a readable image \(got \{'not_an_image': 5\}\).*_quarantine"
        ) as e:
            ingest(table, source(folder))
        assert e.value.exit_code == 2
        assert not ImageTable.exists(table.uri)
        kept = everything(quarantine_uri(table.uri), ["image", "label"])
        assert sorted(r["image"] for r in kept) == [TEXT + b"%d" % i for i in range(5)]


def test_a_table_of_somebody_else_is_left_alone(photos: Path, table: TableConfig) -> None:
    append(table.uri, pa.table({"image": [b"x"], "name": ["a"]}), "theirs")
    with pytest.raises(DataError, match=r"no column 'image_id'"):
        ingest(table, source(photos))
    assert ImageTable(table.uri).pin().version == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"splits": {}}, r"splits is wrong .*names to positive shares"),
        ({"splits": {"train": 1, "val": 0}}, r"splits is wrong"),
        ({"near_bits": 16}, r"near_bits is wrong \(got 16\)"),
        ({"from": {"kind": "s3"}}, r"from\.kind is wrong \(got 's3'\).*'folder' or 'elpv'"),
        ({"from": {"image": "x"}}, r"Unknown config key from\.image .*Did you mean 'from\.images'"),
        ({"share": [0.1]}, r"share"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(IngestConfig, settings)
