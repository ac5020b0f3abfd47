"""An ingest that runs again, or into a table that has changed: every row is told, none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from PIL import Image

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.images import decode
from raypipe.tables import quarantine, scan, verdicts, versions
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, quarantine_uri, understand
from raypipe.tables.ingest_state import State, decide, with_ids
from raypipe.tables.near_duplicates import Groups
from raypipe.tables.schema import SCHEMA
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.tables.verify import SCHEMA as VERIFIED
from tests.tables import handmade as by_hand

Draw = Callable[..., bytes]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def table(tmp_path: Path) -> TableConfig:
    return TableConfig(uri=str(tmp_path / "cells"))


@pytest.fixture
def folder(tmp_path: Path, textured: Draw) -> Path:
    """Six images and a text."""
    (tmp_path / "photos").mkdir()
    for seed in range(6):
        (tmp_path / "photos" / f"{seed}.png").write_bytes(textured(seed, 32))
    (tmp_path / "photos" / "words.jpg").write_bytes(b"These are only words.\n" * 20)
    return tmp_path / "photos"


def take(table: TableConfig, folder: Path, lines: list[str], **more: Any) -> IngestResult:
    """Ingest with a CSV of file, label and split."""
    (folder.parent / "labels.csv").write_text("\n".join(["file,label,part", *lines]) + "\n")
    policies = more.pop("policies", None)
    source = {
        "images": str(folder),
        "labels": str(folder.parent / "labels.csv"),
        "split_column": "part",
    }
    cfg = validate(IngestConfig, {"from": source, "workers": 0} | more)
    done = ingest(table, cfg, policies=policies)
    assert done.seen == done.accepted + done.present + done.duplicates + done.quarantined
    return done


def lines(label: str = "a", split: str = "train") -> list[str]:
    return [f"{i}.png,{label},{split}" for i in range(6)]


def kept(table: TableConfig) -> list[tuple[str, ...]]:
    opened = ImageTable(quarantine_uri(table.uri))
    rows = scan.rows(opened, opened.pin(), ["source", "path", "reason", "detail"])
    return [tuple(row.values()) for row in rows.to_pylist()]


def test_a_file_is_kept_once_for_each_reason_and_source(table: TableConfig, folder: Path) -> None:
    """It was kept once for each path and content: a second reason was lost."""
    labels = [*lines(), "words.jpg,a,train"]
    take(table, folder, labels)
    take(table, folder, labels)
    assert [row[:3] for row in kept(table)] == [("ingest", "words.jpg", "not_an_image")]
    # The same bytes under the same path, and another reason: its label is none.
    take(table, folder, [*lines(), "0.png,['a'],train"][1:])
    take(table, folder, [*lines(), "0.png,['a'],train"][1:])
    assert {row[:3] for row in kept(table)} == {
        ("ingest", "words.jpg", "not_an_image"),
        ("ingest", "0.png", "label"),
    }
    take(table, folder, [*lines(), "0.png,nan,train"][1:], name="other")
    found = kept(table)
    assert len(found) == 4 and ("other", "0.png", "label") in {row[:3] for row in found}
    details = {row[3] for row in found if row[1] == "0.png"}
    assert len(details) == 2, "another label is another reason"


def test_an_address_in_an_errors_text_makes_no_second_row(table: TableConfig) -> None:
    for address in ("0x7f01", "0x7f02"):
        columns: dict[str, list[Any]] = {name: [None] for name in VERIFIED.names}
        columns |= {"path": ["a.png"], "reason": ["broken"], "detail": [f"<B at {address}> is bad"]}
        quarantine.keep(table.uri, [pa.table(columns, VERIFIED)], "line", None)
    assert kept(table) == [("line", "a.png", "broken", "<B> is bad")]


def test_an_image_in_another_split_stays_and_is_counted(table: TableConfig, folder: Path) -> None:
    take(table, folder, lines())
    done = take(table, folder, ["0.png,a,val", "1.png,a,", *lines()[2:]])
    assert (done.present, done.other_split, done.dropped) == (6, 1, 0)
    opened = ImageTable(table.uri)
    assert set(scan.rows(opened, opened.pin(), ["split"])["split"].to_pylist()) == {"train"}


def stepped(bits: np.ndarray, grey: int) -> Image.Image:
    """A picture whose perceptual hash has these (16, 16) bits: is the right neighbour brighter?"""
    steps = np.where(bits, 7, -7).cumsum(axis=1)
    cells = grey + np.concatenate([np.zeros((16, 1), int), steps], axis=1)
    return Image.fromarray(cells.astype(np.uint8).repeat(4, axis=0).repeat(4, axis=1))


@pytest.mark.parametrize(
    ("split", "near_bits", "told"), [("test", 12, 2), ("train", 12, 0), ("test", 0, 0)]
)
def test_images_with_look_alikes_in_two_splits_are_told(
    split: str,
    near_bits: int,
    told: int,
    table: TableConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were in training and looked like test images, and nothing said so."""
    folder = tmp_path / "stepped"
    folder.mkdir()
    bits = np.random.default_rng(1).random((16, 16)) < 0.5
    for name, flips in (("0.png", 0), ("1.png", 20), ("2.png", 9), ("3.png", 9)):
        changed = bits.copy()
        changed.reshape(-1)[:flips] ^= True
        stepped(changed, 120 + int(name[0])).save(folder / name)
    given = ["0.png,a,train", f"1.png,a,{split}"]
    assert take(table, folder, [*given, "2.png,a,", "3.png,a,"], near_bits=near_bits).accepted == 4
    assert (f"{told} images look like images of two splits" in caplog.text) == bool(told)
    assert ("of two splits" in caplog.text) == bool(told)
    rows = scan.rows(ImageTable(table.uri), ImageTable(table.uri).pin(), ["path", "split"])
    splits = {row["path"]: row["split"] for row in rows.to_pylist()}
    if near_bits:
        assert (splits["2.png"], splits["3.png"]) == ("train", "train")
    # The source's own choice is nobody's mistake.
    caplog.clear()
    other = TableConfig(uri=f"{table.uri}-2")
    take(other, folder, [*given, "2.png,a,test", "3.png,a,train"], near_bits=near_bits)
    assert "of two splits" not in caplog.text


