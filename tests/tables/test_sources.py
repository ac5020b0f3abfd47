"""One set of pictures in every kind of source: the same images, labels and splits."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.sources import SourceConfig, candidates
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.tables.verify import chunks

Draw = Callable[..., bytes]
Picture = tuple[str, bytes, str, str]  # path, bytes, label, split
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(scope="session")
def pictures(textured: Draw) -> list[Picture]:
    return [
        (
            f"{'ab'[i % 2]}/{i:02d}.PNG",
            textured(i),
            ("cat", "dog")[i % 2],
            ("train", "test")[i % 3 == 0],
        )
        for i in range(40)
    ]


def folder(root: Path, pictures: list[Picture]) -> None:
    for path, data, _, _ in pictures:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def by_csv(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    folder(root, pictures)
    (root / "labels.csv").write_text(
        "file,label,split\n" + "".join(f"./{p},{label},{s}\n" for p, _, label, s in pictures)
    )
    return {
        "kind": "folder",
        "images": str(root),
        "labels": str(root / "labels.csv"),
        "split_column": "split",
    }


def by_json_lines(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    folder(root, pictures)
    lines = [
        json.dumps({"file": p.replace("/", "\\"), "label": label, "split": s})
        for p, _, label, s in pictures
    ]
    (root / "labels.jsonl").write_text("\n\n".join(lines))
    return {
        "kind": "folder",
        "images": str(root),
        "labels": str(root / "labels.jsonl"),
        "split_column": "split",
    }


def by_folders(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    folder(
        root,
        [(f"{split}/{label}/{path}", data, label, split) for path, data, label, split in pictures],
    )
    return {"images": str(root)}


def by_tar(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"{shard}.tar", "w") as tar:
            for path, data, label, split in pictures[shard::2]:
                key = path.removesuffix(".PNG")
                for ending, content in (
                    ("JSON", json.dumps({"label": label, "split": split}).encode()),
                    ("PNG", data),
                ):
                    member = tarfile.TarInfo(f"./{key}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return {"kind": "tar", "images": str(root), "split_column": "split"}


def by_tar_and_class_files(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    root.mkdir()
    with tarfile.open(root / "all.tar", "w") as tar:
        for i, (path, data, label, split) in enumerate(pictures):
            beside = {
                ("cls", "txt")[i % 2]: f"{label}\n".encode(),
                "json": json.dumps({"split": split, "label": label}).encode(),
            }
            for ending, content in {**beside, "png": data}.items():
                member = tarfile.TarInfo(f"{path.removesuffix('.PNG')}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return {"kind": "tar", "images": str(root / "all.tar"), "split_column": "split"}


def by_parquet(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    root.mkdir()
    for part in range(2):
        path, data, label, split = zip(*pictures[20 * part : 20 * part + 20], strict=True)
        table = pa.table(
            {
                "file": path,
                "image": pa.array(data, pa.large_binary()),
                "label": label,
                "split": split,
            }
        )
        pq.write_table(table, root / f"{part}.parquet", row_group_size=7)
    return {"kind": "parquet", "images": str(root), "split_column": "split"}


def by_hugging_face_parquet(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    """As datasets writes Parquet: a struct, class numbers, and their names in the footer."""
    root.mkdir()
    path, data, label, split = zip(*pictures, strict=True)
    images = [{"bytes": d, "path": Path(p).name} for p, d in zip(path, data, strict=True)]
    features = {
        "image": {"_type": "Image"},
        "kind": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    table = pa.table(
        {
            "image": pa.array(images, STRUCT),
            "kind": [("cat", "dog").index(name) for name in label],
            "split": split,
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, root / "train.parquet")
    return {
        "kind": "parquet",
        "images": str(root / "train.parquet"),
        "label_column": "kind",
        "split_column": "split",
    }


def by_hugging_face(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    """The layout of save_to_disk (compared with datasets 5.2); every other image is a file."""
    root.mkdir()
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    features = {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    for split in ("train", "test"):
        own = [p for p in pictures if p[3] == split]
        (root / split).mkdir()
        (root / split / "dataset_info.json").write_text(json.dumps({"features": features}))
        (root / split / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
        )
        images = []
        for i, (path, data, _, _) in enumerate(own):
            file = root / "files" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            images.append({"bytes": data if i % 2 else None, "path": str(file)})
        labels = [("cat", "dog").index(label) for _, _, label, _ in own]
        table = pa.table({"image": pa.array(images, STRUCT), "label": pa.array(labels, pa.int64())})
        with pa.ipc.new_stream(
            str(root / split / "data-00000-of-00001.arrow"), table.schema
        ) as out:
            out.write_table(table, max_chunksize=5)
    return {"kind": "huggingface", "images": str(root)}


def by_delta(root: Path, pictures: list[Picture]) -> dict[str, Any]:
    path, data, label, split = zip(*pictures, strict=True)
    append(
        str(root),
        pa.table(
            {"path": path, "photo": pa.array(data, pa.binary()), "label": label, "split": split}
        ),
        "theirs",
    )
    more = pa.table(
        {
            "path": ["x"],
            "photo": pa.array([b"not wanted"], pa.binary()),
            "label": ["x"],
            "split": ["x"],
        }
    )
    append(str(root), more, "later")
    DeltaTable(str(root)).delete("label = 'dog' and split = 'test'")
    return {
        "kind": "delta",
        "images": str(root),
        "version": 0,
        "image_column": "photo",
        "split_column": "split",
    }


def by_paths(root: Path, pictures: list[Picture], form: str) -> dict[str, Any]:
    folder(root / "files", [*pictures, ("not named.png", b"x", "", "")])
    table = pa.table(
        {
            "where": [p[0] for p in pictures],
            "label": [p[2] for p in pictures],
            "split": [p[3] for p in pictures],
        }
    )
    target = root / f"list{form}"
    if form == ".parquet":
        pq.write_table(table, target)
    else:
        append(str(target), table, "list")
    more = {"file_column": "where", "split_column": "split"}
    return {"kind": "paths", "images": str(root / "files"), "labels": str(target), **more}


WAYS: dict[str, Callable[[Path, list[Picture]], dict[str, Any]]] = {
    "folder and CSV": by_csv,
    "folder and JSON lines": by_json_lines,
    "folders": by_folders,
    "tar, JSON": by_tar,
    "tar, class files": by_tar_and_class_files,
    "Parquet": by_parquet,
    "Parquet of Hugging Face": by_hugging_face_parquet,
    "Hugging Face on disk": by_hugging_face,
    "Delta": by_delta,
    "paths in Parquet": lambda root, pictures: by_paths(root, pictures, ".parquet"),
    "paths in Delta": lambda root, pictures: by_paths(root, pictures, ""),
}


@pytest.fixture(params=WAYS)
def kept(request: pytest.FixtureRequest, tmp_path: Path, pictures: list[Picture]) -> dict[str, Any]:
    return WAYS[request.param](tmp_path / "source", pictures)


def test_every_source_gives_the_same_images_labels_and_splits(
    kept: dict[str, Any], pictures: list[Picture], tmp_path: Path
) -> None:
    table = TableConfig(uri=str(tmp_path / "out"))
    done = ingest(table, validate(IngestConfig, {"from": kept, "near_bits": 0}))
    assert (done.seen, done.accepted, done.unlabelled) == (40, 40, 0)
    opened = ImageTable.open(table)
    rows = scan.rows(opened, opened.pin(), ["image", "label", "split", "path"]).to_pylist()
    assert {(r["image"], r["label"], r["split"]) for r in rows} == {
        (d, label, split) for _, d, label, split in pictures
    }
    assert len({r["path"] for r in rows}) == 40
    entry = opened.delta().history()[0]
    assert entry.get("raypipe.from") == (
        f"{kept['images']}@v0" if kept.get("kind") == "delta" else None
    )


def test_every_source_lists_in_one_order_and_reads_any_part_of_itself(
    kept: dict[str, Any], pictures: list[Picture]
) -> None:
    """Chunks travel to workers by pickle, and a chunk starts anywhere."""
    cfg = validate(SourceConfig, kept)
    listed = candidates(cfg).parts
    assert [p.candidates for p in listed] == [p.candidates for p in candidates(cfg).parts]
    whole = [bytes(d) for p in listed for d in p.read(p.candidates) if not isinstance(d, BadImage)]
    assert sorted(whole) == sorted(d for _, d, _, _ in pictures)
    in_pieces = [
        bytes(data)
        for part in listed
        for at in range(0, len(part.candidates), 3)
        for data in pickle.loads(pickle.dumps(part.read))(part.candidates[at : at + 3])
    ]
    assert in_pieces == whole
    assert [c for chunk in chunks(listed) for c in chunk.candidates] == [
        c for p in listed for c in p.candidates
    ]


def test_a_delta_source_is_searched_for_a_class_as_a_table_is(tmp_path: Path) -> None:
    """`table.where` found each spelling of a label, and `ingest.from.where` one."""
    labels = ["1", "1.0", "b|a", "a | b", "c"]
    images = pa.array([b"x"] * len(labels), pa.binary())
    append(str(tmp_path), pa.table({"image": images, "label": labels, "line": labels}), "theirs")

    def found(**where: str) -> list[str | None]:
        tree = {"kind": "delta", "images": str(tmp_path), "where": where}
        cfg = validate(SourceConfig, tree)
        return [c.label for part in candidates(cfg).parts for c in part.candidates]

    assert found(label="1") == found(label="1.0") == ["1", "1"]
    assert found(label="a|b") == ["b|a", "a | b"]
    assert found(line="b|a") == ["b|a"]


def test_splits_that_are_not_read_are_said_once(
    kept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Five kinds of sources left out their column of splits without a word."""
    candidates(validate(SourceConfig, kept))
    assert caplog.text == ""
    has_column = kept.pop("split_column", None) is not None
    candidates(validate(SourceConfig, kept))
    told = caplog.text.count("ingest.from.split_column=split keeps its splits")
    assert told == has_column


