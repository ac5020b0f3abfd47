"""A prepared table: the source's rows with smaller images, each once, and it says what it is."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from PIL import Image

from raypipe.config import key_of, validate
from raypipe.errors import DataError, RaypipeError
from raypipe.images import decode
from raypipe.images.smaller import Shape
from raypipe.tables import cleaned, rewrite, scan, verdicts
from raypipe.tables.changes import Place
from raypipe.tables.ingest import ingest
from raypipe.tables.ingest_config import IngestConfig
from raypipe.tables.prepare import run
from raypipe.tables.prepare.plan import FORMAT, Work
from raypipe.tables.prepare.run import PrepareResult, prepare
from raypipe.tables.prepare.staged import FOLDER
from raypipe.tables.table import Columns, ImageTable, TableConfig, append
from tests.tables import handmade as by_hand
from tests.tables.prepared_rows import rows_of as read

pytestmark = pytest.mark.usefixtures("ray_session")
Cli = Callable[..., tuple[int, str, str]]
SIDE = 48


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rows(images: list[bytes | None], first: int = 0) -> pa.Table:
    """A table of the user's own: ids are numbers, labels lists, and there is a struct."""
    numbers = range(first, first + len(images))
    return pa.table(
        {
            "nr": pa.array(numbers, pa.int64()),
            "image": pa.array(images, pa.binary()),
            "label": [["ab"[n % 2], "c"] for n in numbers],
            "split": [("train", "val", None)[n % 3] for n in numbers],
            "place": [{"line": n, "at": f"x{n}"} for n in numbers],
        }
    )


@pytest.fixture
def src(tmp_path: Path, two_hundred: list[bytes]) -> TableConfig:
    """Two hundred images of ten kinds in three files, and three broken ones at the end."""
    uri = str(tmp_path / "src")
    append(uri, rows(list(two_hundred[:100])), "one")
    append(uri, rows(list(two_hundred[100:]), 100), "two")
    append(uri, rows([None, b"junk", two_hundred[0][:-40]], 200), "broken")
    return TableConfig(uri=uri, columns=Columns(id="nr"))