def test_labels_that_an_ingest_takes_away_are_counted(table: TableConfig, folder: Path) -> None:
    take(table, folder, lines())
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())
    done = take(table, folder, [*lines(), "copy.png,b,train"])
    assert (done.relabelled, done.labels_removed) == (1, 1)
    assert take(table, folder, [*lines("b"), "copy.png,b,train"]).labels_removed == 0


def test_what_a_cleaning_dropped_is_counted_when_it_stays_away_and_when_it_returns(
    table: TableConfig, folder: Path
) -> None:
    first = take(table, folder, lines()).version
    opened = ImageTable(table.uri)
    gone = sorted(scan.rows(opened, first, ["image_id"])["image_id"].to_pylist())[:2]
    found = [verdicts.row(verdicts.Seen(i, "f", 0, i), "dark", dropped=True) for i in gone]
    verdicts.write(table.uri, first, "judged", "strict", found, 6, None)
    by_hand.drop(opened, first, gone, "clean")
    away = take(table, folder, lines(), policies={"strict"})
    assert (away.present, away.dropped, away.accepted, away.returned) == (6, 2, 0, 0)
    back = take(table, folder, lines(), policies={"lax"})
    assert (back.present, back.dropped, back.accepted, back.returned) == (4, 0, 2, 2)


def test_the_summary_says_it(table: TableConfig, folder: Path, cli: Cli, tmp_path: Path) -> None:
    take(table, folder, lines())
    source = f"{{images: {folder}, labels: {tmp_path}/labels.csv, split_column: part}}"
    job = tmp_path / "job.yaml"
    job.write_text(f"table: {{uri: {table.uri}}}\ningest: {{from: {source}, workers: 0}}\n")
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,part", *lines("b", "val")]) + "\n")
    code, out, err = cli("ingest", job, "--json")
    assert code == 0, err
    assert "of these in another split, where they stay" in err and "earlier cleaning" not in err
    assert '"other_split": 6' in out and '"labels_removed": 0' in out


def test_rows_of_another_engine_without_an_id_stop_nothing(
    table: TableConfig, folder: Path
) -> None:
    """A null id, look or family was an error of ours."""
    columns: dict[str, list[Any]] = {name: [None] * 2 for name in SCHEMA.names}
    columns |= {"image_id": [None, "theirs"], "image": [b"x", b"y"]}
    append(table.uri, pa.table(columns, SCHEMA), "theirs")
    assert take(table, folder, lines()).accepted == 6
    done = take(table, folder, lines("b"))
    assert (done.present, done.relabelled) == (6, 6)
    stratified = take(table, folder, lines("c"), stratify=True)
    assert stratified.relabelled == 6


@pytest.mark.parametrize("share", [[0.5, 0.5], [0.6, 0.5], [-0.1, 1], [0, 1.1]])
def test_a_share_that_is_none_is_refused(share: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"share is wrong .*\[low, high\) of \[0, 1\)"):
        validate(IngestConfig, {"share": share})


