"""Every candidate is accounted for, exactly once; what is no image is kept aside with its reason
and its bytes.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from PIL import Image

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.images.decode import Format, decode
from raypipe.tables import commits, near_duplicates, scan, verdicts
from raypipe.tables import ingest as room
from raypipe.tables.commits import append_once
from raypipe.tables.export import export
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, quarantine_uri
from raypipe.tables.quarantine import SCHEMA as QUARANTINE
from raypipe.tables.schema import SCHEMA
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.tables.handmade import drop

Draw = Callable[..., bytes]
FIVE: tuple[Format, ...] = ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
TEXT = b"These are only words.\n" * 20


@pytest.fixture
def table(tmp_path: Path) -> TableConfig:
    return TableConfig(uri=str(tmp_path / "tables" / "cells"))


@pytest.fixture
def mixed(tmp_path: Path, textured: Draw) -> Path:
    """12 good images of three formats, one of them twice; text renamed .jpg, a truncated JPEG, an
    empty file and a GIF.
    """
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
    return validate(
        IngestConfig,
        {"from": {"images": str(folder), "labels": str(folder / "labels.csv"), **settings}, **more},
    )


def everything(uri: str, columns: list[str]) -> list[dict[str, Any]]:
    table = ImageTable(uri)
    return scan.rows(table, table.pin(), columns).to_pylist()


def adds_up(done: IngestResult) -> bool:
    return done.seen == done.accepted + done.present + done.duplicates + done.quarantined


def test_a_folder_and_its_csv_become_rows_that_say_what_they_are(
    photos: Path, table: TableConfig
) -> None:
    ticks: list[tuple[int, int]] = []
    done = ingest(table, source(photos, name="line 3"), lambda *tick: ticks.append(tick))
    assert (done.seen, done.accepted, done.unlabelled, done.quarantined) == (60, 60, 0, 0)
    assert ticks == sorted(ticks)
    assert ticks[-1] == (60, 60)
    rows = everything(table.uri, SCHEMA.names)
    labels = dict(line.split(",") for line in (photos / "labels.csv").read_text().splitlines()[1:])
    assert {r["path"]: r["label"] for r in rows} == labels
    for r in rows:
        data = (photos / r["path"]).read_bytes()
        assert (r["image"], r["image_id"], r["bytes"]) == (
            data,
            hashlib.sha256(data).hexdigest(),
            len(data),
        )
        assert r["sha256"] == r["image_id"]
        assert (r["format"], r["width"], r["height"], r["source"]) == ("PNG", 32, 32, "line 3")
        assert r["split"] in ("train", "val", "test")
    assert sum(done.splits.values()) == 60
    assert not ImageTable.exists(quarantine_uri(table.uri))


def test_every_candidate_is_counted_once(mixed: Path, table: TableConfig) -> None:
    done = ingest(table, source(mixed))
    assert (done.seen, done.accepted, done.present, done.duplicates, done.quarantined) == (
        17,
        12,
        0,
        1,
        4,
    )
    assert adds_up(done)
    assert done.reasons == {"broken": 1, "empty": 1, "not_an_image": 2}
    assert len(everything(table.uri, ["image_id"])) == 12
    assert {r["format"] for r in everything(table.uri, ["format"])} == {"PNG", "JPEG", "WEBP"}


def test_rejects_are_kept_with_reason_label_and_bytes(mixed: Path, table: TableConfig) -> None:
    ingest(table, source(mixed, name="line 3"))
    kept = {r["path"]: r for r in everything(quarantine_uri(table.uri), QUARANTINE.names)}
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
    # An image under two names is there once, and the other file is a duplicate as before.
    assert (again.version, again.accepted, again.present, again.quarantined) == (
        first.version,
        0,
        12,
        4,
    )
    assert again.duplicates == first.duplicates == 1
    assert adds_up(again)
    assert quarantine.pin() == before


def test_new_images_are_added_and_old_ones_keep_their_row(
    mixed: Path, table: TableConfig, textured: Draw
) -> None:
    ingest(table, source(mixed))
    before = {r["image_id"]: r for r in everything(table.uri, SCHEMA.names)}
    (mixed / "new.png").write_bytes(textured(99))
    done = ingest(table, source(mixed))
    assert (done.accepted, done.present, done.duplicates, done.unlabelled) == (1, 12, 1, 1)
    after = {r["image_id"]: r for r in everything(table.uri, SCHEMA.names)}
    assert len(after) == 13
    assert {i: after[i] for i in before} == before


def test_a_run_that_stops_between_two_commits_is_finished_by_the_next(
    photos: Path, table: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ROWS_PER_COMMIT", 32)
    whole, calls = append_once, []

    def stops(uri: str, *rest: Any) -> Any:
        calls.append(uri)
        if len(calls) == 2:
            raise KeyboardInterrupt("stopped")
        return whole(uri, *rest)

    monkeypatch.setattr(room, "append_once", stops)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        ingest(table, source(photos))
    assert len(everything(table.uri, ["image_id"])) == 32
    monkeypatch.setattr(room, "append_once", whole)
    done = ingest(table, source(photos))
    assert (done.accepted, done.present) == (28, 32)
    assert len({r["image_id"] for r in everything(table.uri, ["image_id"])}) == 60


def test_a_commit_whose_answer_was_lost_is_not_made_again(
    photos: Path, table: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call writes and then fails, as a connection does that breaks after the request."""
    lost: list[str] = []

    def breaks(target: Any, *rows: Any, **how: Any) -> None:
        write_deltalake(target, *rows, **how)
        if not lost:
            lost.append(str(target))
            raise OSError("connection reset")

    monkeypatch.setattr(commits, "write_deltalake", breaks)
    done = ingest(table, source(photos))
    assert lost
    assert (done.accepted, done.version.version) == (60, 0)
    assert len(everything(table.uri, ["image_id"])) == 60


