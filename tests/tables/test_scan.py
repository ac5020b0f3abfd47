"""A scan returns the matching rows of the pinned version in the table's types, also by Ray."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.errors import DataError
from raypipe.tables import conditions, scan
from raypipe.tables.table import Columns, ImageTable, TableVersion, append
from tests.tables.handmade import drop

COLUMNS = ["image_id", "label", "split", "image"]


def cells(start: int, stop: int, **more: list[object]) -> pa.Table:
    """Row i: id i, label a/b by turns, every fifth in test, an image of i bytes."""
    return pa.table(
        {
            "image_id": [f"{i:04d}" for i in range(start, stop)],
            "label": [("a", "b", None)[i % 3] for i in range(start, stop)],
            "split": ["test" if i % 5 == 0 else "train" for i in range(start, stop)],
            "image": pa.array([b"x" * i for i in range(start, stop)], pa.binary()),
        }
        | more
    )


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """400 rows in two files of several row groups."""
    uri = str(tmp_path / "cells")
    append(uri, cells(0, 300), "first")
    append(uri, cells(300, 400), "second")
    return ImageTable(uri)


def as_rows(found: pa.Table) -> list[dict[str, object]]:
    return sorted(found.to_pylist(), key=lambda r: str(r["image_id"]))


def ids(
    table: ImageTable, version: TableVersion | None = None, where: scan.Where | None = None
) -> list[str]:
    return [
        str(r["image_id"])
        for r in as_rows(scan.rows(table, version or table.pin(), ["image_id"], where))
    ]


def test_every_row_comes_once_with_the_columns_asked_for_in_their_order(table: ImageTable) -> None:
    found = scan.rows(table, table.pin(), ["split", "image", "image_id", "label"])
    assert found.schema.names == ["split", "image", "image_id", "label"]
    assert as_rows(found.select(COLUMNS)) == cells(0, 400).to_pylist()


def test_a_plan_has_every_row_group_once_and_their_rows_add_up(table: ImageTable) -> None:
    fragments, _ = scan.plan(table, table.pin())
    assert sum(f.rows for f in fragments) == 400
    assert sorted(f.rows for f in fragments) == [44, 100, 128, 128]
    assert len({(f.path, f.row_group) for f in fragments}) == len(fragments)


@pytest.mark.parametrize(
    ("where", "keeps"),
    [
        ({"label": "a"}, lambda r: r["label"] == "a"),
        ({"label": ["a", "b"]}, lambda r: r["label"] is not None),
        ({"label": "a", "split": "test"}, lambda r: r["label"] == "a" and r["split"] == "test"),
        ({"image_id": ["0001", "0399", "9999"]}, lambda r: r["image_id"] in ("0001", "0399")),
        ({"label": "nobody"}, lambda r: False),
        ({"label": []}, lambda r: False),
        ({}, lambda r: True),
    ],
)
def test_where_keeps_what_matches_and_never_a_null(
    where: scan.Where, keeps: object, table: ImageTable
) -> None:
    expected = [r["image_id"] for r in cells(0, 400).to_pylist() if keeps(r)]  # type: ignore[operator]
    assert ids(table, where=where) == expected


def test_where_may_use_a_column_that_is_not_returned_and_compares_numbers_as_text(
    tmp_path: Path,
) -> None:
    uri = str(tmp_path / "t")
    append(uri, cells(0, 10, size=list(range(10)), good=[True, False] * 5), "add")
    table = ImageTable(uri)
    assert ids(table, where={"size": ["3", "7"]}) == ["0003", "0007"]
    assert ids(table, where={"good": "true", "label": "a"}) == ["0000", "0006"]


def test_a_pinned_version_reads_the_same_while_others_append_and_delete(table: ImageTable) -> None:
    pinned = table.pin()
    before = ids(table, pinned)
    append(table.uri, cells(400, 450), "meanwhile")
    DeltaTable(table.uri).delete("label = 'a'")
    assert ids(table, pinned) == before
    assert len(ids(table)) == 450 - 150


def test_files_rewritten_by_a_delete_filter_and_read_as_before(table: ImageTable) -> None:
    """delta-rs rewrites a file with string_view columns, for which Arrow has no is_in kernel."""
    drop(table, table.pin(), ["0003", "0350"], "clean")
    expected = [r for r in cells(0, 400).to_pylist() if r["image_id"] not in ("0003", "0350")]
    assert as_rows(scan.rows(table, table.pin(), COLUMNS)) == expected
    assert ids(table, where={"split": ["test"]}) == [
        r["image_id"] for r in expected if r["split"] == "test"
    ]


def test_a_column_added_later_is_null_in_older_files_whatever_its_type(table: ImageTable) -> None:
    later = cells(400, 410, note=["n"] * 10, size=list(range(10)), scores=[[0.5]] * 10)
    write_deltalake(table.uri, later, mode="append", schema_mode="merge")
    found = scan.rows(table, table.pin(), ["image_id", "note", "size", "scores"])
    assert (found.schema.field("size").type, found.schema.field("note").type) == (
        pa.int64(),
        pa.string(),
    )
    assert (found["note"].null_count, found["size"].null_count, found["scores"].null_count) == (
        400,
        400,
        400,
    )
    assert ids(table, where={"note": "n"}) == [f"{i:04d}" for i in range(400, 410)]
    assert ids(table, where={"size": "3"}) == ["0403"]
    with pytest.raises(DataError, match=r"no column 'note'"):
        scan.rows(table, table.pin(1), ["note"])


def test_partition_columns_come_back_in_their_types_and_filter(tmp_path: Path) -> None:
    days = [date(2026, 1, 1 + i % 2) for i in range(12)]
    rows = cells(0, 12, day=days, shift=pa.array([i % 3 for i in range(12)], pa.int32()))
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["label", "day", "shift"])
    table = ImageTable(str(tmp_path / "t"))
    found = scan.rows(table, table.pin(), [*COLUMNS, "day", "shift"])
    assert found.schema.field("day").type == pa.date32()
    assert found.schema.field("shift").type == pa.int32()
    assert as_rows(found) == rows.to_pylist()
    expected = [
        r["image_id"]
        for r in rows.to_pylist()
        if r["label"] == "a" and r["day"] == days[0] and r["shift"] == 0
    ]
    assert ids(table, where={"label": "a", "day": "2026-01-01", "shift": "0"}) == expected


@pytest.mark.parametrize("value", ["two words", "50%", "a/b", "a%20b", "p=q", "ü:é", "it's", "#1?"])
def test_a_partition_value_may_hold_any_character(value: str, tmp_path: Path) -> None:
    rows = cells(0, 4).set_column(1, "label", pa.array([value, value, "plain", None]))
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["label"])
    table = ImageTable(str(tmp_path / "t"))
    assert as_rows(scan.rows(table, table.pin(), COLUMNS)) == rows.to_pylist()
    assert ids(table, where={"label": value}) == ["0000", "0001"]


def test_ids_labels_and_splits_are_names_whatever_their_type(tmp_path: Path) -> None:
    numbers = {
        "image_id": [10, 11, 12],
        "label": [0, 1, None],
        "split": [True, False, True],
        "image": [b"a", b"b", b"c"],
    }
    append(str(tmp_path / "t"), pa.table(numbers), "add")
    table = ImageTable(str(tmp_path / "t"))
    found = scan.rows(table, table.pin(), ["image_id", "label", "split"])
    assert found.to_pydict() == {
        "image_id": ["10", "11", "12"],
        "label": ["0", "1", None],
        "split": ["true", "false", "true"],
    }
    assert ids(table, where={"label": "1"}) == ["11"]
    drop(table, table.pin(), ["11"], "clean")
    assert ids(table) == ["10", "12"]


def test_a_label_of_several_tags_is_read_as_text_with_bars_and_an_id_has_one_value(
    tmp_path: Path,
) -> None:
    rows = {
        "image_id": ["a", "b", "c"],
        "label": [["x", "y"], [], None],
        "image": [b"a"] * 3,
        "split": [["x"]] * 3,
    }
    append(str(tmp_path / "t"), pa.table(rows), "add")
    table = ImageTable(str(tmp_path / "t"))
    assert scan.rows(table, table.pin(), ["label"])["label"].to_pylist() == ["x|y", "", None]
    assert ids(table, where={"label": "x|y"}) == ["a"]
    with pytest.raises(
        DataError, match=r"Column 'split' .*cannot name anything .*list.*One value a row"
    ):
        scan.rows(table, table.pin(), ["split"])


def test_two_orders_of_the_same_tags_are_one_label(tmp_path: Path) -> None:
    labels = {"image_id": ["a", "b", "c"], "label": [["y", "x"], ["x", "y"], ["x", "x"]]}
    append(str(tmp_path / "t"), pa.table(labels), "add")
    table = ImageTable(str(tmp_path / "t"))
    assert scan.rows(table, table.pin(), ["label"])["label"].to_pylist() == ["x|y", "x|y", "x"]
    for where in ("x|y", "y|x"):
        assert ids(table, where={"label": where}) == ["a", "b"]


def test_a_list_of_numbers_that_is_no_label_keeps_its_order(tmp_path: Path) -> None:
    places = {"image_id": ["a", "b"], "place": [[1, 2], [2, 1]]}
    append(str(tmp_path / "t"), pa.table(places), "add")
    table = ImageTable(str(tmp_path / "t"))
    assert ids(table, where={"place": "1|2"}) == ["a"]


def test_a_time_that_python_cannot_hold_is_one_message(tmp_path: Path) -> None:
    late = pa.array([253402300800 * 10**6], pa.timestamp("us", "UTC"))  # the year 10000
    write_deltalake(str(tmp_path), pa.table({"label": late}))
    table = ImageTable(str(tmp_path))
    with pytest.raises(DataError, match=r"timestamp.*cannot be read.*years 1 to 9999"):
        scan.rows(table, table.pin(), ["label"])


def test_a_name_with_a_dot_is_no_field_of_a_struct(tmp_path: Path) -> None:
    """Their statistics have one name, and a condition ended in a KeyError."""
    rows = pa.table({"a": [{"b": "x"}, {"b": "y"}], "a.b": ["y", "z"], "n": [0, 1]})
    write_deltalake(str(tmp_path), rows)
    table = ImageTable(str(tmp_path))
    for value, found in (("x", []), ("y", [0]), ("z", [1])):
        assert scan.rows(table, table.pin(), ["n"], {"a.b": value})["n"].to_pylist() == found


@pytest.mark.parametrize("partition_by", [None, "label", "line"])
def test_a_label_is_found_in_each_spelling_of_its_class_and_other_texts_as_they_are(
    partition_by: str | None, tmp_path: Path
) -> None:
    """pandas writes the class 1 of a column with gaps as 1.0, which reports call 1."""
    spelled = ["1", "1.0", "01", "2.0", "true", "True", "cat", "0", "-0.0"]
    # A file each, which its statistics may rule out.
    for text in spelled:
        rows = pa.table({"label": [text], "line": [text]})
        write_deltalake(str(tmp_path / "t"), rows, mode="append", partition_by=partition_by)
    table = ImageTable(str(tmp_path / "t"))

    def found(where: scan.Where) -> list[str]:
        return sorted(scan.rows(table, table.pin(), ["label"], where)["label"].to_pylist())

    assert found({"label": "1"}) == found({"label": "1.0"}) == ["1", "1.0"]
    assert found({"label": ["2", "TRUE"]}) == ["2.0", "True", "true"]
    assert (found({"label": "01"}), found({"label": "0"})) == (["01"], ["-0.0", "0"])
    assert found({"label": "cat"}) == ["cat"]
    for text in spelled:
        assert found({"line": text}) == [text]
    schema = pa.schema([("label", pa.string()), ("line", pa.string())])
    both = {"label": "1.0", "line": "1"}, {"label": "1", "line": "1.0"}
    assert found(conditions.both(both[0], {"label": "1"}, schema, "label")) == ["1"]
    assert found(conditions.both(*both, schema, "label")) == []
    numbered = ImageTable(table.uri, Columns(label="line"))
    assert len(scan.rows(numbered, numbered.pin(), ["line"], {"line": "1"})) == 2


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("partition_by", [None, "label"])
def test_tags_in_a_column_of_texts_are_found_in_each_of_their_orders(
    partition_by: str | None, tmp_path: Path
) -> None:
    """Each order has another text, and only that of the condition and the sorted one were found."""
    written = ["b|a", "a | b", "a|b", "a", "b|c", "a|b|c", "Ku\u0308che|a"]
    # A file each, which its statistics may rule out.
    for text in written:
        rows = pa.table({"label": [text], "line": [text]})
        write_deltalake(str(tmp_path), rows, mode="append", partition_by=partition_by)
    rows = pa.table({"label": pa.nulls(1, pa.string()), "line": ["none"]})
    write_deltalake(str(tmp_path), rows, mode="append", partition_by=partition_by)
    table = ImageTable(str(tmp_path))

    def found(where: scan.Where) -> list[str]:
        texts: list[str] = scan.rows(table, table.pin(), ["line"], where)["line"].to_pylist()
        return texts

    same = ["a | b", "a|b", "b|a"]
    for wanted in ("a|b", "b|a", "b | a|b"):
        assert sorted(found({"label": wanted})) == same
    assert sorted(found({"label": ["b|a", "a"]})) == ["a", *same]
    assert found({"label": "a|K\u00fcche"}) == ["Ku\u0308che|a"]
    # Any other column holds texts, which have one order.
    assert found({"line": "b|a"}) == ["b|a"]
    schema = pa.schema([("label", pa.string()), ("line", pa.string())])
    for first, second in (("a|b", "b|a"), ("b|a", "a|b")):
        joined = conditions.both({"label": first}, {"label": second}, schema, "label")
        assert sorted(found(joined)) == same
    stream = scan.dataset(table, table.pin(), ["line"], {"label": "b|a"})
    assert sorted(row["line"] for row in stream.take_all()) == same


def test_a_missing_column_is_named_with_the_nearest(table: ImageTable) -> None:
    with pytest.raises(
        DataError, match=r"no column 'lable'\. Did you mean 'label'\?.*table\.columns"
    ):
        scan.rows(table, table.pin(), ["lable"])
    with pytest.raises(DataError, match=r"no column 'spilt'\. Did you mean 'split'"):
        scan.dataset(table, table.pin(), ["label"], {"spilt": "train"})
    mapped = ImageTable(table.uri, Columns(label="split"))
    assert len(scan.rows(mapped, mapped.pin(), [mapped.columns.label])) == 400


def test_an_old_version_whose_files_were_vacuumed_is_refused(table: ImageTable) -> None:
    drop(table, table.pin(), ["0003"], "clean")
    DeltaTable(table.uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert len(ids(table)) == 399
    with pytest.raises(
        DataError,
        match=r"lacks a file that its log names.*VACUUM.*Bring it back.*newer version",
    ):
        ids(table, table.pin(1))


def test_an_empty_table_has_no_rows_and_still_its_types(tmp_path: Path) -> None:
    append(str(tmp_path / "t"), cells(0, 0), "make")
    table = ImageTable(str(tmp_path / "t"))
    found = scan.rows(table, table.pin(), ["image_id", "image"])
    assert (len(found), found.schema.types) == (0, [pa.string(), pa.binary()])


@pytest.mark.usefixtures("ray_session")
def test_ray_reads_the_same_rows(table: ImageTable) -> None:
    drop(table, table.pin(), ["0003", "0350"], "clean")
    append(table.uri, cells(400, 450), "later")
    for where in ({}, {"label": "a", "split": ["train", "test"]}, {"label": "nobody"}):
        stream = scan.dataset(table, table.pin(3), COLUMNS, where)
        assert sorted(stream.take_all(), key=lambda r: r["image_id"]) == as_rows(
            scan.rows(table, table.pin(3), COLUMNS, where)
        )


@pytest.mark.usefixtures("ray_session")
def test_ray_reads_partitioned_and_empty_tables_too(tmp_path: Path) -> None:
    rows = cells(0, 12)
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["label"])
    append(str(tmp_path / "none"), cells(0, 0), "make")
    table, none = ImageTable(str(tmp_path / "t")), ImageTable(str(tmp_path / "none"))
    assert (
        sorted(scan.dataset(table, table.pin(), COLUMNS).take_all(), key=lambda r: r["image_id"])
        == rows.to_pylist()
    )
    assert scan.dataset(none, none.pin(), COLUMNS).take_all() == []


MANY: dict[str, tuple[Any, list[Any], dict[str, list[int]]]] = {
    "int": (
        pa.int64(),
        [1, 10, None],
        {"1": [0], "01": [0], "1.0": [0], "+1": [0], " 1": [0], "1e1": [1]},
    ),
    "float": (
        pa.float64(),
        [1.0, 0.1, None],
        {"1": [0], "1.0": [0], "1e0": [0], ".1": [1], "0.10": [1]},
    ),
    "narrow": (pa.float32(), [1.5, 0.1, None], {"0.1": [1], "1.50": [0]}),
    "decimal": (pa.decimal128(6, 2), [Decimal("1.50"), None], {"1.5": [0], "01.500": [0]}),
    "truth": (pa.bool_(), [True, False, None], {"true": [0], "True": [0], "1": [0], "FALSE": [1]}),
    "day": (
        pa.date32(),
        [date(2026, 11, 1), None],
        {"2026-11-01": [0], "2026-11-01T00:00:00Z": [0]},
    ),
    "time": (
        pa.timestamp("us", "UTC"),
        [
            datetime(2026, 11, 1, tzinfo=timezone.utc),
            datetime(2026, 11, 1, 12, 30, tzinfo=timezone.utc),
        ],
        {
            "2026-11-01": [0],
            "2026-11-01T13:30:00+01:00": [1],
            "2026-11-01 12:30": [1],
            "2026-11-01 12:30:00.000000Z": [1],
        },
    ),
    "text": (pa.string(), ["01", "1.0", " 1", None], {"01": [0], "1.0": [1], " 1": [2], "1": []}),
    "tags": (
        pa.list_(pa.string()),
        [["b", "a"], [], None, ["a"]],
        {"a|b": [0], "b | a": [0], "": [1], "a": [3]},
    ),
    "digits": (pa.float64(), [1e15, 2.0], {"1e15": [0], "1000000000000000": [0], "2": [1]}),
    "numbers": (pa.list_(pa.int64()), [[1, 2], [3]], {"1|2": [0], "3": [1]}),
}


@pytest.mark.parametrize("partitioned", [False, True], ids=["", "partitioned"])
@pytest.mark.parametrize("kind", MANY)
def test_a_condition_means_what_the_column_reads_it_as(
    kind: str, partitioned: bool, tmp_path: Path
) -> None:
    held, values, wanted = MANY[kind]
    if partitioned and kind in ("tags", "numbers", "narrow"):
        pytest.skip("no partition column has this type, or deltalake writes other digits")
    rows = pa.table({"x": pa.array(values, held), "n": list(range(len(values)))})
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["x"] if partitioned else None)
    table = ImageTable(str(tmp_path / "t"))
    # Labels are read as text: the condition means the same, but for a text that names a class.
    as_label = ImageTable(table.uri, Columns(label="x"))
    by_class = {"1": [1], " 1": [1, 2]} if kind == "text" else {}
    for text, expected in wanted.items():
        for opened, rows_n in ((table, expected), (as_label, by_class.get(text, expected))):
            found = scan.rows(opened, opened.pin(), ["n"], {"x": text})["n"].to_pylist()
            assert sorted(found) == rows_n, text


@pytest.mark.parametrize(
    ("held", "value", "text", "says"),
    [
        (
            pa.int64(),
            1,
            "abc",
            r"No value of column 'x' can be this \(got 'abc'\)\. Its type is int64",
        ),
        (pa.int64(), 1, "1.5", r"can be this \(got '1.5'\)"),
        (pa.int64(), 1, "nan", r"can be this \(got 'nan'\)"),
        (pa.int64(), 1, "1e999999999", r"can be this"),
        (pa.int64(), 1, "inf", r"can be this"),
        (pa.int8(), 1, "300", r"can be this \(got '300'\)"),
        (pa.decimal128(6, 2), Decimal(1), "1.005", r"can be this"),
        (pa.bool_(), True, "yes", r"can be this"),
        (pa.date32(), date(2026, 1, 1), "2026-01-01T12:00", r"can be this"),
        (
            pa.timestamp("us", "UTC"),
            datetime(2026, 1, 1, tzinfo=timezone.utc),
            "January",
            r"can be this",
        ),
        (
            pa.struct([("a", pa.int64())]),
            {"a": 1},
            "1",
            r"Column 'x' cannot be compared with a text .*struct",
        ),
        (pa.map_(pa.string(), pa.int64()), [("a", 1)], "a", r"cannot be compared with a text"),
        (pa.list_(pa.list_(pa.int64())), [[1]], "1", r"cannot be compared with a text"),
        (pa.binary(), b"a", "a", r"cannot be compared with a text"),
    ],
)
def test_a_condition_that_no_row_can_meet_is_refused(
    held: pa.DataType,
    value: Any,
    text: str,
    says: str,
    tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    append(str(tmp_path / "t"), pa.table({"x": pa.array([value], held), "n": [0]}), "add")
    table = ImageTable(str(tmp_path / "t"))
    with pytest.raises(DataError, match=says):
        scan.rows(table, table.pin(), ["n"], {"x": text})
    code, _, err = cli("table", "export", table.uri, tmp_path / "o.parquet", "--where", f"x={text}")
    assert (code, "Traceback" in err, (tmp_path / "o.parquet").exists()) == (2, False, False)


def test_a_class_is_found_in_both_forms_of_its_accents_and_tags_in_any_order(
    tmp_path: Path,
) -> None:
    nfc, nfd = "K\u00fcche", "Ku\u0308che"
    for text in (nfc, nfd, "dent|scratch"):
        write_deltalake(str(tmp_path), pa.table({"label": [text]}), mode="append")
    table = ImageTable(str(tmp_path))

    def count(label: str) -> int:
        return len(scan.rows(table, table.pin(), ["label"], {"label": label}))

    assert (count(nfc), count(nfd), count("scratch|dent")) == (2, 2, 1)


def test_a_decimal_of_many_digits_is_found(tmp_path: Path) -> None:
    number = "12345678901234567890123456789012"
    rows = pa.table({"n": pa.array([Decimal(number)], pa.decimal128(38, 0))})
    write_deltalake(str(tmp_path), rows)
    table = ImageTable(str(tmp_path))
    assert len(scan.rows(table, table.pin(), ["n"], {"n": number})) == 1