def test_a_share_without_a_file_is_named(table: TableConfig, folder: Path) -> None:
    with pytest.raises(DataError, match=r"share of the source holds no file .*larger share"):
        take(table, folder, lines(), share=[0, 1e-9])


def test_a_share_of_a_table_is_of_rows_that_stay_the_same(
    table: TableConfig, tmp_path: Path
) -> None:
    """Rows were chosen by their place in a file: two halves of an optimized table overlapped."""
    images = [b"%d" % i for i in range(40)]
    paths = [f"{i}.png" for i in range(40)]
    plain = pa.table({"image": images})
    for start in (0, 20):
        append(str(tmp_path / "plain"), plain.slice(start, 20), "add")
        with_paths = plain.append_column("path", [paths])
        append(str(tmp_path / "named"), with_paths.slice(start, 20), "add")

    def half(name: str, **more: Any) -> list[str]:
        source = {"kind": "delta", "images": str(tmp_path / name), "labelled": False, **more}
        _, parts, _ = understand(validate(IngestConfig, {"from": source, "share": [0, 0.5]}))
        return sorted(c.path for part in parts for c in part.candidates)

    before = half("named")
    versions.optimize(ImageTable(str(tmp_path / "named")), ["path"])
    assert half("named") == before and 5 < len(before) < 35
    with pytest.raises(DataError, match=r"other rows after each table optimize .*from\.version"):
        half("plain")
    assert half("plain", version=1)


def test_another_type_of_a_column_is_found_before_an_image_is_read(
    table: TableConfig, folder: Path
) -> None:
    columns: dict[str, list[Any]] = {name: [None] for name in SCHEMA.names}
    columns |= {"image_id": ["i"], "label": [1], "image": [b"x"]}
    at = SCHEMA.get_field_index("label")
    append(table.uri, pa.table(columns, SCHEMA.set(at, pa.field("label", pa.int64()))), "add")
    with pytest.raises(DataError, match=r"Column 'label' of .* has another type .*int64"):
        take(table, folder, lines())
    assert not ImageTable.exists(quarantine_uri(table.uri)), "it was found before the first batch"


@pytest.mark.parametrize("lacks", ["", "sha256"])
def test_a_table_with_column_mapping_gets_rows_or_is_refused_by_name(
    lacks: str, table: TableConfig, folder: Path
) -> None:
    fields = []
    types = {pa.int32(): "integer", pa.int64(): "long", pa.binary(): "binary"}
    for number, field in enumerate(SCHEMA, 1):
        if field.name != lacks:
            kind = types.get(field.type, "string")
            fields.append(by_hand.column(field.name, kind, number, f"col-{number}"))
    fields.append(by_hand.column("site", "string", 99, "col-99"))
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"}
    Path(table.uri).mkdir()
    names = by_hand.metadata(fields, **mapping)
    by_hand.commit(Path(table.uri), by_hand.protocol("columnMapping"), names)
    if lacks:
        with pytest.raises(
            DataError, match=r"Columns cannot be added .*'sha256'.*column mapping \(name\).*ALTER"
        ):
            take(table, folder, lines())
        assert not ImageTable.exists(quarantine_uri(table.uri))
        return
    assert take(table, folder, lines()).accepted == 6
    opened = ImageTable(table.uri)
    rows = scan.rows(opened, opened.pin(), ["label", "site"])
    assert rows.to_pylist() == [{"label": "a", "site": None}] * 6


def test_a_constraint_and_a_full_disk_end_an_ingest_in_one_message(
    small_disk: Path, folder: Path, tmp_path: Path, textured: Draw, cli: Cli
) -> None:
    cells = TableConfig(uri=str(small_disk / "cells"))
    take(cells, folder, lines())
    DeltaTable(cells.uri).alter.add_constraint({"known": "label is null or label = 'a'"})
    (folder / "new.png").write_bytes(textured(100, 32))
    for label, disk, says in (
        ("z", 0, "New rows break a constraint"),
        ("a", 900_000, "Make room"),
    ):
        for seed in range(200, 210) if disk else ():
            (folder / f"{seed}.png").write_bytes(textured(seed, 300))
        (tmp_path / "labels.csv").write_text(f"file,label\nnew.png,{label}\n")
        source = f"{{images: {folder}, labels: {tmp_path}/labels.csv}}"
        job = tmp_path / "job.yaml"
        job.write_text(f"table: {{uri: {cells.uri}}}\ningest: {{from: {source}, workers: 0}}\n")
        code, _, err = cli("ingest", job)
        assert code == (1 if disk else 2) and says in err and "Traceback" not in err, err
        assert "Preview" not in err
    assert len(scan.rows(ImageTable(cells.uri), ImageTable(cells.uri).pin(), ["image_id"])) == 6


