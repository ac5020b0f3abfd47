"""Ambiguous and unreadable sources: a reason for each image, or one message, never a guess."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.images.decode import BadImage
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.sources import Candidate, SourceConfig, candidates
from raypipe.tables.table import TableConfig, append

Draw = Callable[..., bytes]
Member = tuple[str, bytes]
PIXEL = b"a picture"


def tar(
    path: Path, members: list[Member], links: dict[str, tuple[bytes, str]] | None = None, **how: Any
) -> Path:
    with tarfile.open(path, "w", **how) as out:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
        for name, (kind, target) in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            out.addfile(member)
    return path


def listed(**kept: Any) -> list[Candidate]:
    return [c for part in candidates(validate(SourceConfig, kept)).parts for c in part.candidates]


def of_tar(path: Path, **more: Any) -> dict[str, tuple[str | None, str]]:
    return {
        c.path.partition("/")[2]: (c.label, c.reason)
        for c in listed(kind="tar", images=str(path), **more)
    }


def sample(key: str, label: str) -> list[Member]:
    return [(f"{key}.jpg", PIXEL + label.encode()), (f"{key}.cls", label.encode())]


def test_shards_without_labels_are_one_message_and_lose_nothing(tmp_path: Path) -> None:
    """The message named no shard, and its way out (ingest.from.labels) is refused for a tar."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("0.tar", "1.tar"):
        # Of a blank file no label is read, and nothing of another ending.
        members = [("a.jpg", PIXEL), ("a.label", b"cat"), ("b.jpg", PIXEL), ("b.cls", b" ")]
        tar(shards / name, members)
    first = shards / "0.tar"
    table = TableConfig(uri=str(tmp_path / "table"))
    says = (
        rf"no labels .got .{first}, one of 2 shards without any: files that end in "
        r"\.jpg, \.label.*KEY\.cls, KEY\.txt or KEY\.json \(as 'label'\).*"
        r"set ingest\.from\.labelled=false"
    )
    config = {"from": {"kind": "tar", "images": str(shards)}}
    with pytest.raises(DataError, match=says):
        ingest(table, validate(IngestConfig, config))
    assert not Path(table.uri).exists()
    with pytest.raises(DataError, match=rf"no labels .got .{first}: files that"):
        of_tar(first)
    # The way out takes all of it; and one label is enough for the others to come without.
    assert of_tar(shards, labelled=False)["a.jpg"] == (None, "")
    tar(shards / "2.tar", sample("c", "x"))
    assert [one.label for one in listed(kind="tar", images=str(shards))] == [*[None] * 6, "x"]
    # A label that does not fit the task is another message.
    with pytest.raises(DataError, match=r"None of 1 labels fits model.task=regression"):
        of_tar(shards / "2.tar", task="regression")