def test_images_are_smaller_and_all_else_is_as_it_was(src: TableConfig, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    done = prepare(src, str(dst), Shape(SIDE))
    assert (done.rows, done.made) == (203, 203)
    assert done.broken == {"missing": 1, "not_an_image": 1, "broken": 1}
    before, after = read(src.uri), read(dst)
    # The same rows in the same order: a training draws the same samples of both.
    assert [row["nr"] for row in after] == list(range(203))
    smaller = 0
    for old, new in zip(before, after, strict=True):
        image, copy = old.pop("image"), new.pop("image")
        assert {name: new[name] for name in old} == old
        assert new["original_sha256"] == (image and sha256(image))
        assert new["sha256"] == (copy and sha256(copy))
        if new["nr"] >= 200:
            assert copy == image
            continue
        pixels_HWC = decode.decode(image)
        height, width = pixels_HWC.shape[:2]
        scale = min(1.0, SIDE / min(height, width))
        found_HWC = decode.decode(copy)
        assert found_HWC.shape == (round(height * scale), round(width * scale), 3)
        assert min(found_HWC.shape[:2]) == min(SIDE, height, width)
        # The same picture: nothing is mirrored, turned, or of another colour.
        wanted = Image.fromarray(pixels_HWC).resize(found_HWC.shape[1::-1], Image.Resampling.BOX)
        error = np.abs(np.asarray(wanted, np.float32) - found_HWC).mean()
        assert error < 14, new["nr"]
        smaller += scale < 1
    assert smaller > 100
    assert done.bytes_after < done.bytes_before


def test_small_upright_images_keep_their_bytes(textured: Any, tmp_path: Path) -> None:
    """Coding them again would lose detail; but a turned one is turned, and never enlarged."""
    small = textured(1, 20)
    turned = Image.open(io.BytesIO(textured(2, 20))).resize((20, 30))
    exif = Image.Exif()
    exif[0x112] = 6
    out = io.BytesIO()
    turned.save(out, "JPEG", quality=95, exif=exif)
    append(str(tmp_path / "src"), rows([small, out.getvalue()]), "made")
    prepare(TableConfig(uri=str(tmp_path / "src")), str(tmp_path / "dst"), Shape(64))
    first, second = read(tmp_path / "dst")
    assert first["image"] == small
    with Image.open(io.BytesIO(second["image"])) as image:
        assert (image.size, image.format) == ((30, 20), "JPEG")
        assert decode.orientation(image) == 1
    prepare(TableConfig(uri=str(tmp_path / "src")), str(tmp_path / "w"), Shape(64, "webp"))
    formats = [Image.open(io.BytesIO(row["image"])).format for row in read(tmp_path / "w")]
    assert formats == ["WEBP", "WEBP"]


def test_bit_rot_is_not_hidden(textured: Any, tmp_path: Path) -> None:
    """An image that decodes but does not match its sha256 stays as it is, with that sha256."""
    good, bad = textured(1, 100), textured(2, 100)
    table = rows([good, bad]).append_column("sha256", pa.array([sha256(good), sha256(good)]))
    append(str(tmp_path / "src"), table, "made")
    done = prepare(TableConfig(uri=str(tmp_path / "src")), str(tmp_path / "dst"), Shape(SIDE))
    assert done.broken == {"mismatch": 1}
    first, second = read(tmp_path / "dst")
    assert first["sha256"] == sha256(first["image"]) != sha256(good)
    assert (second["image"], second["sha256"]) == (bad, sha256(good))
    assert second["original_sha256"] == sha256(bad)


def test_what_was_appended_is_added_and_the_rest_needs_full(
    src: TableConfig, two_hundred: list[bytes], tmp_path: Path
) -> None:
    dst = str(tmp_path / "dst")
    assert prepare(src, dst, Shape(SIDE)).table.origin == f"{src.uri}@v2"
    again = prepare(src, dst, Shape(SIDE))
    assert (again.made, again.rows) == (0, 203)
    # Appended rows are added, and only these.
    append(src.uri, rows(list(two_hundred[:7]), 203), "more")
    more = prepare(src, dst, Shape(SIDE))
    assert (more.made, more.rows, more.table.origin) == (7, 210, f"{src.uri}@v3")
    assert [row["nr"] for row in read(dst)] == list(range(210))
    # The table's earlier versions say what they stand for, too.
    table = ImageTable(dst)
    assert table.pin(more.table.version - 2).origin == f"{src.uri}@v2"
    # OPTIMIZE of the source changes no row.
    DeltaTable(src.uri).optimize.compact()
    moved = prepare(src, dst, Shape(SIDE))
    assert (moved.made, moved.rows, moved.table.origin) == (0, 210, f"{src.uri}@v4")
    # A changed label changes no image, but the row.
    DeltaTable(src.uri).update(updates={"split": "'test'"}, predicate="nr = 5")
    with pytest.raises(DataError, match="changed, removed or moved") as refused:
        prepare(src, dst, Shape(SIDE))
    assert "--full" in refused.value.fix
    whole = prepare(src, dst, Shape(SIDE), full=True)
    assert (whole.made, whole.rows) == (210, 210)
    found = read(dst)
    assert sorted(row["nr"] for row in found) == list(range(210))
    assert [row["split"] for row in found if row["nr"] == 5] == ["test"]
    # Its old rows are there as long as the old version is.
    assert len(read(dst, moved.table.version)) == 210
    # Another way of making it, an older version: refused in the same way.
    for source, shape in ((src, Shape(32)), (src.model_copy(update={"version": 2}), Shape(SIDE))):
        with pytest.raises(DataError, match="prepared from") as refused:
            prepare(source, dst, shape)
        assert "--full" in refused.value.fix


def test_full_makes_again_only_what_cannot_be_brought_up(
    two_hundred: list[bytes], tmp_path: Path
) -> None:
    """A nightly job passes --full always, and made every image again each night."""
    uri, dst = str(tmp_path / "src"), str(tmp_path / "dst")
    append(uri, rows(list(two_hundred[:20])), "one")
    source = TableConfig(uri=uri, columns=Columns(id="nr"))
    assert prepare(source, dst, Shape(SIDE), full=True).made == 20
    again = prepare(source, dst, Shape(SIDE), full=True)
    assert (again.made, again.rows) == (0, 20)
    append(uri, rows(list(two_hundred[20:27]), 20), "more")
    more = prepare(source, dst, Shape(SIDE), full=True)
    assert (more.made, more.rows) == (7, 27)
    assert [row["nr"] for row in read(dst)] == list(range(27))
    DeltaTable(uri).delete("nr = 3")
    assert prepare(source, dst, Shape(SIDE), full=True).made == 26
    # What no --full can mend is refused with it, too.
    with pytest.raises(DataError, match="no rows to prepare"):
        nobody = source.model_copy(update={"where": {"split": "nowhere"}})
        prepare(nobody, dst, Shape(SIDE), full=True)
    assert len(read(dst)) == 26


@pytest.mark.parametrize("change", ["another", "wider"])
def test_a_column_that_became_another_or_wider_is_refused(
    change: str, textured: Any, tmp_path: Path
) -> None:
    """Its old values stayed: they were those of the dropped column, or did not fit the new type."""
    src, dst = tmp_path / "src", str(tmp_path / "dst")
    src.mkdir()
    image = by_hand.column("image", "binary", 1, "c1")
    label = by_hand.column("label", "string", 4, "c4")
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "4"}

    def commit(x: Any, stored: str, value: pa.Scalar, file: str, *more: Any) -> None:
        images = pa.array([textured(value.as_py() % 99, 8)], pa.binary())
        values = pa.array([value.as_py()], value.type)
        added = by_hand.add(src, pa.table({"c1": images, "c4": ["a"], stored: values}), file)
        by_hand.commit(src, *more, by_hand.metadata([image, label, x], **mapping), added)

    listed = by_hand.protocol("columnMapping", "typeWidening")
    old = by_hand.column("x", "integer", 2, "c2")
    commit(old, "c2", pa.scalar(5, pa.int32()), "a.parquet", listed)
    source = TableConfig(uri=str(src))
    assert prepare(source, dst, Shape(SIDE)).made == 1
    commit(old, "c2", pa.scalar(6, pa.int32()), "b.parquet")
    assert prepare(source, dst, Shape(SIDE)).made == 1
    if change == "another":
        new = by_hand.column("x", "integer", 3, "c3")
        commit(new, "c3", pa.scalar(7, pa.int32()), "c.parquet")
    else:
        new = by_hand.column("x", "long", 2, "c2")
        commit(new, "c2", pa.scalar(2**40, pa.int64()), "c.parquet")
    with pytest.raises(DataError, match=r"another column 'x' than at v1.*--full"):
        prepare(source, dst, Shape(SIDE))
    assert prepare(source, dst, Shape(SIDE), full=True).made == 3
    expected = [None, None, 7] if change == "another" else [5, 6, 2**40]
    assert [row["x"] for row in read(dst)] == expected
    assert prepare(source, dst, Shape(SIDE)).made == 0


