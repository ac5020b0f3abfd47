"""Every kind of deletion vector, column mapping and partition value is read right or refused."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import DataError
from raypipe.tables import fragment, scan
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.tables import handmade as by_hand

N = 1000


def numbered(start: int, stop: int) -> pa.Table:
    blobs = pa.array([f"image {i}".encode() for i in range(start, stop)], pa.binary())
    return pa.table({"x": pa.array(range(start, stop), pa.int64()), "blob": blobs})


FIELDS = [by_hand.column("x"), by_hand.column("blob", "binary")]


def read(table: Path, *columns: str, where: scan.Where | None = None) -> pa.Table:
    opened = ImageTable(str(table))
    return scan.rows(opened, opened.pin(), list(columns), where)


def vector(kind: str, table: Path, rows: list[int]) -> dict[str, Any]:
    if kind == "inline":
        return by_hand.inline(rows)
    return by_hand.on_disk(table, rows, absolute=kind == "absolute")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t").mkdir()
    return tmp_path / "t"


@pytest.mark.parametrize("kind", ["inline", "relative", "absolute"])
@pytest.mark.parametrize("group", [100, 333, N])
def test_a_deletion_vector_takes_its_rows_out_of_every_row_group(
    kind: str, group: int, table: Path
) -> None:
    gone = [0, 1, 99, 100, 332, 333, 500, *range(600, 800), 999]
    added = by_hand.add(
        table, numbered(0, N), "a b.parquet", group, vector(kind, table, gone), "a%20b.parquet"
    )
    whole = by_hand.add(table, numbered(N, N + 50), "c.parquet")
    by_hand.commit(
        table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added, whole
    )
    expected = sorted(set(range(N + 50)) - set(gone))
    found = read(table, "x", "blob")
    assert sorted(found["x"].to_pylist()) == expected
    assert found["blob"].to_pylist() == [f"image {x}".encode() for x in found["x"].to_pylist()]
    assert read(table, "x", where={"x": ["99", "598"]})["x"].to_pylist() == [598]


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 299)), st.integers(1, 300))
def test_any_vector_over_any_row_groups(
    tmp_path_factory: pytest.TempPathFactory, gone: set[int], group: int
) -> None:
    table = tmp_path_factory.mktemp("t")
    added = by_hand.add(table, numbered(0, 300), "a.parquet", group, by_hand.inline(sorted(gone)))
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    assert read(table, "x")["x"].to_pylist() == sorted(set(range(300)) - gone)


def test_a_vector_with_dense_and_sparse_containers(table: Path) -> None:
    rows = pa.table({"x": pa.array(range(200_000), pa.int64())})
    gone = [*range(5, 60_000, 2), 70_000, 199_999]
    by_hand.commit(
        table,
        by_hand.protocol("deletionVectors"),
        by_hand.metadata(FIELDS[:1]),
        by_hand.add(table, rows, "a.parquet", 30_000, by_hand.on_disk(table, gone)),
    )
    assert read(table, "x")["x"].to_pylist() == sorted(set(range(200_000)) - set(gone))


def test_located_rows_are_found_again_in_their_row_group(table: Path) -> None:
    """The training feed relies on this: fragment and row number lead to the same bytes.

    Rows in between may be deleted.
    """
    gone = [3, 150, 151, 152, *range(200, 300)]
    added = by_hand.add(table, numbered(0, N), "a.parquet", 100, by_hand.inline(gone))
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    opened = ImageTable(str(table))
    found = scan.located(opened, opened.pin(), ["x"])
    assert [part.row_group for part, _ in found] == [
        0,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
    ]  # the third has no row left
    seen = []
    for part, rows in found:
        blobs = scan.binary(part, "blob", None)
        assert len(blobs) == part.rows
        for x, row in zip(rows["x"].to_pylist(), rows[scan.ROW].to_pylist(), strict=True):
            assert blobs[row].as_py() == f"image {x}".encode()
            seen.append(x)
    assert seen == sorted(set(range(N)) - set(gone))


def test_a_damaged_vector_is_an_error_and_brings_no_row_back(table: Path) -> None:
    vector = by_hand.on_disk(table, [1, 2])
    added = by_hand.add(table, numbered(0, 10), "a.parquet", dv=vector)
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    (file,) = table.glob("deletion_vector_*.bin")
    whole = file.read_bytes()
    file.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    with pytest.raises(DataError, match=r"deletion vector"):
        read(table, "x")
    file.unlink()
    with pytest.raises(DataError, match=r"deletion vector"):
        read(table, "x")


PARTITIONS = {
    "string": [None, "two words", "50%", "a/b=c", "a%20b", "ü:é", "it's", "null", "#1?"],
    "integer": [None, "0", "-7"],
    "decimal(12,5)": [None, "-2342342.23423", "0.00004", "1.00000"],
    "date": [None, "1969-12-31", "2026-11-01", "0001-01-01"],
    "timestamp": [
        None,
        "2026-11-01 12:00:00",
        "2026-11-01 12:00:00.123456",
        "2026-11-01T12:00:00.000000Z",
    ],
    "timestamp_ntz": [None, "1969-11-01 12:00:00.5"],
    "boolean": [None, "true", "false"],
    "double": [None, "1.5", "-1.0E-5", "NaN", "Infinity"],
    "binary": [None, "ab"],
}
TYPED: dict[str, Any] = {
    "string": str,
    "integer": int,
    "decimal(12,5)": Decimal,
    "date": dt.date.fromisoformat,
    "timestamp": lambda v: dt.datetime.fromisoformat(v.removesuffix("Z")).replace(
        tzinfo=dt.timezone.utc
    ),
    "timestamp_ntz": lambda v: dt.datetime.fromisoformat(v.ljust(26, "0")),
    "boolean": "true".__eq__,
    "double": float,
    "binary": str.encode,
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_partition_values_come_typed_from_the_strings_of_the_log(kind: str, table: Path) -> None:
    values = PARTITIONS[kind]
    rows = [
        by_hand.add(table, numbered(i, i + 1).select(["x"]), f"{i}.parquet", p=v)
        for i, v in enumerate(values)
    ]
    listed = (
        by_hand.protocol("timestampNtz")
        if kind == "timestamp_ntz"
        else by_hand.protocol(reader=1, writer=2)
    )
    fields = [by_hand.column("x"), by_hand.column("p", kind)]
    by_hand.commit(table, listed, by_hand.metadata(fields, ["p"]), *rows)
    found = read(table, "x", "p").sort_by("x")["p"].to_pylist()
    expected = [None if v is None else TYPED[kind](v) for v in values]
    assert list(map(repr, found)) == list(map(repr, expected)) or [str(a) for a in found] == [
        str(b) for b in expected
    ]
    assert len(read(table, "x", where={"p": []})) == 0


def test_an_empty_partition_value_is_a_null(table: Path) -> None:
    added = by_hand.add(table, numbered(0, 2).select(["x"]), "a.parquet", p="")
    fields = [by_hand.column("x"), by_hand.column("p", "string")]
    by_hand.commit(
        table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(fields, ["p"]), added
    )
    assert read(table, "p")["p"].to_pylist() == [None, None]


def inner(name: str, kind: Any, id: int, physical: str) -> dict[str, Any]:
    return by_hand.column(name, kind, id, physical)


STRUCT = {"type": "struct", "fields": [inner("a", "long", 3, "pa"), inner("b", "string", 4, "pb")]}
MAPPED = [
    inner("x", "long", 1, "px"),
    inner("s", STRUCT, 2, "ps"),
    inner(
        "many",
        {
            "type": "array",
            "elementType": {"type": "struct", "fields": [inner("c", "long", 6, "pc")]},
            "containsNull": True,
        },
        5,
        "pmany",
    ),
    inner(
        "named",
        {
            "type": "map",
            "keyType": "string",
            "valueType": {"type": "struct", "fields": [inner("d", "long", 8, "pd")]},
            "valueContainsNull": True,
        },
        7,
        "pnamed",
    ),
    inner("blob", "binary", 9, "pblob"),
    inner("late", "long", 10, "plate"),  # added after the file was written
]
ROWS = [
    {
        "x": i,
        "s": None if i == 2 else {"a": i, "b": f"b{i}"},
        "many": [None, [], [{"c": i}, None, {"c": None}]][i % 3],
        "named": [("k", {"d": i}), ("l", None)] if i % 2 else None,
        "blob": b"x" * i,
        "late": None,
    }
    for i in range(10)
]


def physical(mode: str) -> pa.Table:
    """ROWS as a file holds them, with fields in another order.

    Mapped by id, the names mean nothing; here they are wrong.
    """
    swap = {"pa": "pb", "pb": "pa", "px": "ps", "ps": "px"} if mode == "id" else {}

    def field(name: str, kind: pa.DataType, id: int) -> pa.Field:
        return pa.field(
            swap.get(name, name),
            kind,
            metadata={"PARQUET:field_id": str(id)} if mode == "id" else None,
        )

    struct = pa.struct([field("pb", pa.string(), 4), field("pa", pa.int64(), 3)])
    many, named = pa.struct([field("pc", pa.int64(), 6)]), pa.struct([field("pd", pa.int64(), 8)])
    fields = [
        field("pblob", pa.binary(), 9),
        field("ps", struct, 2),
        field("px", pa.int64(), 1),
        field("pmany", pa.list_(many), 5),
        field("pnamed", pa.map_(pa.string(), named), 7),
    ]
    inside = {"a": struct[1].name, "b": struct[0].name, "c": "pc", "d": "pd"}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {inside[k]: v for k, v in value.items()}
        if isinstance(value, list):
            return [(v[0], renamed(v[1])) if isinstance(v, tuple) else renamed(v) for v in value]
        return value

    logical = ["blob", "s", "x", "many", "named"]
    return pa.table(
        [
            pa.array([renamed(r[n]) for r in ROWS], f.type)
            for n, f in zip(logical, fields, strict=True)
        ],
        pa.schema(fields),
    )


@pytest.mark.parametrize("legacy", [True, False], ids=["reader 2", "feature"])
@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_found_at_every_depth(mode: str, legacy: bool, table: Path) -> None:
    listed = (
        by_hand.protocol(reader=2, writer=5)
        if legacy
        else by_hand.protocol("columnMapping", "deletionVectors")
    )
    vector = None if legacy else by_hand.inline([4, 5])
    by_hand.commit(
        table,
        listed,
        by_hand.metadata(
            MAPPED, **{"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "10"}
        ),
        by_hand.add(table, physical(mode), "a.parquet", 4, vector),
    )
    expected = ROWS if legacy else ROWS[:4] + ROWS[6:]
    names = [f["name"] for f in MAPPED]
    found = read(table, *names)
    assert found.schema.names == names
    assert found.to_pylist() == expected
    assert read(table, "late", where={"x": "7"}).to_pylist() == [{"late": None}]
    opened = ImageTable(str(table))
    part, rows = scan.located(opened, opened.pin(), ["x"])[1]
    assert [scan.binary(part, "blob", None)[r].as_py() for r in rows[scan.ROW].to_pylist()] == [
        b"x" * x for x in rows["x"].to_pylist()
    ]


def test_partitioned_mapped_and_deleted_at_once(table: Path) -> None:
    fields = [inner("x", "long", 1, "col-1"), inner("p", "date", 2, "col-2")]
    rows = numbered(0, 10).select(["x"]).rename_columns(["col-1"])
    adds = [
        by_hand.add(
            table, rows, f"col-2={day}/a.parquet", 3, by_hand.on_disk(table, [i]), **{"col-2": day}
        )
        for i, day in enumerate(["2026-01-01", "2026-01-02", None])
    ]
    names = by_hand.metadata(
        fields,
        ["p"],
        **{"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"},
    )
    by_hand.commit(table, by_hand.protocol("columnMapping", "deletionVectors"), names, *adds)
    found = read(table, "x", "p").to_pylist()
    for i, day in enumerate([dt.date(2026, 1, 1), dt.date(2026, 1, 2), None]):
        assert sorted(r["x"] for r in found if r["p"] == day) == [x for x in range(10) if x != i]
    assert len(read(table, "x", where={"p": "2026-01-02"})) == 9


def test_a_file_without_ids_in_a_table_mapped_by_id_is_refused(table: Path) -> None:
    names = by_hand.metadata([inner("x", "long", 1, "x")], **{"delta.columnMapping.mode": "id"})
    added = by_hand.add(table, numbered(0, 3).select(["x"]), "a.parquet")
    by_hand.commit(table, by_hand.protocol("columnMapping"), names, added)
    with pytest.raises(DataError, match=r"mapped by id and a file has no ids.*a\.parquet"):
        read(table, "x")


def test_statistics_rule_files_out_and_never_a_row(table: Path) -> None:
    """The file that is ruled out is not even there: opening it would fail."""
    adds = [by_hand.add(table, numbered(i * 100, i * 100 + 100), f"{i}.parquet") for i in range(3)]
    for i, a in enumerate(adds[:2]):
        a["add"]["stats"] = json.dumps(
            {"numRecords": 100, "minValues": {"x": i * 100}, "maxValues": {"x": i * 100 + 99}}
        )
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS), *adds)
    (table / "0.parquet").unlink()
    assert read(table, "x", where={"x": ["150", "250"]})["x"].to_pylist() == [
        150,
        250,
    ]  # the third has no statistics
    with pytest.raises(DataError, match=r"lacks a file that its log names.*0\.parquet"):
        read(table, "x", where={"x": "50"})


def test_a_sample_is_the_same_rows_however_they_are_read(table: Path) -> None:
    added = by_hand.add(table, numbered(0, N), "a.parquet", 100, by_hand.inline(list(range(500))))
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    opened = ImageTable(str(table), sample=0.3)
    taken = scan.rows(opened, opened.pin(), ["x"])["x"].to_pylist()
    assert min(taken) >= 500
    assert 110 < len(taken) < 190  # 150, within four standard deviations
    assert [
        x for _, rows in scan.located(opened, opened.pin(), ["x"]) for x in rows["x"].to_pylist()
    ] == taken
    assert scan.rows(opened, opened.pin(), ["blob", "x"])["x"].to_pylist() == taken


def test_the_order_of_a_version_does_not_change_with_a_checkpoint(table: Path) -> None:
    from deltalake import DeltaTable

    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS))
    for i in np.random.default_rng(0).permutation(12):
        by_hand.commit(table, by_hand.add(table, numbered(10 * i, 10 * i + 10), f"{i}.parquet"))
    before = read(table, "x")
    DeltaTable(str(table)).create_checkpoint()
    assert read(table, "x") == before


def test_years_beyond_nanoseconds_survive_int96(table: Path) -> None:
    moments = [
        dt.datetime(1, 1, 1),
        dt.datetime(1600, 2, 29, 1, 2, 3, 4),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    ]
    rows = pa.table({"at": pa.array(moments, pa.timestamp("us"))})
    added = by_hand.add(table, rows, "a.parquet")
    pq.write_table(
        rows, table / "a.parquet", use_deprecated_int96_timestamps=True, store_schema=False
    )
    by_hand.commit(
        table,
        by_hand.protocol(reader=1, writer=2),
        by_hand.metadata([by_hand.column("at", "timestamp")]),
        added,
    )
    assert [v.replace(tzinfo=None) for v in read(table, "at")["at"].to_pylist()] == moments


def test_only_the_last_few_files_stay_open(table: Path) -> None:
    adds = [by_hand.add(table, numbered(i, i + 1), f"{i}.parquet") for i in range(40)]
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS), *adds)
    opened = ImageTable(str(table))
    fragments, _ = scan.plan(opened, opened.pin())
    first = fragment.open_file(fragments[0].uri, fragments[0].path, None)
    assert fragment.open_file(fragments[0].uri, fragments[0].path, None) is first
    for part in fragments:
        scan.binary(part, "blob", None)
    assert first.closed
    assert scan.binary(fragments[0], "blob", None).to_pylist() == [b"image 0"]


WIDENED = [
    ("long", pa.int8(), [1, None, -128]),
    ("double", pa.float32(), [0.5, None]),
    ("double", pa.int32(), [2**31 - 1, -5]),
    ("decimal(12,4)", pa.decimal128(5, 2), [Decimal("1.25"), Decimal("-999.99")]),
    ("decimal(12,0)", pa.int32(), [-(2**31), None]),
    ("timestamp_ntz", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
]


@pytest.mark.parametrize(
    ("kind", "old", "values"), WIDENED, ids=lambda v: str(v) if not isinstance(v, list) else ""
)
def test_a_widened_column_keeps_its_old_values(
    kind: str, old: pa.DataType, values: list[Any], table: Path
) -> None:
    adds = [by_hand.add(table, pa.table({"x": pa.array(values, old)}), "old.parquet")]
    by_hand.commit(
        table,
        by_hand.protocol("typeWidening", "timestampNtz"),
        by_hand.metadata([by_hand.column("x", kind)]),
        *adds,
    )
    found = read(table, "x")["x"].to_pylist()
    assert [str(v)[:10] if isinstance(v, dt.datetime) else v for v in found] == [
        str(v) if isinstance(v, dt.date) else v for v in values
    ]


def test_tagging_adds_no_feature_to_a_table_that_others_read(table: Path) -> None:
    """deltalake 1.6 adds variantType with any table property; older readers refuse the table."""
    added = by_hand.add(table, numbered(0, 10), "a.parquet", dv=by_hand.inline([3]))
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    opened = ImageTable(str(table))
    opened.tag("raw", 0)
    opened.tag("clean", 0)
    opened.tag("clean", 1, move=True)
    delta = opened.delta()
    assert (opened.tags(), delta.protocol().reader_features) == (
        {"raw": 0, "clean": 1},
        ["deletionVectors"],
    )
    delta.create_checkpoint()
    assert opened.tags() == {"raw": 0, "clean": 1}
    assert len(scan.rows(opened, opened.pin("raw"), ["x"])) == 9
    opened.delta().alter.set_table_properties({"delta.appendOnly": "false"})
    assert "variantType" in opened.delta().protocol().reader_features, (
        "mended in deltalake: tags may be properties everywhere"
    )
    assert len(read(table, "x")) == 9  # such a table still reads


@pytest.mark.parametrize("name", ["with blank", "50%", "ü#?x", "back+slash"])
def test_the_folder_of_a_table_may_have_any_name(name: str, tmp_path: Path) -> None:
    table = tmp_path / name
    table.mkdir()
    added = by_hand.add(table, numbered(0, 10), "a.parquet", dv=by_hand.on_disk(table, [3]))
    by_hand.commit(table, by_hand.protocol("deletionVectors"), by_hand.metadata(FIELDS), added)
    assert len(read(table, "x")) == 9


def test_files_named_absolutely_are_found_wherever_they_are(table: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    adds = [
        by_hand.add(
            elsewhere, numbered(0, 5), "a.parquet", logged=(elsewhere / "a.parquet").as_uri()
        ),
        by_hand.add(
            elsewhere,
            numbered(5, 9),
            "b.parquet",
            logged=str(elsewhere / "b.parquet").replace(" ", "%20"),
        ),
    ]
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS), *adds)
    assert sorted(read(table, "x")["x"].to_pylist()) == list(range(9))


def test_a_column_in_other_letters_is_refused_and_not_read_as_null(table: Path) -> None:
    """CONVERT TO DELTA takes such files: their rows had no label, without a word."""
    rows = numbered(0, 5)
    adds = [
        by_hand.add(table, rows, "a.parquet"),
        by_hand.add(table, rows.rename_columns(["X", *rows.column_names[1:]]), "b.parquet"),
    ]
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS), *adds)
    with pytest.raises(DataError, match=r"calls the column 'x' 'X' .*b\.parquet"):
        read(table, "x")


def test_a_tag_moves_after_the_table_has_lost_its_reader_features(table: Path) -> None:
    """DROP FEATURE: tags that columns hold were read, and those of the table were written."""
    feature = by_hand.protocol("deletionVectors")
    added = by_hand.add(table, numbered(0, 5), "a.parquet")
    by_hand.commit(table, feature, by_hand.metadata(FIELDS), added)
    opened = ImageTable(str(table))
    opened.tag("clean", 0)
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2))
    opened.tag("clean", 1, move=True)
    assert opened.tags() == {"clean": 1}
    opened.untag("clean")
    assert opened.tags() == {}


def test_a_file_that_vanishes_while_the_log_is_listed_is_no_error(table: Path) -> None:
    """A commit that is being written has another name for a moment."""
    added = by_hand.add(table, numbered(0, 5), "a.parquet")
    by_hand.commit(table, by_hand.protocol(reader=1, writer=2), by_hand.metadata(FIELDS), added)
    (table / "_delta_log" / f"{1:020}.json#1").symlink_to(table / "gone")
    assert len(ImageTable(str(table)).commits()[1]) == 1


@pytest.mark.parametrize("uri", ["dbfs:/mnt/t", "file:/data/t", "s3:/b/t"])
def test_an_address_with_one_slash_is_no_folder_here(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark writes it: the rows were on the driver's own disk, and went with it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="with one slash would be a folder"):
        ImageTable.open(TableConfig(uri=uri))
    with pytest.raises(DataError, match="with one slash would be a folder"):
        append(uri, numbered(0, 1), "add")
    assert not list(tmp_path.iterdir())