def test_a_source_that_brings_its_labels_is_not_asked_for_a_table_of_them(tmp_path: Path) -> None:
    columns = {"image": [PIXEL], "label": pa.array([None], pa.string())}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    says = r"no labels .got .*a\.parquet.*Set ingest\.from\.label_column, which is 'label'"
    with pytest.raises(DataError, match=says):
        listed(kind="parquet", images=str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("how", ["one after the other (cat)", "members merged (tar -A)"])
def test_joined_shards_keep_each_image_with_its_own_label(how: str, tmp_path: Path) -> None:
    first, second = [*sample("0", "a"), *sample("1", "b")], [*sample("0", "c"), *sample("1", "d")]
    joined = tar(tmp_path / "joined.tar", first + second)
    if how.startswith("one"):
        shards = (
            tar(tmp_path / f"{i}.x", members).read_bytes()
            for i, members in enumerate((first, second))
        )
        joined.write_bytes(b"".join(shards))
    found = listed(kind="tar", images=str(joined))
    (part,) = candidates(SourceConfig(kind="tar", images=str(joined))).parts
    assert (
        [bytes(data)[-1:].decode() for data in part.read(found)]
        == [c.label for c in found]
        == ["a", "b", "c", "d"]
    )


def test_one_sample_that_is_joined_to_another_of_its_key_is_not_mixed_up_with_it(
    tmp_path: Path,
) -> None:
    found = listed(
        kind="tar", images=str(tar(tmp_path / "x.tar", [*sample("0", "a"), *sample("0", "b")]))
    )
    assert [c.label for c in found] == ["a", "b"]


def test_labels_that_come_after_all_images_are_found_once_and_quarantined_when_there_are_two(
    tmp_path: Path,
) -> None:
    images, labels = [("0.jpg", b"x"), ("1.jpg", b"y")], [("0.cls", b"a"), ("1.cls", b"b")]
    assert of_tar(tar(tmp_path / "x.tar", images + labels)) == {
        "0.jpg": ("a", ""),
        "1.jpg": ("b", ""),
    }
    found = listed(
        kind="tar", images=str(tar(tmp_path / "x.tar", [*(images + labels) * 2, *sample("2", "c")]))
    )
    assert [c.reason for c in found] == ["label"] * 4 + [""]
    assert "which label is whose" in found[0].detail


def test_a_field_of_a_sample_is_no_image_and_a_label_must_be_text(tmp_path: Path) -> None:
    members = [
        ("a.jpg", PIXEL),
        ("a.mask.png", PIXEL),
        ("a.cls", b"cat"),
        ("b.jpg", PIXEL),
        ("b.cls", "caf\xe9".encode("latin-1")),
        ("c.jpg", PIXEL),
        ("c.cls", "\ufeffcaf\xe9\r\n".encode()),
        ("d.jpg", PIXEL),
        ("d.json", b'{"label": "a", "label": "b"}'),
        ("e.jpg", PIXEL),
        ("e.json", b"[" * 100_000),
        ("f.jpg", PIXEL),
        ("f.cls", b"cat"),
        ("f.json", b'{"label": "dog"}'),
        ("g.jpg", PIXEL),
        ("g.cls", b"x" * (2**20 + 1)),
        ("h.2024.jpg", PIXEL),
        ("i.jpg", PIXEL),
        ("i.json", b'{"label": ["a"]}'),
    ]
    found = listed(kind="tar", images=str(tar(tmp_path / "x.tar", members)))
    assert {c.path.partition("/")[2]: (c.label, c.reason) for c in found} == {
        "a.jpg": ("cat", ""),
        "a.mask.png": (None, "companion"),
        "b.jpg": (None, "label"),
        "c.jpg": ("caf\xe9", ""),
        "d.jpg": (None, "label"),
        "e.jpg": (None, "label"),
        "f.jpg": (None, "label"),
        "g.jpg": (None, "label"),
        "h.2024.jpg": (None, "companion"),
        "i.jpg": (None, "label"),
    }
    details = " ".join(c.detail for c in found)
    for says in (
        "first dot",
        "not UTF-8",
        "stands twice",
        "nested too deeply",
        "cls says 'cat' and its JSON 'dog'",
        "bytes",
    ):
        assert says in details


def test_members_with_other_names_and_links_are_all_counted(tmp_path: Path, textured: Draw) -> None:
    deep = "/".join(["d"] * 3000)
    members = [
        ("caf\udce9.png", textured(1)),
        ("caf\udce8.png", textured(2)),
        ("caf\udce9.cls", b"one"),
        ("caf\udce8.cls", b"two"),
        (f"{deep}/x.png", textured(3)),
        (f"{deep}/x.cls", b"deep"),
        ("y.cls", b"again"),
    ]
    links = {
        "y.png": (tarfile.LNKTYPE, "caf\udce9.png"),
        "z.png": (tarfile.LNKTYPE, "/etc/passwd"),
        "s.png": (tarfile.SYMTYPE, "../../secret"),
        "n.png": (tarfile.CHRTYPE, ""),
        "p.png": (tarfile.FIFOTYPE, ""),
    }
    path = tar(tmp_path / "x.tar", members, links, format=tarfile.GNU_FORMAT)
    found = of_tar(path)
    assert found == {
        "caf\\xe9.png": ("one", ""),
        "caf\\xe8.png": ("two", ""),
        f"{deep}/x.png": ("deep", ""),
        "y.png": ("again", ""),
        **{f"{name}.png": (None, "link") for name in "zsnp"},
    }
    cfg = validate(IngestConfig, {"from": {"kind": "tar", "images": str(path)}, "workers": 0})
    done = ingest(TableConfig(uri=str(tmp_path / "out")), cfg)
    # y has the bytes of the first image under another label: both are counted.
    assert (done.seen, done.reasons["link"]) == (8, 4)
    assert done.seen == done.accepted + done.present + done.duplicates + done.quarantined


@pytest.mark.parametrize("damage", ["header", "end", "half"])
def test_a_shard_that_is_damaged_in_the_middle_does_not_just_end_there(
    damage: str, tmp_path: Path
) -> None:
    path = tar(
        tmp_path / "x.tar", [member for i in range(4) for member in sample(str(i), "ab"[i % 2])]
    )
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[4 * 512 : 4 * 512 + 200] = b"\xff" * 200
    path.write_bytes(data[: {"header": len(data), "end": 8 * 1024, "half": 5 * 1024}[damage]])
    with pytest.raises(DataError, match=r"shard (cannot be read|is cut off)"):
        of_tar(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "file,label\n1.png,a,b\n",
            r"Line 2 of .*labels\.csv has 3 fields and the header has 2 "
            r"\(got '1\.png,a,b'\).*quotes",
        ),
        ("file,label\n1.png\n", r"Line 2 of .* has 1 fields"),
        ("file,label,label\n1.png,a,b\n", r"has 2 columns 'label'.*Rename"),
        ("file,label\n1.png,a\nfile,label\n2.png,b\n", r"Line 3 of .* is the header again"),
        (
            "file,label,part\n1.png,a,train\n./1.png,a,test\n",
            r"gives 1\.png two splits \(got 'train, test'\)",
        ),
        (
            'file,label\n1.png,"a\n2.png,b\n',
            r"cannot be read as a UTF-8 CSV: unexpected end of data",
        ),
    ],
)
def test_a_csv_that_says_two_things_is_refused(text: str, says: str, tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(PIXEL)
    (tmp_path / "labels.csv").write_text(text)
    split = "part" if "part" in text else None
    with pytest.raises(DataError, match=says):
        listed(images=str(tmp_path), labels=str(tmp_path / "labels.csv"), split_column=split)


def test_a_file_may_be_named_twice_if_both_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(PIXEL)
    (tmp_path / "labels.csv").write_text("file,label\n1.png,1\n./1.png,1.0\n")
    (found,) = listed(images=str(tmp_path), labels=str(tmp_path / "labels.csv"))
    assert found.label == "1"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"file": "1.png", "label": "a", "label": "b"}', r"Line 1 .* 'label' stands twice"),
        ('{"file": "1.png", "label": ' + "[" * 100_000, r"Line 1 .* nested too deeply"),
    ],
)
def test_json_lines_that_say_two_things_are_refused(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(PIXEL)
    (tmp_path / "labels.jsonl").write_text(line)
    with pytest.raises(DataError, match=says):
        listed(images=str(tmp_path), labels=str(tmp_path / "labels.jsonl"))


FEATURES: list[tuple[Any, str]] = [
    ("not json", r"features of .* cannot be read"),
    ([], r"features of .* cannot be read"),
    ({"info": {"features": {"label": {"names": "ab"}}}}, r"no list of different names"),
    ({"info": {"features": {"label": {"names": ["a", "a"]}}}}, r"no list of different names"),
    ({"info": {"features": ["label"]}}, r"features of .* cannot be read"),
    ({"info": {"features": {"label": []}}}, None),
]


@pytest.mark.parametrize(("features", "says"), FEATURES)
@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_features_that_cannot_name_the_classes_are_refused(
    kind: str, features: Any, says: str | None, tmp_path: Path
) -> None:
    table = pa.table({"image": [PIXEL, PIXEL], "label": [0, 1]})
    text = features if isinstance(features, str) else json.dumps(features)
    if kind == "parquet":
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), tmp_path / "0.parquet")
    else:
        with pa.ipc.new_stream(str(tmp_path / "d.arrow"), table.schema) as out:
            out.write_table(table)
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
        (tmp_path / "dataset_info.json").write_text(text)
        says = says and f"{says}|no data set that save_to_disk wrote"
    if says is None:  # numbers without names are classes
        assert [c.label for c in listed(kind=kind, images=str(tmp_path))] == ["0", "1"]
        return
    with pytest.raises(DataError, match=says):
        listed(kind=kind, images=str(tmp_path))
    if kind == "parquet":  # who asks for no labels needs no names
        assert len(listed(kind=kind, images=str(tmp_path), labelled=False)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", "[]"),
        ("state.json", "{}"),
        ("state.json", '{"_data_files": [1]}'),
        ("state.json", "[" * 100_000),
        ("dataset_dict.json", '{"splits": "train"}'),
    ],
)
def test_a_data_set_whose_lists_are_malformed_is_refused(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"no data set that save_to_disk wrote|list"):
        listed(kind="huggingface", images=str(tmp_path))


