"""One data set in every kind of source: the same rows, labels, splits and refusals, any task."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.models.labels import Kind
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest, quarantine_uri
from raypipe.tables.sources import SourceConfig, candidates
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.tables.verify import Verifier, chunks
from tests.conftest import encode, texture

PICTURES = [encode(texture(seed, 16)) for seed in range(6)]
SPLITS = ("train", "val", "test")
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
Row = tuple[Any, str]  # label, split; the n-th row has the n-th picture


def as_text(label: Any) -> str:
    """What pandas and people write into a cell."""
    if label is None:
        return ""
    return ("|".join(label) or "|") if isinstance(label, list) else str(label)


def names(task: Kind, rows: list[Row]) -> pa.DataType:
    held = [label for label, _ in rows if label is not None]
    if task == "multi_label":
        return pa.list_(pa.string())
    kinds: dict[type, pa.DataType] = {
        str: pa.string(),
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
    }
    return kinds[type(held[0])] if held else pa.string()


def by_folders(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    for i, (label, split) in enumerate(rows):
        file = root / split / as_text(label) / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(PICTURES[i])
    (root / "README.txt").write_text("a stray file")
    (root / rows[0][1] / "Thumbs.db").write_bytes(b"another")
    return {"images": str(root)}


def files(root: Path, rows: list[Row]) -> None:
    root.mkdir()
    for i in range(len(rows)):
        (root / f"{i}.png").write_bytes(PICTURES[i])


def by_csv(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    import csv

    files(root, rows)
    with (root / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "label", "split"])
        for i, (label, split) in enumerate(rows):
            lines.writerow([f"{i}.png", as_text(label), split])
    return {"images": str(root), "labels": str(root / "labels.csv"), "split_column": "split"}


def by_json_lines(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    files(root, rows)
    lines = [
        json.dumps({"file": f"{i}.png", "label": label, "split": split})
        for i, (label, split) in enumerate(rows)
    ]
    (root / "labels.jsonl").write_text("\n".join(lines))
    return {"images": str(root), "labels": str(root / "labels.jsonl"), "split_column": "split"}


def by_tar(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    """Labels in JSON, and of every other image in a text beside it."""
    root.mkdir()
    with tarfile.open(root / "0.tar", "w") as tar:
        for i, (label, split) in enumerate(rows):
            told = (
                {"split": split}
                if i % 2 and label is not None
                else {"label": label, "split": split}
            )
            members = {"json": json.dumps(told).encode(), "png": PICTURES[i]}
            if "label" not in told:
                members["cls"] = as_text(label).encode()
            for ending, data in members.items():
                member = tarfile.TarInfo(f"{i}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return {"kind": "tar", "images": str(root), "split_column": "split"}


def columns(task: Kind, rows: list[Row]) -> dict[str, pa.Array]:
    labels = pa.array([label for label, _ in rows], names(task, rows))
    return {
        "image": pa.array(PICTURES[: len(rows)], pa.binary()),
        "label": labels,
        "split": pa.array([s for _, s in rows]),
    }


def by_parquet(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    root.mkdir()
    pq.write_table(pa.table(columns(task, rows)), root / "0.parquet", row_group_size=2)
    return {"kind": "parquet", "images": str(root), "split_column": "split"}


def by_delta(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    append(str(root), pa.table(columns(task, rows)), "theirs")
    return {"kind": "delta", "images": str(root), "split_column": "split"}


def by_hugging_face(root: Path, task: Kind, rows: list[Row]) -> dict[str, Any]:
    """As save_to_disk writes it: texts are class numbers, and the features hold the names."""
    root.mkdir()
    held = columns(task, rows)
    features: dict[str, Any] = {}
    texts = [
        t
        for label, _ in rows
        for t in (label if isinstance(label, list) else [label])
        if isinstance(t, str)
    ]
    if texts:
        classes = list(dict.fromkeys(texts))
        number = {name: i for i, name in enumerate(classes)}
        coded = [
            [number.get(t) for t in label]
            if isinstance(label, list)
            else -1
            if label is None
            else number[label]
            for label, _ in rows
        ]
        if task == "multi_label":
            coded = [
                None if label is None else code
                for (label, _), code in zip(rows, coded, strict=True)
            ]
        held["label"] = pa.array(coded)
        named = {"names": classes, "_type": "ClassLabel"}
        features["label"] = (
            {"feature": named, "_type": "Sequence"} if task == "multi_label" else named
        )
    held["image"] = pa.array(
        [{"bytes": data, "path": None} for data in PICTURES[: len(rows)]], STRUCT
    )
    table = pa.table(held)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (root / "dataset_info.json").write_text(json.dumps({"features": features}))
    with pa.ipc.new_stream(str(root / "data.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return {"kind": "huggingface", "images": str(root), "split_column": "split"}


WAYS: dict[str, Callable[[Path, Kind, list[Row]], dict[str, Any]]] = {
    "folder": by_folders,
    "CSV": by_csv,
    "JSONL": by_json_lines,
    "tar": by_tar,
    "Parquet": by_parquet,
    "Hugging Face": by_hugging_face,
    "Delta": by_delta,
}

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"
WORDS = st.sampled_from(
    [
        "cat",
        "Dog",
        " two words ",
        COMPOSED,
        DECOMPOSED,
        "1",
        "1.0",
        "01",
        "2.10",
        "true",
        "True",
        "None",
    ]
)
BROKEN = st.sampled_from(["nan", "['a', 'b']", "[]"])
LABELS: dict[Kind, list[st.SearchStrategy[Any]]] = {
    "single_label": [
        st.one_of(WORDS, WORDS, WORDS, BROKEN),
        st.integers(-3, 3),
        st.sampled_from([0.0, -1.0, 1.0, 2.5, 1e-7, 3.0, float("nan")]),
        st.booleans(),
    ],
    "multi_label": [
        st.lists(st.one_of(WORDS, WORDS, BROKEN, st.none()), max_size=3),
        st.lists(WORDS, max_size=3),
    ],
    "probability": [
        st.floats(0, 1),
        st.integers(0, 2),
        st.sampled_from([0.0, 1 / 3, 1.0, 1.5, float("nan")]),
    ],
    "regression": [st.floats(width=32, allow_nan=True), st.integers(-(10**18), 10**18)],
}


@st.composite
def data_sets(draw: st.DrawFn, task: Kind) -> list[Row]:
    label = draw(st.sampled_from(LABELS[task]))
    if draw(st.booleans()):
        label = st.one_of(label, label, st.none())
    return draw(st.lists(st.tuples(label, st.sampled_from(SPLITS)), min_size=1, max_size=6))


def can_be_kept(way: str, task: Kind, rows: list[Row]) -> bool:
    """Whether this kind of source can hold these rows.

    A folder has no name for "unlabelled". Nor has a CSV of tags: a blank cell is an image without
    tags. A null inside a list cannot be written as text.
    """
    unlabelled = any(label is None for label, _ in rows)
    if way == "folder" or (way == "CSV" and task == "multi_label"):
        return not unlabelled and not any(
            isinstance(label, list) and None in label for label, _ in rows
        )
    return way != "tar" or not any(isinstance(label, list) and None in label for label, _ in rows)


def listed(kept: dict[str, Any], task: Kind) -> dict[str, tuple[Any, Any, Any]] | str:
    """{picture: (label, split, reason)} of every picture, read and verified as ingest does."""
    cfg = validate(SourceConfig, kept | {"task": task})
    try:
        parts = candidates(cfg).parts
    except DataError as e:
        return e.what.split(" of ")[0].split(" in ")[0]
    verify = Verifier(("PNG",), 10**6, None, 90, frozenset())
    rows = [row for chunk in chunks(parts) for row in verify(chunk).to_pylist()]
    return {
        row["image_id"]: (row["label"], None if row["reason"] else row["given"], row["reason"])
        for row in rows
        if row["reason"] != "not_an_image"
    }


@pytest.mark.parametrize("task", LABELS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_data_set_means_the_same_from_every_source(task: Kind, data: st.DataObject) -> None:
    rows = data.draw(data_sets(task))
    with tempfile.TemporaryDirectory() as folder:
        found = {
            way: listed(keep(Path(folder) / way.replace(" ", ""), task, rows), task)
            for way, keep in WAYS.items()
            if can_be_kept(way, task, rows)
        }
    expected = found["Parquet"]
    assert all(other == expected for other in found.values()), (rows, found)
    if isinstance(expected, dict):
        assert expected.keys() == {
            hashlib.sha256(data).hexdigest() for data in PICTURES[: len(rows)]
        }
        for i, (label, split) in enumerate(rows):
            read, part, reason = expected[hashlib.sha256(PICTURES[i]).hexdigest()]
            assert reason or part == split
            assert (read is None) == (label is None or bool(reason))


SHOWN: dict[Kind, list[tuple[Any, str | None]]] = {
    "single_label": [
        ("cat", "cat"),
        (DECOMPOSED, COMPOSED),
        ("1.0", "1"),
        ("01", "01"),
        ("nan", None),
        ("True", "true"),
    ],
    "multi_label": [
        (["b", "a"], "a|b"),
        ([], ""),
        (["a"], "a"),
        (["1.0"], "1"),
        (["a", "a"], "a"),
        (["nan"], None),
    ],
    "probability": [
        (1.0, "1"),
        (0.0, "0"),
        (1 / 3, "0.3333333333333333"),
        (1.5, None),
        (float("nan"), None),
        (0.25, "0.25"),
    ],
    "regression": [
        (1.0, "1"),
        (-12.5, "-12.5"),
        (1e300, None),
        (1e20, "1e+20"),
        (float("inf"), None),
        (0.1, "0.1"),
    ],
}


@pytest.mark.parametrize("task", SHOWN)
@pytest.mark.parametrize("way", WAYS)
def test_the_table_and_its_quarantine_hold_what_the_labels_say(
    task: Kind, way: str, tmp_path: Path
) -> None:
    rows = [(label, SPLITS[i % 3]) for i, (label, _) in enumerate(SHOWN[task])]
    kept = WAYS[way](tmp_path / "source", task, rows)
    table = TableConfig(uri=str(tmp_path / "out"))
    done = ingest(
        table,
        validate(
            IngestConfig,
            {"from": kept | {"task": task}, "near_bits": 0, "workers": 0, "threads": 1},
        ),
    )
    opened = ImageTable.open(table)
    found = {
        r["image"]: (r["label"], r["split"])
        for r in scan.rows(opened, opened.pin(), ["image", "label", "split"]).to_pylist()
    }
    wanted = {i: label for i, (_, label) in enumerate(SHOWN[task]) if label is not None}
    assert found == {PICTURES[i]: (label, SPLITS[i % 3]) for i, label in wanted.items()}
    assert (done.accepted, done.unlabelled, done.reasons["label"]) == (
        len(wanted),
        0,
        6 - len(wanted),
    )
    quarantine = ImageTable(quarantine_uri(table.uri))
    kept_aside = scan.rows(quarantine, quarantine.pin(), ["image", "reason", "detail"]).to_pylist()
    assert {r["image"] for r in kept_aside if r["reason"] == "label"} == {
        PICTURES[i] for i in range(6) if i not in wanted
    }


def test_images_without_tags_are_labelled_and_learned_from(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    """The model's task types the label; an image without a tag is an example of no class."""
    files(tmp_path / "photos", [(None, "train")] * 6)
    cells = ["a|b", "", "b", "", "a", ""]
    lines = [f"{i}.png,{cell},{SPLITS[i % 2]}" for i, cell in enumerate(cells)]
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(["file,label,split", *lines]) + "\n")
    source = {
        "images": str(tmp_path / "photos"),
        "labels": str(tmp_path / "photos" / "labels.csv"),
        "split_column": "split",
    }
    config = tmp_path / "mine.yaml"
    made = {"table": {"uri": str(tmp_path / "out")}, "model": {"task": "multi_label"}}
    made |= {
        "run": {"dir": str(tmp_path / "run")},
        "ingest": {"from": source, "near_bits": 0, "workers": 0},
    }
    config.write_text(json.dumps(made))
    code, out, err = cli("ingest", config, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["accepted"] == 6 and "(no tag) 3" in err
    pinned = pin(TableConfig(uri=str(tmp_path / "out")), FeedConfig(), kind="multi_label")
    assert pinned.classes == ("a", "b") and pinned.counts == {"train": 3, "val": 3, "test": 0}