def test_a_batch_is_decided_again_when_others_committed_in_between(
    photos: Path, table: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ingest adds the same images, and a tag is set, just before the first commits."""
    whole, raced = append_once, []

    def late(uri: str, *rest: Any) -> Any:
        if not raced:
            raced.append(uri)
            assert ingest(table, source(photos, share=[0.0, 0.5])).accepted > 0
            ImageTable.open(table).tag("theirs")
        return whole(uri, *rest)

    monkeypatch.setattr(room, "append_once", late)
    done = ingest(table, source(photos))
    assert done.present > 0
    assert done.accepted + done.present == 60
    ids = [r["image_id"] for r in everything(table.uri, ["image_id"])]
    assert len(ids) == len(set(ids)) == 60


def test_the_rows_do_not_depend_on_who_verified_them(
    mixed: Path, tmp_path: Path, ray_session: str, textured: Draw
) -> None:
    """Threads, one Ray worker and two: the same rows in the same order, families and splits with
    them, and the same rejects.
    """
    for seed in range(100):  # twins among them, so that families depend on the order
        (mixed / f"twin {seed % 50} {seed // 50}.png").write_bytes(
            textured(200 + seed % 50, compress_level=1 + seed // 50)
        )
    found = []
    for workers, threads in ((0, 1), (0, 3), (1, 1), (2, 1)):
        table = TableConfig(uri=str(tmp_path / f"{workers} {threads}"))
        done = ingest(table, source(mixed, workers=workers, threads=threads, max_side=48))
        rejects = everything(quarantine_uri(table.uri), QUARANTINE.names)
        found.append((done.splits, done.reasons, everything(table.uri, SCHEMA.names), rejects))
    assert len(found[0][2]) > len({r["family"] for r in found[0][2]})
    assert found[1:] == found[:1] * 3


KILLED = """
import sys
from raypipe.config import validate
from raypipe.tables import ingest as room
from raypipe.tables.table import TableConfig
from tests.tables.handmade import drop
room.ROWS_PER_COMMIT = 32
source = {"images": sys.argv[2], "labels": sys.argv[2] + "/labels.csv"}
cfg = validate(room.IngestConfig, {"from": source, "workers": 0})
room.ingest(TableConfig(uri=sys.argv[1]), cfg)
"""


@pytest.fixture
def many(tmp_path: Path, textured: Draw) -> Path:
    """400 images, every 20th of them broken and every 50th a copy."""
    folder = tmp_path / "many"
    folder.mkdir()
    for seed in range(400):
        data = textured(seed - 1 if seed % 50 == 49 else seed)
        (folder / f"{seed:03d}.png").write_bytes(data[:700] if seed % 20 == 0 else data)
    (folder / "labels.csv").write_text(
        "file,label\n" + "".join(f"{s:03d}.png,{'ab'[s % 2]}\n" for s in range(400))
    )
    return folder


def start(table: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, table, str(folder)], stdout=subprocess.DEVNULL
    )


def commits_in(*tables: str) -> int:
    return sum(len(list(Path(t, "_delta_log").glob("*.json"))) for t in tables)


def whole_content(uri: str, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in everything(uri, columns))


@pytest.mark.share
@pytest.mark.chaos
def test_a_killed_ingest_that_is_run_again_ends_as_if_undisturbed(
    many: Path, tmp_path: Path
) -> None:
    calm, shot = str(tmp_path / "calm"), str(tmp_path / "shot")
    assert start(calm, many).wait() == 0
    random, kills = np.random.default_rng(3), 0
    for _ in range(20):
        before, process = commits_in(shot, quarantine_uri(shot)), start(shot, many)
        target = before + int(random.integers(0, 6))
        while process.poll() is None and commits_in(shot, quarantine_uri(shot)) <= target:
            time.sleep(0.001)
        time.sleep(float(random.uniform(0, 0.03)))
        if process.poll() is None:
            process.kill()
        kills += process.wait() == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert kills >= 3
    columns = [n for n in SCHEMA.names if n != "image"]
    assert whole_content(shot, columns) == whole_content(calm, columns)
    columns = ["path", "image_id", "reason", "label"]
    assert whole_content(quarantine_uri(shot), columns) == whole_content(
        quarantine_uri(calm), columns
    )


@pytest.mark.chaos
def test_two_ingests_at_once_make_no_duplicates(many: Path, tmp_path: Path) -> None:
    calm, both = str(tmp_path / "calm"), str(tmp_path / "both")
    racers = [start(both, many), start(both, many), start(calm, many)]
    assert [r.wait() for r in racers] == [0, 0, 0]
    ids = [r["image_id"] for r in everything(both, ["image_id"])]
    assert len(ids) == len(set(ids))
    assert set(ids) == {r["image_id"] for r in everything(calm, ["image_id"])}
    rejects = everything(quarantine_uri(both), ["path", "image_id"])
    assert len(rejects) == len(everything(quarantine_uri(calm), ["path"])) == 28


def test_larger_images_are_stored_smaller_in_their_own_format(
    tmp_path: Path, table: TableConfig
) -> None:
    """JPEG lies on its side by EXIF, PNG is gray, WebP is wide, the last is small already and stays
    byte for byte.
    """
    folder = tmp_path / "large"
    folder.mkdir()
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    colour = Image.merge("RGB", [ramp, ramp, ramp])
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    colour.save(folder / "a.jpg", exif=exif, quality=95)
    ramp.save(folder / "b.png")
    colour.transpose(Image.Transpose.ROTATE_180).resize((200, 50)).save(folder / "c.webp")
    colour.resize((64, 32)).save(folder / "d.jpg", exif=exif)
    cfg = validate(
        IngestConfig,
        {"from": {"images": str(folder), "labelled": False}, "max_side": 64, "near_bits": 0},
    )
    assert ingest(table, cfg).accepted == 4
    rows = {r["path"]: r for r in everything(table.uri, SCHEMA.names)}
    assert {p: (r["format"], r["width"], r["height"]) for p, r in rows.items()} == {
        "a.jpg": ("JPEG", 32, 64),
        "b.png": ("PNG", 64, 32),
        "c.webp": ("WEBP", 64, 16),
        "d.jpg": ("JPEG", 64, 32),
    }
    for path, r in rows.items():
        source_bytes = (folder / path).read_bytes()
        assert r["image_id"] == hashlib.sha256(source_bytes).hexdigest()
        assert r["sha256"] == hashlib.sha256(r["image"]).hexdigest()
        assert r["bytes"] == len(r["image"])
        assert (r["image"] == source_bytes) == (path == "d.jpg")
        small = np.asarray(
            Image.fromarray(decode(source_bytes)).resize((8, 8), Image.Resampling.BOX), np.int16
        )
        again = np.asarray(
            Image.fromarray(decode(r["image"])).resize((8, 8), Image.Resampling.BOX), np.int16
        )
        assert np.abs(small - again).max() <= 6
    assert Image.open(io.BytesIO(rows["b.png"]["image"])).mode == "L"
    assert ingest(table, cfg).present == 4


def test_an_export_of_images_that_were_made_smaller_comes_back_as_the_same_images(
    tmp_path: Path, table: TableConfig
) -> None:
    """Their small copies were new images, and a corrected label went to the copy."""
    folder = tmp_path / "large"
    folder.mkdir()
    drawn = np.random.default_rng(1).integers(0, 255, (3, 200, 100, 3), dtype=np.uint8)
    for i, pixels in enumerate(drawn):
        Image.fromarray(pixels).resize((20 if i == 2 else 200, 100)).save(folder / f"{i}.png")
    (folder / "labels.csv").write_text("file,label\n0.png,a\n1.png,b\n2.png,b\n")
    assert ingest(table, source(folder, max_side=64)).accepted == 3
    opened = ImageTable(table.uri)
    before = {r["image_id"]: r["label"] for r in everything(table.uri, ["image_id", "label"])}
    export(opened, opened.pin(), tmp_path / "out")
    labels = tmp_path / "out" / "labels.csv"
    labels.write_text(labels.read_text().replace(",a", ",b"))
    for relabelled in (1, 0):
        done = ingest(table, source(tmp_path / "out"))
        assert (done.accepted, done.present, done.relabelled) == (0, 3, relabelled)
    after = {r["image_id"]: r["label"] for r in everything(table.uri, ["image_id", "label"])}
    assert after == dict.fromkeys(before, "b")
    # Both at once are one image under two names.
    shutil.copytree(folder, tmp_path / "out" / "large")
    lines = "".join(f"large/{i}.png,b\n" for i in range(3))
    labels.write_text(labels.read_text() + lines)
    done = ingest(table, source(tmp_path / "out"))
    assert (done.accepted, done.present, done.duplicates) == (0, 3, 3)


def test_without_labels_a_labels_table_changes_no_label(
    tmp_path: Path, table: TableConfig, photos: Path
) -> None:
    """ "labelled: false" still took them, and relabelled images that were there."""
    ingest(table, source(photos))
    before = everything(table.uri, ["image_id", "label"])
    labels = tmp_path / "other.csv"
    text = (photos / "labels.csv").read_text().splitlines()
    labels.write_text("\n".join([text[0], *(f"{line.split(',')[0]},z" for line in text[1:])]))
    other = {"images": str(photos), "labels": str(labels)}
    unlabelled = validate(IngestConfig, {"from": {**other, "labelled": False}})
    assert ingest(table, unlabelled).relabelled == 0
    assert everything(table.uri, ["image_id", "label"]) == before
    assert ingest(table, validate(IngestConfig, {"from": other})).relabelled == len(before)


def test_a_large_image_that_is_cut_off_is_not_made_small_and_whole(
    tmp_path: Path, table: TableConfig, textured: Draw
) -> None:
    (tmp_path / "cut").mkdir()
    whole = textured(1, side_px=400, kind="JPEG")
    for i, share in enumerate((0.3, 0.7, 0.95)):
        (tmp_path / "cut" / f"{i}.jpg").write_bytes(whole[: int(len(whole) * share)])
    (tmp_path / "cut" / "whole.jpg").write_bytes(whole)
    cfg = validate(
        IngestConfig, {"from": {"images": str(tmp_path / "cut"), "labelled": False}, "max_side": 64}
    )
    done = ingest(table, cfg)
    assert (done.accepted, done.reasons) == (1, {"broken": 3})


def test_tiff_and_bmp_come_on_request_and_are_stored_as_png(
    tmp_path: Path, table: TableConfig, textured: Draw
) -> None:
    (tmp_path / "odd").mkdir()
    for seed, kind in enumerate(("TIFF", "BMP", "PNG")):
        (tmp_path / "odd" / f"{seed}.img").write_bytes(textured(seed, kind=kind))
    settings = {"from": {"images": str(tmp_path / "odd"), "labelled": False}}
    assert ingest(table, validate(IngestConfig, settings)).reasons == {"not_an_image": 2}
    done = ingest(table, validate(IngestConfig, settings | {"formats": ["TIFF", "BMP", "PNG"]}))
    assert (done.accepted, done.present) == (2, 1)
    for r in everything(table.uri, ["path", "image", "format"]):
        assert r["format"] == Image.open(io.BytesIO(r["image"])).format == "PNG"
        assert np.array_equal(
            decode(r["image"]),
            decode((tmp_path / "odd" / r["path"]).read_bytes(), None, 10**6, FIVE),
        )
    assert (
        ingest(table, validate(IngestConfig, settings | {"formats": ["PNG"]})).present == 3
    )  # known by their bytes


def test_a_table_without_the_newest_column_gets_it_with_the_next_ingest(
    photos: Path, table: TableConfig
) -> None:
    scratch = TableConfig(uri=table.uri + "_scratch")
    ingest(scratch, source(photos, share=[0.0, 0.5]))
    old = pa.Table.from_pylist(everything(scratch.uri, [n for n in SCHEMA.names if n != "sha256"]))
    append(table.uri, old.cast(pa.schema([f for f in SCHEMA if f.name != "sha256"])), "before")
    done = ingest(table, source(photos))
    assert (done.present, done.accepted) == (len(old), 60 - len(old))
    rows = everything(table.uri, ["image_id", "sha256"])
    assert sum(r["sha256"] is None for r in rows) == len(old)
    assert all(r["sha256"] in (None, r["image_id"]) for r in rows)


def test_images_that_cleaning_dropped_do_not_come_back(photos: Path, table: TableConfig) -> None:
    first = ingest(table, source(photos)).version
    opened = ImageTable.open(table)
    gone = sorted(r["image_id"] for r in everything(table.uri, ["image_id"]))[:3]
    found = [
        verdicts.row(
            verdicts.Seen(i, "f", 0, i), "dark", value=1.0, limit=8.0, dropped=i != gone[2]
        )
        for i in gone
    ]
    verdicts.write(table.uri, first, "policy", "rules", found, 60, None)
    drop(opened, first, gone[:2], "clean")
    done = ingest(table, source(photos))
    assert (done.accepted, done.present) == (0, 60)
    left = {r["image_id"] for r in everything(table.uri, ["image_id"])}
    assert len(left) == 58
    assert gone[2] in left


def test_splits_can_come_from_a_column_of_the_csv(mixed: Path, table: TableConfig) -> None:
    done = ingest(table, source(mixed, split_column="part"))
    assert done.splits == {"first": 4, "second": 8}
    rows = everything(table.uri, ["path", "split"])
    assert {r["path"] for r in rows if r["split"] == "first"} == {
        "00.png",
        "more/01.jpeg",
        "02.webp",
        "more/03.png",
    }


def test_near_duplicates_share_family_and_split_even_across_runs(
    tmp_path: Path, table: TableConfig, textured: Draw
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, kind in zip(folders, ({"compress_level": 1}, {"compress_level": 9}), strict=True):
        folder.mkdir()
        for seed in range(20):
            (folder / f"{seed}.png").write_bytes(textured(seed, **kind))
        (folder / "labels.csv").write_text(
            "file,label\n" + "".join(f"{s}.png,a\n" for s in range(20))
        )
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
    assert done.reasons == {
        "not_an_image": 1
    }  # labels.csv was not named, so it is a file like any other


def test_a_csv_that_names_missing_files_writes_nothing(mixed: Path, table: TableConfig) -> None:
    with (mixed / "labels.csv").open("a") as f:
        f.write("nowhere.png,a,first\nneither.png,b,first\n")
    with pytest.raises(
        DataError,
        match=r"labels\.csv names 2 of 15 files .*\(got 'neither\.png'\).*nothing was written",
    ):
        ingest(table, source(mixed))
    assert not Path(table.uri).parent.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file;label\n00.png;a\n", r"no column 'file'.*file;label"),
        ("file,lable\n00.png,a\n", r"no column 'label'\. Did you mean 'lable'"),
        ("", r"no column 'file'"),
        (
            "file,label\n00.png,a\n00.png,b\n",
            r"gives 00\.png two labels \(got 'a, b'\)\. One label a file",
        ),
        ("label,file\na,00.png\nb\n", r"Line 3 of .* has 1 fields and the header has 2"),
        ("file,label\n00.png,\n02.webp, \n", "There are no labels .*ingest.from.labelled=false"),
        ("file,label\n", "There are no labels"),
    ],
    ids=[
        "semicolons",
        "misspelt",
        "empty",
        "two labels",
        "short line",
        "blank labels",
        "header only",
    ],
)
def test_a_labels_file_that_cannot_be_right_is_named_before_anything_is_written(
    text: str, says: str, mixed: Path, table: TableConfig
) -> None:
    (mixed / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        ingest(table, source(mixed))
    assert not Path(table.uri).parent.exists()


def test_files_that_are_not_there_or_not_text_are_named(
    mixed: Path, table: TableConfig, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for settings, says in (
        ({"images": "nowhere"}, "image folder does not exist .*'nowhere'.*ingest.from.images"),
        ({}, "image folder does not exist"),
        ({"images": str(tmp_path / "empty")}, "image folder is empty .*empty"),
        (
            {"images": str(mixed), "labels": "nowhere.csv"},
            r"labels file does not exist .*nowhere\.csv",
        ),
        ({"images": str(mixed), "labels": str(mixed)}, r"labels file cannot be read"),
        (
            {"images": str(mixed), "labels": str(mixed / "00.png")},
            r"labels file cannot be read as a UTF-8 CSV",
        ),
        ({"images": str(mixed)}, r"two ways: images lie beside the folders.*ingest\.from\.labels"),
    ):
        with pytest.raises(DataError, match=says):
            ingest(table, validate(IngestConfig, {"from": settings}))
    assert not Path(table.uri).parent.exists()


def test_a_folder_of_nothing_but_text_is_quarantined_whole_and_makes_no_table(
    tmp_path: Path, table: TableConfig
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.jpg").write_bytes(TEXT + b"%d" % i)
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{i}.jpg,a\n" for i in range(5)))
    for _ in range(2):  # and again: no second copies
        with pytest.raises(
            DataError,
            match=r"None of 5 files is a readable image \(got \{'not_an_image': 5\}\).*_quarantine",
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
        ({"from": {"kind": "s3"}}, r"from\.kind is wrong \(got 's3'\).*'folder', .*'tar'"),
        ({"from": {"image": "x"}}, r"Unknown config key from\.image .*Did you mean 'from\.images'"),
        ({"share": [0.1]}, r"share"),
        ({"workers": -1}, r"workers is wrong .*auto, 0 for threads"),
        ({"quality": 0}, r"quality is wrong"),
        ({"formats": ["GIF"]}, r"formats.*'GIF'"),
        ({"formats": []}, r"formats is wrong"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(IngestConfig, settings)


def test_stratified_splits_hold_in_every_label_over_ingests_and_are_drawn_anew_by_a_seed(
    photos: Path, tmp_path: Path
) -> None:
    drawn = []
    for seed in (1, 1, 2):
        table = TableConfig(uri=str(tmp_path / f"{len(drawn)}"))
        stratified: dict[str, Any] = {
            "splits": {"train": 0.75, "test": 0.25},
            "stratify": True,
            "seed": seed,
        }
        ingest(table, source(photos, share=[0.0, 0.5], **stratified))
        ingest(table, source(photos, **stratified))  # goes on from what the table holds
        rows = everything(table.uri, ["image_id", "label", "split"])
        for label in {r["label"] for r in rows}:
            images = [r["split"] for r in rows if r["label"] == label]
            assert abs(images.count("test") - len(images) / 4) < 2
        drawn.append({r["image_id"]: r["split"] for r in rows})
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.fixture
def surfaces(tmp_path: Path) -> Path:
    """300 smooth gradients in two folders, `good` and `flawed`: the flaw of 6 px is nothing to a
    perceptual hash.
    """
    random = np.random.default_rng(0)
    for label in ("flawed", "good"):
        (tmp_path / "surfaces" / label).mkdir(parents=True)
    for i in range(300):
        low, high = random.uniform(40, 80), random.uniform(150, 200)
        gray_HW = np.tile(np.linspace(low, high, 64), (64, 1)) + random.normal(0, 0.3, (64, 64))
        if i % 2:
            y, x = random.integers(4, 54, 2)
            gray_HW[y : y + 6, x : x + 6] -= 30
        file = tmp_path / "surfaces" / ("good", "flawed")[i % 2] / f"{i:03d}.png"
        Image.fromarray(gray_HW.astype(np.uint8)).save(file)
    return tmp_path / "surfaces"


def test_smooth_surfaces_do_not_become_one_family_in_one_split(
    surfaces: Path, table: TableConfig
) -> None:
    cfg = validate(IngestConfig, {"from": {"images": str(surfaces)}, "workers": 0})
    done = ingest(table, cfg)
    rows = everything(table.uri, ["label", "split", "family"])
    assert max(Counter(r["family"] for r in rows).values()) <= 300 * 0.15 / 2
    seen = Counter((r["label"], r["split"]) for r in rows)
    assert all(
        seen[label, name] >= 8 for label in ("good", "flawed") for name in ("train", "val", "test")
    ), seen
    assert done.splits["train"] > 150
    assert ingest(table, cfg).version == done.version


def test_a_split_that_would_stay_empty_is_an_error_before_anything_is_written(
    surfaces: Path, table: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be without a largest family."""
    monkeypatch.setattr(near_duplicates, "most_in_group", lambda images, fractions: None)
    cfg = {"from": {"images": str(surfaces)}, "workers": 0}
    with pytest.raises(
        DataError,
        match=r"A split would stay empty or lack a class: .*of 300.*"
        r"ingest\.stratify=true.*near_bits=0",
    ):
        ingest(table, validate(IngestConfig, cfg))
    assert not ImageTable.exists(table.uri)
    monkeypatch.undo()
    for more in ({"near_bits": 0}, {"stratify": True}):
        done = ingest(
            TableConfig(uri=f"{table.uri}-{next(iter(more))}"), validate(IngestConfig, cfg | more)
        )
        assert (done.accepted, len(done.splits)) == (300, 3)


@pytest.mark.parametrize("images", [1, 12])
def test_few_images_and_one_class_at_a_time_are_no_error(
    images: int, tmp_path: Path, table: TableConfig, textured: Draw
) -> None:
    for label in ("a", "b"):
        folder = tmp_path / label / label
        folder.mkdir(parents=True)
        for seed in range(images):
            (folder / f"{seed}.png").write_bytes(textured(seed + 100 * (label == "b"), 32))
        assert (
            ingest(
                table,
                validate(IngestConfig, {"from": {"images": str(folder.parent)}, "workers": 0}),
            ).accepted
            == images
        )
