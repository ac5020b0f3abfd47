"""A hostile data set reads nothing of this machine: no path, link or device leads out of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest, quarantine_uri
from raypipe.tables.quarantine import SCHEMA as QUARANTINE
from raypipe.tables.table import ImageTable, TableConfig

Draw = Callable[..., bytes]
SECRET = b"AWS_SECRET_ACCESS_KEY=canary-7f3a91"
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A secret beside the data set's folder, which is `data`."""
    (tmp_path / "data").mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "secret"


def ways_out(outside: Path) -> list[str]:
    return [
        "../secret",
        str(outside),
        "x/../../secret",
        "/proc/self/environ",
        "link",
        "linked/secret",
        "/dev/zero",
        "pipe",
    ]


def prepared(root: Path, outside: Path, good: bytes) -> None:
    (root / "link").symlink_to(outside)
    (root / "linked").symlink_to(outside.parent)
    (root / "x").mkdir()
    os.mkfifo(root / "pipe")
    (root / "good.png").write_bytes(good)


def in_parquet(root: Path, names: list[str]) -> dict[str, Any]:
    images = pa.array([{"bytes": None, "path": name} for name in names], STRUCT)
    pq.write_table(pa.table({"image": images, "label": ["a"] * len(names)}), root / "0.parquet")
    return {"kind": "parquet", "images": str(root)}


def in_hugging_face(root: Path, names: list[str]) -> dict[str, Any]:
    table = pa.table(
        {
            "image": pa.array([{"bytes": None, "path": n} for n in names], STRUCT),
            "label": ["a"] * len(names),
        }
    )
    with pa.ipc.new_stream(str(root / "d.arrow"), table.schema) as out:
        out.write_table(table)
    (root / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    (root / "dataset_info.json").write_text("{}")
    return {"kind": "huggingface", "images": str(root)}


def everything(*tables: str) -> bytes:
    """Every byte below the tables' folders, and every value in them."""
    found = b"".join(
        p.read_bytes()
        for t in tables
        if Path(t).exists()
        for p in Path(t).rglob("*")
        if p.is_file()
    )
    for uri in tables:
        if ImageTable.exists(uri):
            table = ImageTable(uri)
            names = [f.name for f in table.delta().schema().fields]
            found += repr(scan.rows(table, table.pin(), names).to_pylist()).encode()
    return found


@pytest.mark.parametrize("keep", [in_parquet, in_hugging_face])
def test_a_row_that_names_a_file_elsewhere_is_quarantined_without_its_bytes(
    keep: Callable[[Path, list[str]], dict[str, Any]],
    outside: Path,
    tmp_path: Path,
    textured: Draw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANARY", "canary-7f3a91")
    root, table = tmp_path / "data", TableConfig(uri=str(tmp_path / "out"))
    prepared(root, outside, textured(1))
    names = ways_out(outside)
    kept = keep(root, [*names, "good.png", str(root / "good.png")])
    done = ingest(table, validate(IngestConfig, {"from": kept, "workers": 0}))
    assert (done.accepted, done.duplicates, done.quarantined) == (1, 1, len(names))
    assert done.reasons == {"outside": len(names) - 1, "unreadable": 1}  # the pipe lies within
    quarantine = ImageTable(quarantine_uri(table.uri))
    rows = scan.rows(quarantine, quarantine.pin(), QUARANTINE.names).to_pylist()
    assert all(row["image"] is None and row["image_id"] is None for row in rows)
    assert all("ingest.from.roots" in row["detail"] for row in rows if row["reason"] == "outside")
    assert b"canary-7f3a91" not in everything(table.uri, quarantine_uri(table.uri))


def test_links_that_leave_a_folder_are_listed_and_not_opened_unless_their_place_is_named(
    outside: Path, tmp_path: Path, textured: Draw
) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir()
    (root / "a" / "good.png").write_bytes(textured(1))
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "far.png").write_bytes(textured(2))
    (root / "a" / "secret.png").symlink_to(outside)
    (root / "a" / "environment.png").symlink_to("/proc/self/environ")
    (root / "b").symlink_to(tmp_path / "archive")
    for roots, accepted, reasons in (
        ([], 1, {"outside": 3}),
        ([str(tmp_path / "archive")], 2, {"outside": 2}),
    ):
        table = TableConfig(uri=str(tmp_path / f"out{accepted}"))
        done = ingest(
            table,
            validate(IngestConfig, {"from": {"images": str(root), "roots": roots}, "workers": 0}),
        )
        assert (done.accepted, done.reasons) == (accepted, reasons)
        assert b"canary" not in everything(table.uri, quarantine_uri(table.uri))


@pytest.mark.parametrize("kind", ["paths", "folder"])
def test_a_labels_table_that_names_files_elsewhere_is_refused_with_the_way_out(
    kind: str, outside: Path, tmp_path: Path, textured: Draw
) -> None:
    root, table = tmp_path / "data", TableConfig(uri=str(tmp_path / "out"))
    prepared(root, outside, textured(1))
    for name in ways_out(outside)[:5]:
        (root / "labels.csv").write_text(f"file,label\ngood.png,a\n{name},b\n")
        kept = {"kind": kind, "images": str(root), "labels": str(root / "labels.csv")}
        if (
            kind == "folder" and name == "link"
        ):  # the folder lists it itself: quarantined, like any link
            continue
        with pytest.raises(
            DataError, match=r"outside of .*data.*nothing was written.*ingest\.from\.roots"
        ):
            ingest(table, validate(IngestConfig, {"from": kept, "workers": 0}))
    assert not (tmp_path / "out").exists()


def test_a_list_of_paths_reads_from_the_roots_that_the_user_names(
    tmp_path: Path, textured: Draw
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "1.png").write_bytes(textured(1))
    labels = tmp_path / "lists" / "labels.csv"
    labels.parent.mkdir()
    labels.write_text(f"file,label\n{tmp_path / 'store' / '1.png'},a\n")
    kept: dict[str, Any] = {"kind": "paths", "labels": str(labels)}
    table = TableConfig(uri=str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"ingest\.from\.roots"):
        ingest(table, validate(IngestConfig, {"from": kept, "workers": 0}))
    done = ingest(
        table,
        validate(IngestConfig, {"from": kept | {"roots": [str(tmp_path / "store")]}, "workers": 0}),
    )
    assert done.accepted == 1


def test_a_labels_file_that_came_with_the_images_may_not_be_a_link_elsewhere(
    outside: Path, tmp_path: Path
) -> None:
    (tmp_path / "data" / "labels.csv").symlink_to(outside)
    kept = {"images": str(tmp_path / "data"), "labels": str(tmp_path / "data" / "labels.csv")}
    with pytest.raises(DataError, match=r"labels file leads out of its folder") as e:
        ingest(TableConfig(uri=str(tmp_path / "out")), validate(IngestConfig, {"from": kept}))
    assert "canary" not in str(e.value)


def shard_elsewhere(root: Path, other: Path) -> str:
    (root / "0.tar").symlink_to(other / "0.tar")
    return "tar"


def parquet_elsewhere(root: Path, other: Path) -> str:
    pq.write_table(pa.table({"image": [b"x"], "label": ["a"]}), other / "0.parquet")
    (root / "0.parquet").symlink_to(other / "0.parquet")
    return "parquet"


def arrow_elsewhere(root: Path, other: Path) -> str:
    in_hugging_face(root, ["x"])
    (root / "d.arrow").rename(other / "d.arrow")
    (root / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "../other/d.arrow"}]})
    )
    return "huggingface"


