"""Single rows are dropped or relabelled by file and place: whatever the id, the partition, the
mapping, the deletion vector.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.tables import rewrite, scan, versions
from raypipe.tables.commits import Moved
from raypipe.tables.provenance import commit_properties
from raypipe.tables.rewrite import Change, Place
from raypipe.tables.table import ImageTable, append
from tests.tables import handmade as by_hand


def rows(start: int, stop: int, **more: Any) -> pa.Table:
    n = range(start, stop)
    image = pa.array([b"%d" % i * 9 for i in n], pa.binary())
    return pa.table(
        {
            "image_id": ["same"] * len(n),
            "label": ["a"] * len(n),
            "n": list(n),
            "image": image,
            **more,
        }
    )


def content(table: ImageTable, version: int | None = None) -> list[int]:
    return sorted(scan.rows(table, table.pin(version), ["n"])["n"].to_pylist())


def places_of(table: ImageTable, wanted: set[int], name: str = "n") -> list[Place]:
    found = rewrite.places(table, table.pin(), [name]).to_pylist()
    return [Place(r["file"], r["place"]) for r in found if r[name] in wanted]


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 299)))
def test_exactly_the_rows_named_go(
    tmp_path_factory: pytest.TempPathFactory, gone: set[int]
) -> None:
    uri = str(tmp_path_factory.mktemp("t") / "t")
    append(uri, rows(0, 200), "add")
    append(uri, rows(200, 300), "add")
    table = ImageTable(uri)
    done = rewrite.drop(table, table.pin(), places_of(table, gone), "drop")
    assert content(table, done.version) == sorted(set(range(300)) - gone)
    assert content(table, 1) == list(range(300))
    assert done.version == (2 if gone else 1)
    assert len(DeltaTable(uri).file_uris()) == 2 - (gone >= set(range(200))) - (
        gone >= set(range(200, 300))
    )


def test_files_stay_as_they_were_written_and_the_log_keeps_its_bounds(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(0, 300), "add")
    table = ImageTable(uri)
    before = pq.ParquetFile(next((tmp_path / "t").glob("*.parquet"))).metadata
    rewrite.drop(table, table.pin(), places_of(table, {0, 299}), "drop")
    (path,) = (u.removeprefix("file://") for u in DeltaTable(uri).file_uris())
    after = pq.ParquetFile(path).metadata
    assert [after.row_group(g).num_rows for g in range(3)] == [127, 128, 43]
    for column in range(4):
        old, new = before.row_group(0).column(column), after.row_group(0).column(column)
        for fact in ("compression", "has_dictionary_page", "is_stats_set", "physical_type"):
            assert getattr(old, fact) == getattr(new, fact), (old.path_in_schema, fact)
    (action,) = pa.table(DeltaTable(uri).get_add_actions(flatten=True)).to_pylist()
    assert (action["num_records"], action["min.label"], action["max.image_id"]) == (
        298,
        "a",
        "same",
    )
    assert sorted(
        scan.rows(table, table.pin(), ["n"], {"n": ["0", "1", "298", "299"]})["n"].to_pylist()
    ) == [1, 298]
    assert table.history()[0]["removed"] == 2


@pytest.mark.parametrize("odd", ["a b%c/ü=1", "it's", "A-1_b"])
def test_partitioned_rows_go_and_the_others_stay_in_their_partition(
    odd: str, tmp_path: Path
) -> None:
    uri, parts = str(tmp_path / "t"), [odd, None, "plain"]
    write_deltalake(uri, rows(0, 9, p=[parts[i % 3] for i in range(9)]), partition_by=["p"])
    table = ImageTable(uri)
    done = rewrite.drop(table, table.pin(), places_of(table, {0, 1, 2, 5, 8}), "drop")
    # Where the whole table was written again, the number was one too high.
    assert done.version == table.newest().version == 1
    found = scan.rows(table, table.pin(), ["n", "p"]).sort_by("n").to_pylist()
    assert [(r["n"], r["p"]) for r in found] == [(3, parts[0]), (4, None), (6, parts[0]), (7, None)]
    assert sorted(DeltaTable(uri).to_pyarrow_table()["n"].to_pylist()) == [
        3,
        4,
        6,
        7,
    ]  # another reader's view


@pytest.mark.parametrize("mode", ["vector", "mapped"])
def test_deleted_rows_stay_deleted_and_mapped_columns_mapped(mode: str, tmp_path: Path) -> None:
    physical = "col-1" if mode == "mapped" else "n"
    vector = by_hand.on_disk(tmp_path, [1, 2]) if mode == "vector" else None
    content_ = pa.table({physical: pa.array(range(10), pa.int64())})
    other = pa.table({physical: pa.array(range(10, 20), pa.int64())})
    mapping = (
        {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
        if mode == "mapped"
        else {}
    )
    by_hand.commit(
        tmp_path,
        by_hand.protocol("columnMapping" if mode == "mapped" else "deletionVectors"),
        by_hand.metadata(
            [by_hand.column("n", "long", *((1, physical) if mode == "mapped" else ()))], **mapping
        ),
        by_hand.add(tmp_path, content_, "a.parquet", 3, vector),
        by_hand.add(tmp_path, other, "b.parquet", 3),
    )
    table = ImageTable(str(tmp_path))
    before = set(content(table))
    done = rewrite.drop(table, table.pin(), places_of(table, {0, 5, 15}), "drop")
    assert done.version == table.newest().version == 1
    assert set(content(table)) == before - {0, 5, 15}
    assert content(table, 0) == sorted(before)


def test_rows_are_found_again_after_a_compaction_and_of_equal_ones_as_many_go_as_were_named(
    tmp_path: Path,
) -> None:
    uri = str(tmp_path / "t")
    for start in (0, 2, 0, 4):
        append(
            uri, rows(start, start + 2), "add"
        )  # 0 and 1 stand there twice, equal in every column
    table = ImageTable(uri)
    pinned, gone = table.pin(), [*places_of(table, {0})[:1], *places_of(table, {3})]
    versions.optimize(table)
    done = rewrite.drop(table, pinned, gone, "drop")
    assert content(table, done.version) == [0, 1, 1, 2, 4, 5]


def test_what_a_compaction_stored_as_views_can_be_filtered(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    for start in (0, 50):
        tags = pa.array([["x", "y"], [], None, ["z"]] * 13, pa.list_(pa.string())).slice(0, 50)
        append(uri, rows(start, start + 50, tags=tags), "add")
    table = ImageTable(uri)
    versions.optimize(table)
    rewrite.drop(table, table.pin(), places_of(table, {7}), "drop")
    assert content(table) == [n for n in range(100) if n != 7]


def test_values_change_in_their_rows_alone_and_a_rival_is_noticed(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(0, 300), "add")
    table = ImageTable(uri)
    base = table.delta()
    changes: dict[str, Change] = {}
    for value, n in (("b", 5), (None, 6), ("it's", 299)):
        (place,) = places_of(table, {n})
        changes.setdefault(place.file, Change()).values.setdefault("label", {})[place.row] = value
    table.tag("theirs")
    with pytest.raises(Moved):
        rewrite.commit(table, base, changes, commit_properties("relabel"))
    assert len(list((tmp_path / "t").glob("*.parquet"))) == 1
    rewrite.commit(table, table.delta(), changes, commit_properties("relabel"))
    found = {r["n"]: r["label"] for r in scan.rows(table, table.pin(), ["n", "label"]).to_pylist()}
    assert found == dict.fromkeys(range(300), "a") | {5: "b", 6: None, 299: "it's"}
    last = sorted((tmp_path / "t" / "_delta_log").glob("*.json"))[-1].read_text()
    info = next(
        json.loads(line)["commitInfo"] for line in last.splitlines() if "commitInfo" in line
    )
    assert (info["raypipe"], info["raypipe.relabelled"]) == ("relabel", "3")


@pytest.mark.parametrize("mapped_by", ["name", "id"])
def test_partitions_of_mapped_columns_keep_their_values(mapped_by: str, tmp_path: Path) -> None:
    """The log calls them by their physical names: under the table's names they read as null."""
    fields = [by_hand.column("n", "long", 1, "col-1"), by_hand.column("p", "string", 2, "col-2")]
    mode = {"delta.columnMapping.mode": mapped_by, "delta.columnMapping.maxColumnId": "2"}
    adds = []
    for i, part in enumerate(["one", "a b=c/ü", None]):
        known = pa.field("col-1", pa.int64(), metadata={"PARQUET:field_id": "1"})
        numbers = pa.table([pa.array(range(3 * i, 3 * i + 3))], schema=pa.schema([known]))
        adds.append(by_hand.add(tmp_path, numbers, f"{i}.parquet", **{"col-2": part}))
    schema = by_hand.metadata(fields, ["p"], **mode)
    by_hand.commit(tmp_path, by_hand.protocol("columnMapping"), schema, *adds)
    table = ImageTable(str(tmp_path))
    before = scan.rows(table, table.pin(), ["n", "p"]).to_pylist()
    rewrite.drop(table, table.pin(), places_of(table, {0, 4, 8}), "drop")
    after = scan.rows(table, table.pin(), ["n", "p"]).to_pylist()
    assert sorted(after, key=str) == sorted(
        (row for row in before if row["n"] not in {0, 4, 8}), key=str
    )
    log = (tmp_path / "_delta_log" / f"{1:020}.json").read_text().splitlines()
    actions = [json.loads(line) for line in log]
    for kind in ("add", "remove"):
        named = [action[kind]["partitionValues"] for action in actions if kind in action]
        assert len(named) == 3 and {name for one in named for name in one} == {"col-2"}