@pytest.mark.parametrize(
    ("then", "splits"),
    [({}, ["test"]), ({"seed": 1}, ["test"]), ({"stratify": True}, ["test"])],
    ids=["shares", "seed", "strata"],
)
def test_an_image_that_looks_like_one_of_the_table_joins_its_split(
    then: dict[str, Any], splits: list[str], table: TableConfig, folder: Path, textured: Draw
) -> None:
    """A draw knows the group alone: where its first image's split was given, copies of test images
    were trained on.
    """
    take(table, folder, lines(split="test"))
    again = folder.parent / "again"
    again.mkdir()
    for seed in range(6):
        (again / f"{seed}.png").write_bytes(textured(seed, 32, compress_level=1))
    done = take(table, again, lines(split=""), **then)
    assert done.accepted == 6 and list(done.splits) == splits


def test_a_row_without_a_split_gives_none_to_those_that_look_like_it(
    table: TableConfig, folder: Path, textured: Draw
) -> None:
    take(table, folder, lines())
    rows = everything(table).set_column(2, SCHEMA.field("split"), pa.nulls(6, pa.string()))
    other = TableConfig(uri=f"{table.uri}_theirs")
    append(other.uri, rows, "another engine")
    again = folder.parent / "again"
    again.mkdir()
    for seed in range(6):
        (again / f"{seed}.png").write_bytes(textured(seed, 32, compress_level=1))
    done = take(other, again, lines(split=""), stratify=True)
    assert done.accepted == 6 and done.splits.keys() <= {"train", "val", "test"}


def everything(table: TableConfig) -> pa.Table:
    opened = ImageTable(table.uri)
    return scan.rows(opened, opened.pin(), SCHEMA.names)


def test_images_of_several_pages_are_told_once(
    table: TableConfig, folder: Path, heard: None, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for kind, suffix in (("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")):
        frames[0].save(folder / f"many.{suffix}", kind, save_all=True, append_images=frames[1:])
    named = ["many.png,a,train", "many.webp,a,train", "many.tif,a,train"]
    for _ in range(2):
        take(table, folder, [*lines(), *named], formats=["PNG", "WEBP", "TIFF", "JPEG"])
    said = [record.message for record in caplog.records if "pages or frames" in record.message]
    assert said == ["3 images have several pages or frames: only the first of each is read"]


def test_pictures_of_12_bits_in_files_of_16_are_told_once(
    table: TableConfig, folder: Path, heard: None, caplog: pytest.LogCaptureFixture
) -> None:
    """raypipe reads the high byte: they were nearly black, and nobody said so."""
    levels_HW = np.linspace(0, 4095, 32 * 32).reshape(32, 32).astype(np.uint16)
    Image.fromarray(levels_HW).save(folder / "twelve.png")
    Image.fromarray(levels_HW[::-1].copy()).save(folder / "twelve.tif")
    # Not these: all 16 bits, and a dark picture of 8.
    Image.fromarray(levels_HW * 16).save(folder / "sixteen.png")
    Image.fromarray((levels_HW >> 8).astype(np.uint8)).save(folder / "eight.png")
    named = ["twelve.png,a,train", "twelve.tif,a,train", "sixteen.png,a,train", "eight.png,a,train"]
    for _ in range(2):
        take(table, folder, [*lines(), *named], formats=["PNG", "TIFF", "JPEG"])
    said = [record.message for record in caplog.records if "nearly black" in record.message]
    assert len(said) == 1 and said[0].startswith("2 images are nearly black: their files have 16")


def test_an_image_that_no_reader_would_take_is_not_accepted(
    table: TableConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ingest.max_pixels let it in, and a training took it for broken."""
    monkeypatch.setattr(decode, "MAX_PIXELS", 2000)
    Image.new("RGB", (64, 64), "red").save(folder / "0.png")
    done = take(table, folder, lines(), max_pixels=10_000)
    assert (done.accepted, done.reasons["too_large"]) == (5, 1)
    assert take(table, folder, lines(), max_pixels=10_000, max_side=16).accepted == 1


def test_an_image_that_a_rival_cleaned_away_while_it_was_ingested_is_counted() -> None:
    """It was verified as known, so it has no bytes: the ingest ended in a TypeError."""
    now = State(None, {"big": "train"}, set(), Groups(), None, Counter(), stored_as={"s": "big"})
    now.renew(State(None, {}, set(), Groups(), None, Counter()))
    row = dict.fromkeys(VERIFIED.names) | {"image_id": "s"}
    chunk = with_ids(pa.Table.from_pylist([row], VERIFIED), now)
    cfg = validate(IngestConfig, {"from": {"images": "x"}})
    assert decide([chunk], cfg, now).counts.present == 1