@contextmanager
def recorded_before(
    source: TableConfig, monkeypatch: pytest.MonkeyPatch, *more: object
) -> Iterator[None]:
    """Records as an older raypipe wrote them: without roles, and with this line."""
    table = ImageTable.open(source)
    chosen = (source.where, source.sample_key, source.columns.image, Shape(SIDE))
    line = key_of("prepared", FORMAT, table.pin().table_id, *chosen, *more)
    with monkeypatch.context() as patched:
        patched.setattr(Work, "line", line)
        patched.setattr(Work, "roles", "")
        yield


@pytest.mark.parametrize("lists", [True, False])
def test_tags_of_a_record_of_before_count_where_each_order_was_found(
    lists: bool, two_hundred: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a column of texts it missed some orders. Tables of lists were refused as well."""
    few = rows(list(two_hundred[:6]))
    if not lists:
        place = few.schema.get_field_index("label")
        few = few.set_column(place, "label", pa.array(["a|c", "b|c"] * 3))
    append(str(tmp_path / "src"), few, "made")
    where: dict[str, Any] = {"label": "c|a"}
    source = TableConfig(uri=str(tmp_path / "src"), columns=Columns(id="nr"), where=where)
    dst = str(tmp_path / "dst")
    with recorded_before(source, monkeypatch):
        assert prepare(source, dst, Shape(SIDE)).made == 3
    if lists:
        assert prepare(source, dst, Shape(SIDE)).made == 0
    else:
        with pytest.raises(DataError, match=r"prepared from something else.*--full"):
            prepare(source, dst, Shape(SIDE))
    # Under another name the line said so, and by then each order was found in texts, too.
    renamed = [name.replace("label", "tags") for name in few.column_names]
    append(str(tmp_path / "own"), few.rename_columns(renamed), "made")
    columns, where = Columns(id="nr", label="tags"), {"tags": "c|a"}
    named = TableConfig(uri=str(tmp_path / "own"), columns=columns, where=where)
    with recorded_before(named, monkeypatch, ("", "tags")):
        prepare(named, str(tmp_path / "named"), Shape(SIDE))
    assert prepare(named, str(tmp_path / "named"), Shape(SIDE)).made == 0


def test_other_columns_of_ids_or_labels_choose_other_rows(
    src: TableConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample goes by id: rows of another sample were added to those of the first."""
    dst = str(tmp_path / "dst")
    sample = src.model_copy(update={"sample": 0.3})
    prepare(sample, dst, Shape(SIDE))
    other = sample.model_copy(update={"columns": Columns(id="split")})
    with pytest.raises(DataError, match="prepared from something else"):
        prepare(other, dst, Shape(SIDE))
    # Records of before: the first ones do not say which they were, and then the line did.
    before: dict[str, list[object]] = {"first": [], "then": [("nr", "")]}
    for name, more in before.items():
        with recorded_before(sample, monkeypatch, *more):
            prepare(sample, str(tmp_path / name), Shape(SIDE))
        assert prepare(sample, str(tmp_path / name), Shape(SIDE)).made == 0
    with pytest.raises(DataError, match="prepared from something else"):
        prepare(other, str(tmp_path / "then"), Shape(SIDE))
    # Where neither a sample nor a condition uses them, the names say nothing of the rows.
    whole = str(tmp_path / "whole")
    prepare(src, whole, Shape(SIDE))
    named = src.model_copy(update={"columns": Columns(id="split", label="split")})
    assert prepare(named, whole, Shape(SIDE)).made == 0


def test_where_and_sample_choose_rows_and_ids_keep_their_type(
    src: TableConfig, tmp_path: Path
) -> None:
    chosen = src.model_copy(update={"where": {"split": "val", "nr": ["4", "7", "9"]}})
    done = prepare(chosen, str(tmp_path / "dst"), Shape(SIDE))
    assert [row["nr"] for row in read(tmp_path / "dst")] == [4, 7]
    assert done.rows == 2
    sample = src.model_copy(update={"sample": 0.3})
    some = prepare(sample, str(tmp_path / "some"), Shape(SIDE))
    with pytest.raises(DataError, match="no rows to prepare"):
        none = src.model_copy(update={"where": {"split": "nowhere"}})
        prepare(none, str(tmp_path / "none"), Shape(SIDE))
    table, version = ImageTable.open_pinned(sample)
    expected = scan.rows(table, version, ["nr"])["nr"].to_pylist()
    assert [str(row["nr"]) for row in read(tmp_path / "some")] == expected
    assert 20 < some.rows < 120
    assert not (tmp_path / "none").exists()


def test_a_run_goes_on_where_another_was_killed(
    src: TableConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made is not made again, unless its file is damaged."""
    dst = tmp_path / "dst"
    monkeypatch.setattr("raypipe.tables.prepare.parts.FEWEST_ROWS", 1)
    killed = False

    def kill(*_: object) -> None:
        nonlocal killed
        killed = True
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "commit", kill)
        with pytest.raises(KeyboardInterrupt):
            prepare(src, str(dst), Shape(SIDE))
    assert killed
    assert not DeltaTable.is_deltatable(str(dst))
    files = sorted(dst.glob("*.parquet"))
    assert len(files) == 3
    files[1].write_bytes(files[1].read_bytes()[:-9])
    done = prepare(src, str(dst), Shape(SIDE))
    assert (done.shared, done.files, done.rows) == (2, 3, 203)
    assert [row["nr"] for row in read(dst)] == list(range(203))
    assert not (dst / FOLDER).exists()


def test_two_at_once_add_every_row_once(
    src: TableConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.tables.prepare.parts.FEWEST_ROWS", 1)
    found: list[PrepareResult | BaseException] = []
    together = threading.Barrier(2)

    def one() -> None:
        try:
            together.wait()
            found.append(prepare(src, str(tmp_path / "dst"), Shape(SIDE)))
        except BaseException as e:
            found.append(e)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [result for result in found if isinstance(result, PrepareResult)]
    assert len(results) == 2, found
    # One has committed, and the other says that there was nothing left to do.
    assert sorted(result.made for result in results) == [0, 203]
    assert [row["nr"] for row in read(tmp_path / "dst")] == list(range(203))


def test_a_restored_table_claims_nothing(src: TableConfig, tmp_path: Path) -> None:
    dst = str(tmp_path / "dst")
    first = prepare(src, dst, Shape(SIDE)).table.version
    append(src.uri, rows([b"junk"], 203), "more")
    prepare(src, dst, Shape(SIDE))
    DeltaTable(dst).restore(first)
    assert ImageTable(dst).pin().origin == ""
    with pytest.raises(DataError, match="does not say any more"):
        prepare(src, dst, Shape(SIDE))
    assert prepare(src, dst, Shape(SIDE), full=True).rows == 204
    assert len(read(dst)) == 204


def test_a_column_with_an_odd_name_is_named_for_every_engine(textured: Any, tmp_path: Path) -> None:
    content = pa.table({"image": [textured(0)], "my label": ["a"], "a.b": ["x"]})
    append(str(tmp_path / "src"), content, "one")
    columns = Columns(id="a.b", label="my label", source="a.b")
    source = TableConfig(uri=str(tmp_path / "src"), columns=columns)
    prepare(source, str(tmp_path / "dst"), Shape(SIDE))
    properties = DeltaTable(str(tmp_path / "dst")).metadata().configuration
    assert properties["delta.dataSkippingStatsColumns"] == "`my label`,`a.b`"


def test_a_source_that_was_restored_from_a_backup_is_not_taken_for_the_same(
    textured: Any, tmp_path: Path
) -> None:
    """Its version had the number that was prepared, and other rows: nothing was done."""
    folder = tmp_path / "src"
    append(str(folder), rows([textured(0)]), "one")
    shutil.copytree(folder, tmp_path / "backup")
    append(str(folder), rows([textured(1)], 1), "lost")
    source = TableConfig(uri=str(folder), columns=Columns(id="nr"))
    dst = str(tmp_path / "dst")
    assert prepare(source, dst, Shape(SIDE)).made == 2
    assert prepare(source, dst, Shape(SIDE)).made == 0

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    for n in (2, 3):
        append(str(folder), rows([textured(n)], n), "since")
        with pytest.raises(DataError, match=r"has other rows now.*--full"):
            prepare(source, dst, Shape(SIDE))
    assert prepare(source, dst, Shape(SIDE), full=True).rows == 3
    assert [row["nr"] for row in read(dst)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{src}", "{src}"], "into itself"),
        (["{src}", "{src}/../src/"], "into itself"),
        (["{src}", "{src}/small"], "inside the other"),
        (["{src}", "{tmp}"], "inside the other"),
        (["{src}", "{tmp}/other"], "Another table is here"),
        (["{src}", "{tmp}/files"], "something else here"),
        (["{src}", "{tmp}/files/a.txt"], "something else here"),
        (["{src}", "{tmp}/new", "--side", "0"], "no side of an image"),
        (["{src}", "{tmp}/new", "--format", "gif"], "this format"),
        (["{src}", "{tmp}/new", "--quality", "101"], "no quality"),
        (["{src}", "{tmp}/new", "--workers", "0"], "--workers is too small"),
        (["{src}", "{tmp}/new", "--where", "nr=x"], "No value of column"),
        (["{src}", "{tmp}/new", "--version", "9"], "no version 9"),
        (["{src}", "main.vision.photos"], "Unity Catalog"),
        (["{tmp}/noimage", "{tmp}/new"], "no column 'image'"),
        (["{tmp}/nothing", "{tmp}/new"], "No Delta table here"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(
    arguments: list[str], said: str, cli: Cli, tmp_path: Path
) -> None:
    append(str(tmp_path / "src"), rows([b"junk"]), "made")
    append(str(tmp_path / "other"), rows([b"junk"]), "made")
    append(str(tmp_path / "noimage"), pa.table({"nr": [1]}), "made")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    filled = [one.format(src=tmp_path / "src", tmp=tmp_path) for one in arguments]
    code, out, err = cli("table", "prepare", *filled)
    assert (code, out) == (2, "")
    assert said in err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_line_says_what_it_did(src: TableConfig, cli: Cli, tmp_path: Path) -> None:
    command = ("table", "prepare", src.uri, str(tmp_path / "dst"), "--side", "48", "--json")
    code, out, _ = cli(*command)
    found = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (found["prepared_from"], found["rows"], found["made"]) == (f"{src.uri}@v2", 203, 203)
    code, out, err = cli(*command)
    assert (code, json.loads(out.splitlines()[-1])["made"]) == (0, 0)
    assert "nothing to do" in err
    code, out, _ = cli("table", "lineage", str(tmp_path / "dst"), "--json")
    steps = json.loads(out.splitlines()[-1])["steps"]
    assert [step["source"] for step in steps][:1] == [f"{src.uri}@v2"]


def test_a_folder_that_cannot_be_written_is_one_message(src: TableConfig, small_disk: Path) -> None:
    with pytest.raises(RaypipeError, match="cannot be written"):
        prepare(src, str(small_disk / "dst"), Shape(2000, "png"))


def test_a_prepared_table_that_was_cleaned_itself_says_so(src: TableConfig, tmp_path: Path) -> None:
    """Its model card said "Not cleaned", as its source is."""
    place = TableConfig(uri=str(tmp_path / "small"), columns=src.columns)
    prepare(src, place.uri, Shape(16))
    table = ImageTable.open(place)
    raw = table.pin()
    assert cleaned.of(table, raw).state == "not cleaned"
    file = next(iter(table.snapshot(raw).paths(table.uri)))
    found = [verdicts.row(verdicts.Seen("i", file, 0, "h"), "dark", dropped=True)]
    verdicts.write(table.uri, raw, "p", "r", found, 200, None)
    rewrite.drop(table, raw, [Place(file, 0)], f"clean p of v{raw.version}")
    said = cleaned.of(table, table.pin())
    assert (said.state, said.dropped) == ("cleaned", 1)


def test_nothing_is_ingested_into_a_prepared_table(
    src: TableConfig, tmp_path: Path, photos: Path
) -> None:
    """Its rows were no longer those of its source, and came a second time with the next run."""
    place = TableConfig(uri=str(tmp_path / "small"), columns=src.columns)
    prepare(src, place.uri, Shape(16))
    before = ImageTable.open(place).pin()
    cfg = validate(IngestConfig, {"from": {"images": str(photos), "labelled": False}})
    with pytest.raises(DataError, match=r"made by raypipe table prepare.*Ingest into the source"):
        ingest(TableConfig(uri=place.uri), cfg)
    assert ImageTable.open(place).pin() == before


def test_what_was_said_of_the_source_stays_when_the_prepared_table_is_judged(
    src: TableConfig, tmp_path: Path
) -> None:
    source = ImageTable.open(src)
    judged = source.pin()
    verdicts.write(source.uri, judged, "p", "r", [], 200, None)
    place = TableConfig(uri=str(tmp_path / "small"), columns=src.columns)
    prepare(src, place.uri, Shape(16))
    table = ImageTable.open(place)
    was = cleaned.of(table, table.pin())
    assert (was.state, was.judged) == ("judged", str(judged))
    verdicts.write(table.uri, table.pin(), "p", "r", [], 200, None)
    assert cleaned.of(table, table.pin(), was) == was


@pytest.mark.parametrize("commits", [0, 1])
def test_a_record_without_its_rows_claims_nothing(
    commits: int, src: TableConfig, tmp_path: Path
) -> None:
    """RESTORE to "one version back" is to the record, whose rows came with the next commit."""
    place = str(tmp_path / "small")
    prepare(src, place, Shape(16))
    first = DeltaTable(place).version()
    append(src.uri, rows([b"junk"], 203), "more")
    prepare(src, place, Shape(16))
    # Before the first rows, or before those that were appended.
    DeltaTable(place).restore(first + 1 if commits else first - 1)
    assert ImageTable(place, src.columns).pin().origin == ""
    with pytest.raises(DataError, match="does not say any more what it was made from"):
        prepare(src, place, Shape(16))
