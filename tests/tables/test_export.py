"""`raypipe table export` writes the visible rows completely or not at all, here and by workers."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.models.labels import Kind
from raypipe.tables.export import export
from raypipe.tables.sources import SourceConfig, candidates
from raypipe.tables.table import ImageTable, append
from tests.tables import handmade as by_hand

Cli = Callable[..., tuple[int, str, str]]


def rows(start: int, stop: int, image: bytes = b"\x89PNG") -> pa.Table:
    n = range(start, stop)
    return pa.table(
        {
            "image_id": [f"{i:04d}" for i in n],
            "label": [("a", "b", None)[i % 3] for i in n],
            "split": ["test" if i % 5 == 0 else "train" for i in n],
            "image": pa.array([image + b"%d" % i for i in n], pa.binary()),
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Version 0: 300 rows in three row groups; version 1: 100 more; tag `first` on version 0."""
    append(str(tmp_path / "t"), rows(0, 300), "first")
    append(str(tmp_path / "t"), rows(300, 400), "second")
    ImageTable(str(tmp_path / "t")).tag("first", 0)
    return tmp_path / "t"


def read(path: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(path).to_pylist(), key=lambda r: str(r["image_id"]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], lambda r: True),
        (["--version", "0"], lambda r: r["image_id"] < "0300"),
        (["--tag", "first"], lambda r: r["image_id"] < "0300"),
        (["--where", "label=a"], lambda r: r["label"] == "a"),
        (
            ["--where", "label=a", "--where", "label=b", "--where", "split=test"],
            lambda r: r["label"] and r["split"] == "test",
        ),
        (["--where", "label=nobody"], lambda r: False),
    ],
)
def test_the_rows_asked_for_and_no_others(
    arguments: list[str], expected: Any, table: Path, tmp_path: Path, cli: Cli
) -> None:
    code, out, err = cli("table", "export", table, tmp_path / "o.parquet", "--json", *arguments)
    assert code == 0, err
    wanted = [r for r in rows(0, 400).to_pylist() if expected(r)]
    assert read(tmp_path / "o.parquet") == wanted
    assert json.loads(out)["rows"] == len(wanted)