def split_elsewhere(root: Path, other: Path) -> str:
    in_hugging_face(other, ["x"])
    (root / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    return "huggingface"


def log_elsewhere(root: Path, other: Path) -> str:
    """A Delta log that names another table's file by its absolute path."""
    table = pa.table({"image": pa.array([SECRET], pa.binary()), "label": ["a"]})
    write_deltalake(str(root), table)
    (data,) = root.glob("*.parquet")
    data.rename(other / data.name)
    commit = root / "_delta_log" / "00000000000000000000.json"
    commit.write_text(commit.read_text().replace(data.name, str(other / data.name)))
    return "delta"


@pytest.mark.parametrize(
    "make", [shard_elsewhere, parquet_elsewhere, arrow_elsewhere, split_elsewhere, log_elsewhere]
)
def test_the_files_of_a_container_lie_in_its_folder(
    make: Callable[[Path, Path], str], tmp_path: Path
) -> None:
    root, other = tmp_path / "data", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    kind = make(root, other)
    kept = {"kind": kind, "images": str(root)}
    with pytest.raises(DataError, match=r"leads out of its folder .*roots"):
        ingest(
            TableConfig(uri=str(tmp_path / "out")),
            validate(IngestConfig, {"from": kept, "workers": 0}),
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "name"), [("tar", "0.tar"), ("parquet", "0.parquet"), ("huggingface", "state.json")]
)
def test_a_pipe_is_not_waited_for(kind: str, name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"is no regular file"):
        ingest(
            TableConfig(uri=str(tmp_path / "out")),
            validate(IngestConfig, {"from": {"kind": kind, "images": str(tmp_path)}}),
        )