def test_splits_of_a_data_set_and_of_a_function_that_are_not_read_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"image": pa.array([b"x"] * 2, pa.binary()), "split": ["train", "test"]})
    for name in ("0.arrow", "1.arrow"):
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as out:
            out.write_table(table)
    files = [{"filename": "0.arrow"}, {"filename": "1.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "split_cells.py").write_text(
        "from pathlib import Path\n"
        "HERE = Path(__file__).parent\n"
        "def cells(): return HERE, [{'file': '0.arrow', 'split': 'test'}] * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for kind, images in (("huggingface", str(tmp_path)), ("python", "split_cells:cells")):
        tree = {"kind": kind, "images": images, "labelled": False}
        candidates(validate(SourceConfig, tree | {"split_column": "split"}))
        assert caplog.text == ""
        candidates(validate(SourceConfig, tree))
        assert caplog.text.count("keeps its splits") == 1
        caplog.clear()


def test_labels_are_left_out_when_they_are_not_wanted(kept: dict[str, Any]) -> None:
    listed = candidates(
        validate(SourceConfig, kept | {"labelled": False, "label_column": "nowhere"})
    ).parts
    assert {c.label for p in listed for c in p.candidates} == {None}


def test_a_folder_is_walked_with_sense(tmp_path: Path) -> None:
    """Loops end, hidden files and pipes are left out; links out of the folder are never opened."""
    root = tmp_path / "root"
    folder(
        root,
        [
            (p, b"x", "", "")
            for p in ("b/one.JPG", "a/one.JPG", "a/.hidden.jpg", ".git/two.jpg", "a/deep/x.jpeg")
        ],
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far.png").write_bytes(b"x")
    (root / "a" / "loop").symlink_to(root)
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "c" / "again").symlink_to(root / "c")
    (root / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(root / "a" / "pipe.jpg")
    (part,) = candidates(SourceConfig(images=str(root))).parts
    assert [(c.path, c.label, c.reason, c.shut) for c in part.candidates] == [
        ("a/deep/x.jpeg", "a", "", False),
        ("a/one.JPG", "a", "", False),
        ("b/gone.png", None, "outside", True),
        ("b/one.JPG", "b", "", False),
        ("c", None, "outside", True),
    ]
    read = {
        c.path: data for c, data in zip(part.candidates, part.read(part.candidates), strict=True)
    }
    assert isinstance(read.pop("b/gone.png"), BadImage) and isinstance(read.pop("c"), BadImage)
    assert set(read.values()) == {b"x"}
    (part,) = candidates(
        SourceConfig(images=str(root), roots=[str(tmp_path)])
    ).parts  # whoever trusts the other folder
    assert [(c.path, c.label, c.reason) for c in part.candidates][2:] == [
        ("b/gone.png", "b", ""),
        ("b/one.JPG", "b", ""),
        ("c/far.png", "c", ""),
    ]
    read = {
        c.path: data for c, data in zip(part.candidates, part.read(part.candidates), strict=True)
    }
    assert isinstance(read.pop("b/gone.png"), BadImage) and set(read.values()) == {b"x"}


def test_a_worker_that_does_not_see_the_source_stops_instead_of_rejecting_everything(
    tmp_path: Path,
) -> None:
    folder(tmp_path / "root", [("a/x.jpg", b"x", "", "")])
    (part,) = candidates(SourceConfig(images=str(tmp_path / "root"))).parts
    (tmp_path / "root").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"does not see the images .*same path.*ingest\.workers=0"):
        list(part.read(part.candidates))


def test_a_large_part_is_read_in_bounded_chunks(tmp_path: Path) -> None:
    folder(tmp_path, [(f"a/{i:03d}.jpg", b"x", "", "") for i in range(100)])
    (part,) = candidates(SourceConfig(images=str(tmp_path))).parts
    assert [len(c.candidates) for c in chunks([part])] == [32, 32, 32, 4]
    large = [c._replace(bytes=20 * 2**20) for c in part.candidates[:4]]
    assert [len(c.candidates) for c in chunks([type(part)(part.read, large)])] == [1, 1, 1, 1]


def broken_tar(path: Path, pictures: list[Picture]) -> str:
    whole = by_tar(path, pictures)["images"]
    shard = Path(whole) / "1.tar"
    shard.write_bytes(shard.read_bytes()[:20_000])
    return str(whole)


def gz_tar(path: Path, pictures: list[Picture]) -> str:
    path.mkdir()
    tarfile.open(path / "0.tar.gz", "w:gz").close()
    return str(path)


def numbers(path: Path, pictures: list[Picture]) -> str:
    pq.write_table(pa.table({"image": [1], "lable": ["a"]}), path)
    return str(path)


def without_labels(path: Path, pictures: list[Picture]) -> str:
    pq.write_table(pa.table({"image": [b"x"], "lable": ["a"]}), path)
    return str(path)


def indexed(path: Path, pictures: list[Picture]) -> str:
    images = Path(by_hugging_face(path, pictures)["images"])
    (images / "test" / "state.json").write_text(
        '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'
    )
    return str(images)


@pytest.mark.parametrize(
    ("kind", "make", "says"),
    [
        ("tar", broken_tar, r"shard .*(cannot be read|cut off).*1\.tar"),
        ("tar", gz_tar, r"shard cannot be read.*0\.tar\.gz.*whole and uncompressed"),
        ("tar", numbers, r"shard cannot be read"),
        ("parquet", without_labels, r"no column 'label'\. Did you mean 'lable'"),
        ("parquet", numbers, r"no column 'label'"),
        ("parquet", gz_tar, r"no Parquet files"),
        ("huggingface", gz_tar, r"no data set that save_to_disk wrote"),
        ("huggingface", indexed, r"list of indices .*flatten_indices"),
        ("delta", gz_tar, r"No Delta table here"),
        ("tar", lambda path, _: str(path), r"tar source does not exist .*ingest\.from\.images"),
        ("paths", lambda path, _: "", r"No table names the images.*ingest\.from\.labels"),
    ],
)
def test_a_source_that_cannot_be_right_is_named_before_anything_is_written(
    kind: str,
    make: Callable[[Path, list[Picture]], str],
    says: str,
    pictures: list[Picture],
    tmp_path: Path,
) -> None:
    images = make(tmp_path / "source", pictures)
    with pytest.raises(DataError, match=says):
        ingest(
            TableConfig(uri=str(tmp_path / "out")),
            validate(IngestConfig, {"from": {"kind": kind, "images": images}}),
        )
    assert not (tmp_path / "out").exists()