def test_a_condition_narrows_that_of_the_configuration(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    """It replaced it: rows that the configuration leaves out were exported."""
    config = tmp_path / "c.yaml"
    config.write_text(f"table: {{uri: {table}, where: {{split: test}}}}\n", encoding="utf-8")
    arguments = ["--where", "split=test", "--where", "split=train", "--where", "label=a"]
    assert cli("table", "export", config, tmp_path / "o.parquet", *arguments)[0] == 0
    found = pq.read_table(tmp_path / "o.parquet")
    assert set(found["split"].to_pylist()) == {"test"} and len(found)
    assert cli("table", "export", config, tmp_path / "p.parquet", "--where", "split=train")[0] == 0
    assert len(pq.read_table(tmp_path / "p.parquet")) == 0


def test_columns_come_in_their_order_and_a_limit_cuts(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    arguments = ["--columns", "split, image_id", "--limit", 130, "--where", "split=train"]
    assert cli("table", "export", table, tmp_path / "o.parquet", *arguments)[0] == 0
    found = pq.read_table(tmp_path / "o.parquet")
    assert (found.schema.names, len(found), set(found["split"].to_pylist())) == (
        ["split", "image_id"],
        130,
        {"train"},
    )


def test_a_column_with_a_comma_in_its_name_is_quoted(tmp_path: Path, cli: Cli) -> None:
    odd = {name: [n] for n, name in enumerate(["a", "b,c", 'd"e', " f "])}
    write_deltalake(str(tmp_path / "t"), pa.table(odd))
    asked = {
        'a,"b,c"': ["a", "b,c"],
        '"d""e" , a,': ['d"e', "a"],
        'd"e," f "': ['d"e', " f "],
        ",a,": ["a"],
        'a,"b,c",a': ["a", "b,c"],
    }
    for n, (given, expected) in enumerate(asked.items()):
        out = tmp_path / f"{n}.parquet"
        code, _, err = cli("table", "export", tmp_path / "t", out, "--columns", given)
        assert (code, pq.read_schema(out).names) == (0, expected), err
    for wrong in ('a,"b,c', '"a"b'):
        code, _, err = cli("table", "export", tmp_path / "t", tmp_path / "o", "--columns", wrong)
        assert code == 2 and "no names between commas" in err
    # The help is in a box.
    helped = cli("table", "export", "--help")[1].replace("│", " ")
    assert "quoted, as in a CSV" in " ".join(helped.split())


def test_a_sample_is_a_share_and_the_same_rows_each_time(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    for name in "ab":
        assert (
            cli("table", "export", table, tmp_path / f"{name}.parquet", "--sample", "0.25")[0] == 0
        )
    assert read(tmp_path / "a.parquet") == read(tmp_path / "b.parquet")
    assert (
        60 < len(read(tmp_path / "a.parquet")) < 140
    )  # 100, within four and a half standard deviations


def test_times_name_the_newest_version_at_or_before(table: Path, tmp_path: Path, cli: Cli) -> None:
    log = sorted((table / "_delta_log").glob("*.json"))
    for file, when in zip(log, (1_700_000_000, 1_800_000_000, 1_900_000_000), strict=True):
        os.utime(file, (when, when))
    for at, count in (
        ("2023-11-14T22:13:20Z", 300),
        ("2026-01-01", 300),
        ("2028-01-01T00:00:00+01:00", 400),
    ):
        assert (
            cli("table", "export", table, tmp_path / "o.parquet", "--at", at, "--overwrite")[0] == 0
        )
        assert len(read(tmp_path / "o.parquet")) == count
    code, _, err = cli("table", "export", table, tmp_path / "p.parquet", "--at", "2020-01-01")
    assert (code, "has no version as old as that" in err) == (2, True)
    code, _, err = cli("table", "export", table, tmp_path / "p.parquet", "--at", "2020-13-01")
    assert (code, "This is no time" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "0", "--tag", "first"], "exclude each other"),
        (["--tag", "frist"], "Did you mean 'first'"),
        (["--columns", "lable"], "has no column 'lable'"),
        (["--where", "lable=a"], "has no column 'lable'"),
        (["--where", "label"], "This is no condition"),
        (["--where", '"lable=x"=a'], "has no column 'lable=x'"),
        (["--version", "99"], "has no version 99"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    arguments: list[str], message: str, table: Path, tmp_path: Path, cli: Cli
) -> None:
    code, _, err = cli("table", "export", table, tmp_path / "o.parquet", *arguments)
    assert (code, message in err, "Traceback" in err) == (2, True, False), err
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_target_is_replaced_only_when_asked(table: Path, tmp_path: Path, cli: Cli) -> None:
    for out, count in (
        (tmp_path / "o.parquet", lambda o: len(read(o))),
        (tmp_path / "o", lambda o: len(list(o.glob("*/*")))),
    ):
        assert cli("table", "export", table, out, "--limit", 9)[0] == 0
        code, _, err = cli("table", "export", table, out)
        assert (code, count(out), "--overwrite" in err) == (2, 9, True)
        assert cli("table", "export", table, out, "--overwrite")[0] == 0
        assert count(out) == 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o", "o.parquet", "t"]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("target", ["t", "t/inside", "t/_delta_log", ".", "link", "t.parquet/../t"])
def test_an_export_never_touches_a_table(
    target: str, table: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "link").symlink_to(table)
    (tmp_path / "t.parquet").mkdir()
    before = everything(tmp_path)
    code, _, err = cli("table", "export", table, tmp_path / target, "--overwrite")
    assert (code, "An export never touches a table" in err) == (2, True), err
    assert everything(tmp_path) == before


def test_overwriting_removes_what_an_export_made_and_nothing_else(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    """Another table, photographs with a labels.csv, an export with a file added, a Parquet file."""
    append(str(tmp_path / "other"), rows(0, 3), "theirs")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"mine")
    (tmp_path / "photos" / "labels.csv").write_text("file,label\na.png,x\n")
    assert cli("table", "export", table, tmp_path / "made")[0] == 0
    (tmp_path / "made" / "a" / "notes.txt").write_text("mine")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "theirs.parquet")
    (tmp_path / "text.parquet").write_text("mine")
    (tmp_path / "o.parquet.partial").write_text("mine")
    before = everything(tmp_path)
    for target in ("other", "photos", "made", "theirs.parquet", "text.parquet"):
        code, _, err = cli("table", "export", table, tmp_path / target, "--overwrite")
        assert (code, "no export made" in err) == (2, True), err
    assert cli("table", "export", table, tmp_path / "o.parquet")[0] == 0
    assert {k: v for k, v in everything(tmp_path).items() if k != "o.parquet"} == before


def test_long_labels_in_any_script_become_folders_and_two_labels_never_one(tmp_path: Path) -> None:
    long = [
        "漢" * 120,
        "漢" * 121,
        "Ä" * 300,
        "a" * 250,
        "a" * 251,
        "x/y",
        "x_y",
        "Case",
        "case",
        "=",
        "unlabelled",
        None,
    ]
    ids = ["同" * 100 + str(i) for i in range(len(long))]
    append(
        str(tmp_path / "t"),
        pa.table({"image_id": ids, "label": long, "image": [b"%d" % i for i in range(12)]}),
        "add",
    )
    opened = ImageTable(str(tmp_path / "t"))
    assert export(opened, opened.pin(), tmp_path / "out").rows == len(long)
    lines = list(csv.DictReader((tmp_path / "out" / "labels.csv").open(encoding="utf-8")))
    assert [line["label"] for line in lines] == long[:-1]
    assert [(tmp_path / "out" / line["file"]).read_bytes() for line in lines] == [
        b"%d" % i for i in range(11)
    ]
    folders = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert len({folder.name.casefold() for folder in folders}) == len(long)


def test_an_export_that_fails_half_way_leaves_what_was_there(table: Path, tmp_path: Path) -> None:
    out, opened = tmp_path / "o.parquet", ImageTable(str(table))
    export(opened, opened.pin(), out, limit=3)
    before = out.read_bytes()

    def stop(done: int, total: int) -> None:
        if done > 128:
            raise DataError("enough")

    with pytest.raises(DataError, match="enough"):
        export(opened, opened.pin(), out, overwrite=True, progress=stop)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.parquet", "t"]


@pytest.mark.parametrize("name", ["o.parquet", "o"])
def test_an_export_to_a_full_disk_is_one_message_and_leaves_nothing(
    name: str, small_disk: Path, tmp_path: Path, cli: Cli
) -> None:
    append(str(tmp_path / "large"), rows(0, 30, os.urandom(100_000)), "add")
    code, _, err = cli("table", "export", tmp_path / "large", small_disk / name)
    assert code == 1 and "The target cannot be written" in err and "Make room" in err, err
    assert "Traceback" not in err and list(small_disk.iterdir()) == []


def test_a_folder_gets_the_images_and_a_list_that_ingest_reads(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    assert cli("table", "export", table, f"{tmp_path}/photos/", "--limit", 12)[0] == 0
    listed = list(csv.DictReader((tmp_path / "photos" / "labels.csv").open()))
    wanted = rows(0, 12).to_pylist()
    names = [f"{row['label'] or 'unlabelled'}/{row['image_id']}.png" for row in wanted]
    for name, row in zip(names, wanted, strict=True):
        assert (tmp_path / "photos" / name).read_bytes() == row["image"]
    expected = [
        {"file": name, "label": row["label"]}
        for name, row in zip(names, wanted, strict=True)
        if row["label"]
    ]
    assert listed == expected


def test_labels_and_ids_cannot_lead_out_of_the_folder_or_hide_each_other(tmp_path: Path) -> None:
    odd = {
        "image_id": ["../x", "..", "same", "same"],
        "label": ["..", ".", "a/b", "a/b"],
        "image": [b"1", b"2", b"3", b"4"],
    }
    append(str(tmp_path / "t"), pa.table(odd), "add")
    opened = ImageTable(str(tmp_path / "t"))
    assert export(opened, opened.pin(), tmp_path / "out" / "photos").rows == 4
    files = [p for p in (tmp_path / "out").rglob("*") if p.suffix == ".bin"]
    assert sorted(f.read_bytes() for f in files) == [b"1", b"2", b"3", b"4"]
    assert all(f.parent.parent == tmp_path / "out" / "photos" for f in files)


def comes_back(folder: Path, kind: Kind) -> dict[bytes, str | None]:
    """{image: label} as `raypipe ingest` reads an exported folder."""
    source = {"images": str(folder), "labels": str(folder / "labels.csv"), "task": kind}
    found: dict[bytes, str | None] = {}
    for part in candidates(validate(SourceConfig, source)).parts:
        for candidate, data in zip(part.candidates, part.read(part.candidates), strict=True):
            assert not candidate.reason and isinstance(data, bytes), candidate
            found[data] = candidate.label
    return found


ODD_IDS = ["x", "X", "x-2", "x", "x", ".hidden", "a\\b", "a/b", "é", "é", " y ", None, "labels.csv"]
ODD_LABELS: list[str | None] = [".hidden", "_delta_log", "c\\d"]
ROUND: list[tuple[Kind, pa.DataType, list[Any], list[str | None]]] = [
    ("single_label", pa.string(), ["a", None, "B", "b"], ["a", None, "B", "b"]),
    ("multi_label", pa.string(), ["a|b", "", None, "b"], ["a|b", "", None, "b"]),
    ("multi_label", pa.list_(pa.string()), [["b", "a"], [], None], ["a|b", "", None]),
    ("single_label", pa.string(), ODD_LABELS, ODD_LABELS),
    (
        "regression",
        pa.float32(),
        [0.1, 1 / 3, None, 4e9],
        ["0.1", "0.33333334", None, "4000000000"],
    ),
    ("single_label", pa.int64(), [1, 2, None], ["1", "2", None]),
]


@pytest.mark.parametrize(("kind", "held", "labels", "expected"), ROUND)
def test_no_image_and_no_label_is_lost_on_the_way_through_a_folder(
    kind: Kind,
    held: pa.DataType,
    labels: list[Any],
    expected: list[str | None],
    tmp_path: Path,
) -> None:
    """Every label with every odd id: equal ones, and ones that some file system holds for equal."""
    pairs = list(itertools.product(ODD_IDS, zip(labels, expected, strict=True)))
    images = [b"\x89PNG%d" % i for i in range(len(pairs))]
    columns = {
        "image_id": [name for name, _ in pairs],
        "label": pa.array([label for _, (label, _) in pairs], held),
        "image": pa.array(images, pa.binary()),
    }
    append(str(tmp_path / "t"), pa.table(columns), "add")
    opened = ImageTable(str(tmp_path / "t"))
    assert export(opened, opened.pin(), tmp_path / "out").rows == len(images)
    texts = [text for _, (_, text) in pairs]
    assert comes_back(tmp_path / "out", kind) == dict(zip(images, texts, strict=True))
    files = [path.as_posix() for path in (tmp_path / "out").rglob("*.png")]
    assert len({unicodedata.normalize("NFC", file).casefold() for file in files}) == len(images)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_condition_on_labels_that_are_no_text_holds_for_a_folder_too(
    workers: int, tmp_path: Path, cli: Cli
) -> None:
    for name, labels, where in (
        ("numbers", pa.array([1, 2, 1, None]), "label=01"),
        ("tags", pa.array([["b", "a"], ["a"], ["a", "b"], None]), "label=a|b"),
    ):
        ids, images = list("wxyz"), [b"%d" % i for i in range(4)]
        columns = pa.table({"image_id": ids, "label": labels, "image": images})
        append(str(tmp_path / name), columns, "add")
        arguments = [tmp_path / f"out-{name}", "--where", where, "--workers", workers]
        code, _, err = cli("table", "export", tmp_path / name, *arguments)
        assert code == 0, err
        files = sorted(path.name for path in (tmp_path / f"out-{name}").glob("*/*"))
        assert files == ["w.bin", "y.bin"]


def test_rows_without_an_image_are_counted(table: Path, tmp_path: Path, cli: Cli) -> None:
    missing = rows(400, 403).set_column(3, "image", pa.array([None, b"1", None], pa.binary()))
    append(str(table), missing, "third")
    code, out, err = cli("table", "export", table, tmp_path / "o", "--json")
    assert code == 0 and "2 rows of" in err and "have no image" in err
    assert (json.loads(out)["rows"], json.loads(out)["without image"]) == (401, 2)


def test_a_folder_has_no_columns_to_choose(table: Path, tmp_path: Path, cli: Cli) -> None:
    """They were ignored."""
    code, _, err = cli("table", "export", table, tmp_path / "o", "--columns", "label,image")
    assert (code, "no columns to choose" in err, "OUT with .parquet" in err) == (2, True, True)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("column", [False, True], ids=["no column", "nulls"])
def test_folders_of_labels_need_labels(column: bool, table: Path, tmp_path: Path, cli: Cli) -> None:
    """All images came into a folder `unlabelled`, which is a class for whoever ingests it."""
    plain = rows(0, 9).drop_columns(["label"])
    if column:
        plain = plain.append_column("label", pa.nulls(9, pa.string()))
    append(str(tmp_path / "plain"), plain, "add")
    code, _, err = cli("table", "export", tmp_path / "plain", tmp_path / "o")
    assert code == 2 and ("has a label" if column else "no column 'label'") in err
    assert not (tmp_path / "o").exists()
    assert cli("table", "export", tmp_path / "plain", tmp_path / "o.parquet")[0] == 0


@pytest.mark.parametrize(
    "change", ["labels.csv", "image", "image of the same size", "mark", "none"]
)
def test_a_corrected_label_is_not_overwritten(
    change: str, table: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "o"
    assert cli("table", "export", table, out, "--limit", 9)[0] == 0
    labels = out / "labels.csv"
    if change == "labels.csv":
        labels.write_text(labels.read_text().replace(",a", ",b", 1))
    if change == "image":
        (out / "a" / "0000.png").write_bytes(b"a better photograph")
    if change == "image of the same size":  # as a viewer turns it in place
        image = out / "a" / "0000.png"
        image.write_bytes(image.read_bytes()[:-1] + b"?")
    if change == "mark":  # as raypipe 0.1 wrote it
        (out / ".raypipe-export.json").write_text('{"files": []}')
    before = everything(out)
    code, _, err = cli("table", "export", table, out, "--overwrite")
    if change == "none":
        assert code == 0, err
        return
    assert (code, "no export made" in err) == (2, True)
    assert everything(out) == before


def test_a_parquet_file_that_somebody_changed_is_not_overwritten(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    """pyarrow and pandas copy our key into what they write."""
    out = tmp_path / "o.parquet"
    assert cli("table", "export", table, out)[0] == 0
    assert pq.read_table(out, columns=["label"])["label"].null_count == 133
    assert cli("table", "export", table, out, "--overwrite")[0] == 0
    theirs = pq.read_table(out)
    pq.write_table(theirs.slice(0, 50), out)
    before = out.read_bytes()
    code, _, err = cli("table", "export", table, out, "--overwrite")
    assert (code, "no export made" in err, out.read_bytes() == before) == (2, True, True)


def test_a_table_without_images_is_no_folder_of_images(tmp_path: Path, cli: Cli) -> None:
    append(str(tmp_path / "t"), pa.table({"x": [1]}), "add")
    code, _, err = cli("table", "export", tmp_path / "t", tmp_path / "out")
    assert (code, "has no column 'image'" in err) == (2, True)


def test_exporting_here_starts_no_cluster(table: Path, tmp_path: Path) -> None:
    script = (
        "import sys, ray; from raypipe.main import main; "
        f"code = main(['table', 'export', {str(table)!r}, {str(tmp_path / 'o.parquet')!r}]); "
        "assert not ray.is_initialized() and 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(read(tmp_path / "o.parquet")) == 400


def test_an_export_holds_one_row_group_at_a_time(tmp_path: Path) -> None:
    """80 MB of images in 20 row groups: the peak memory stays below a quarter of them."""
    noise = pa.table(
        {"image": pa.array([bytes([i % 251]) * 32_000 for i in range(128 * 20)], pa.binary())}
    )
    append(str(tmp_path / "t"), noise, "add")
    script = (
        "from pathlib import Path\n"
        "from raypipe.tables.table import ImageTable\n"
        "from raypipe.tables.export import export\n"
        "def status(name):\n"
        "    text = Path('/proc/self/status').read_text()\n"
        "    return int(text.split(name + ':')[1].split()[0]) / 1024\n"
        f"t = ImageTable({str(tmp_path / 't')!r}); out = Path({str(tmp_path)!r})\n"
        "export(t, t.pin(), out / 'warm.parquet', limit=1); base = status('VmRSS')\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "export(t, t.pin(), out / 'o.parquet')\n"
        "print(status('VmHWM') - base)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert float(done.stdout) < 20 + 15, "MB: four row groups and the allocator's own"


@pytest.mark.usefixtures("ray_session")
def test_workers_write_the_same_rows_in_the_same_order(
    table: Path, tmp_path: Path, cli: Cli
) -> None:
    for where in ([], ["--where", "split=test"]):
        for name, more in (("here", []), ("there", ["--workers", 2])):
            arguments = [tmp_path / f"{name}.parquet", "--overwrite", *where, *more]
            assert cli("table", "export", table, *arguments)[0] == 0
        assert pq.read_table(tmp_path / "here.parquet") == pq.read_table(tmp_path / "there.parquet")


@pytest.mark.usefixtures("ray_session")
def test_workers_see_deletion_vectors_and_mapped_columns(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "t").mkdir()
    fields = [by_hand.column("image_id", "long", 1, "col-1")]
    content = pa.table({"col-1": pa.array(range(1000), pa.int64())})
    names = by_hand.metadata(
        fields, **{"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    )
    added = by_hand.add(
        tmp_path / "t", content, "a.parquet", 90, by_hand.inline(list(range(50, 950)))
    )
    by_hand.commit(
        tmp_path / "t", by_hand.protocol("columnMapping", "deletionVectors"), names, added
    )
    assert cli("table", "export", tmp_path / "t", tmp_path / "o.parquet", "--workers", 2)[0] == 0
    assert [r["image_id"] for r in pq.read_table(tmp_path / "o.parquet").to_pylist()] == [
        *range(50),
        *range(950, 1000),
    ]


def test_a_column_may_have_an_equals_sign_in_its_name(tmp_path: Path, cli: Cli) -> None:
    """`--where a=b=x` is the column a; so b=x of the column a=b could not be asked for."""
    table = tmp_path / "t"
    rows = [{"a": "b=x", "a=b": "y", 'q"': "1"}, {"a": "z", "a=b": "x", 'q"': "2"}]
    write_deltalake(table, pa.Table.from_pylist(rows))
    for where, kept in (('"a=b"=x', "2"), ("a=b=x", "1"), ('"a"=z', "2"), ('"q"""=1', "1")):
        out = tmp_path / f"{kept}.parquet"
        code, _, err = cli("table", "export", table, out, "--where", where, "--overwrite")
        assert code == 0, err
        assert pq.read_table(out)['q"'].to_pylist() == [kept], where


def test_the_folders_of_an_export_are_no_labels(table: Path, tmp_path: Path, cli: Cli) -> None:
    """Images without a label became the class `unlabelled`."""
    out = tmp_path / "o"
    assert cli("table", "export", table, out, "--limit", 9)[0] == 0
    with pytest.raises(DataError, match=r"is an export.*ingest\.from\.labels=.*labels\.csv"):
        candidates(SourceConfig(images=str(out)))
    named = SourceConfig(images=str(out), labels=str(out / "labels.csv"))
    found = {c.label for part in candidates(named).parts for c in part.candidates}
    assert found == {"a", "b", None}


@pytest.mark.parametrize("out", ["o.parquet", "o"])
def test_a_condition_on_a_class_finds_its_spellings_in_both_forms(
    out: str, tmp_path: Path, cli: Cli
) -> None:
    """The Parquet file had those of one spelling alone."""
    numbered = rows(0, 3).set_column(1, "label", pa.array(["1", "1.0", "2"]))
    append(str(tmp_path / "n"), numbered, "add")
    said = cli("table", "export", tmp_path / "n", tmp_path / out, "--where", "label=1", "--json")
    assert json.loads(said[1])["rows"] == 2, said


def test_a_setting_in_the_place_of_out_is_no_file(table: Path, tmp_path: Path, cli: Cli) -> None:
    """All rows were written into a folder of this name."""
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"table": {"uri": str(table)}}))
    word = "table.where.split=test"
    for command in (
        ("table", "export", config, word),
        ("table", "prepare", config, word),
        ("export", "onnx", config, word),
    ):
        code, _, err = cli(*command)
        assert code == 2 and "is missing" in err and "no place" in err, command
    assert not Path(word).exists()