def test_a_class_number_without_a_name_is_a_reason_and_minus_one_is_unlabelled(
    tmp_path: Path,
) -> None:
    features = json.dumps(
        {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    )
    table = pa.table({"image": [PIXEL] * 4, "label": [0, 1, -1, 7]}).replace_schema_metadata(
        {"huggingface": features}
    )
    pq.write_table(table, tmp_path / "0.parquet")
    found = listed(kind="parquet", images=str(tmp_path))
    assert [(c.label, c.reason) for c in found] == [
        ("a", ""),
        ("b", ""),
        (None, ""),
        (None, "label"),
    ]
    assert "class number 7 has no name: there are 2" in found[3].detail


def huge_file(root: Path) -> dict[str, Any]:
    (root / "a").mkdir()
    (root / "a" / "huge.png").write_bytes(b"\x89PNG")
    os.truncate(root / "a" / "huge.png", 3 * 2**30)
    return {"images": str(root)}


def huge_member(root: Path) -> dict[str, Any]:
    size = 3 * 2**30
    with (root / "x.tar").open("wb") as out:
        for name, length in (("a.cls", 1), ("a.png", size)):
            member = tarfile.TarInfo(name)
            member.size = length
            out.write(member.tobuf(tarfile.GNU_FORMAT))
            out.write(b"b".ljust(512, b"\0")) if length == 1 else out.seek(length, os.SEEK_CUR)
        out.write(b"\0" * 1024)
    return {"kind": "tar", "images": str(root)}


@pytest.mark.parametrize("make", [huge_file, huge_member])
def test_a_file_of_three_gigabytes_is_refused_before_it_is_read(
    make: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    (part,) = candidates(validate(SourceConfig, make(tmp_path))).parts
    tracemalloc.start()
    (data,) = part.read(part.candidates)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert isinstance(data, BadImage) and data.reason == "too_large"
    assert "3,221,225,472 bytes" in str(data) and "ingest.from.max_bytes" in str(data)


def test_folders_nested_deeper_than_the_stack_are_walked() -> None:
    root, here = (
        Path(tempfile.mkdtemp()),
        Path.cwd(),
    )  # not pytest's folder: its cleaning up recurses
    try:
        os.chdir(root)
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")
        Path("x.png").write_bytes(PIXEL)
        os.chdir(here)
        found = listed(images=str(root))
        assert [(c.label, c.path.count("/")) for c in found] == [("d", 1500)]
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_two_folders_whose_names_are_not_utf8_do_not_become_one_class(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"caf\xe8", b"tea"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "1.png").write_bytes(PIXEL)
    found = listed(images=str(tmp_path))
    assert [(c.path, c.label, c.reason) for c in found] == [
        ("caf\\xe8/1.png", None, "name"),
        ("caf\\xe9/1.png", None, "name"),
        ("tea/1.png", "tea", ""),
    ]


def test_a_table_below_the_images_is_not_taken_for_images(tmp_path: Path, textured: Draw) -> None:
    """The table may be the target: each ingest would quarantine the files of the last one."""
    for i in range(4):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[i % 2] / f"{i}.png").write_bytes(textured(i))
    table = TableConfig(uri=str(tmp_path / "tables" / "out"))
    cfg = validate(IngestConfig, {"from": {"images": str(tmp_path)}, "workers": 0})
    assert ingest(table, cfg).accepted == 4
    again = ingest(table, cfg)
    assert (again.seen, again.present, again.reasons) == (5, 4, {"table": 1})


def hostile_header(size: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("x.png")
    member.type = kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT)[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    "data",
    [
        hostile_header(b"\xff" * 11 + b"\x00") + b"\0" * 1024,  # minus 256 bytes
        hostile_header(b"\xff" * 10 + b"\xfc\x00") + b"\0" * 1024,
        hostile_header(b"\x80" + b"\xff" * 11) + b"\0" * 1024,
        hostile_header(b"00000000001\0", tarfile.GNUTYPE_LONGNAME) * 5000 + b"\0" * 1024,
        hostile_header(b"00000001000\0", tarfile.XHDTYPE) * 5000 + b"\0" * 1024,
        b"",
        b"\0" * 10240,
    ],
    ids=[
        "negative",
        "back to the start",
        "huge",
        "names of names",
        "headers of headers",
        "empty",
        "nothing but zeros",
    ],
)
def test_a_hostile_shard_is_one_message_and_ends(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(DataError, match=r"shard (cannot be read|is cut off)|nothing to ingest"):
        listed(kind="tar", images=str(tmp_path / "x.tar"))


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_an_image_column_is_no_label(kind: str, tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([PIXEL], pa.binary()), "label": ["a"]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "0.parquet")
    else:
        append(str(tmp_path), table, "theirs")
    with pytest.raises(DataError, match=r"cannot be image and label at once.*label_column"):
        listed(kind=kind, images=str(tmp_path), label_column="image")


def test_text_beside_images_that_nobody_asks_for_is_not_judged(tmp_path: Path) -> None:
    members = [("a.jpg", PIXEL), ("a.json", b"not json"), ("b.jpg", PIXEL), ("b.cls", b"\xe9")]
    assert of_tar(tar(tmp_path / "x.tar", members), labelled=False) == {
        "a.jpg": (None, ""),
        "b.jpg": (None, ""),
    }


def test_a_vector_of_numbers_is_no_list_of_tags(tmp_path: Path) -> None:
    vectors = pa.array([[1, 0], [0, 1]], pa.list_(pa.int8(), 2))
    pq.write_table(pa.table({"image": [PIXEL, PIXEL], "label": vectors}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"'label' of .* holds one number a class"):
        listed(kind="parquet", images=str(tmp_path), task="multi_label")
