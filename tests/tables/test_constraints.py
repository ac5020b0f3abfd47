"""What a table demands of its rows holds for every commit of raypipe, or ends in one message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.errors import DataError, FullDisk
from raypipe.tables import rewrite, scan, versions
from raypipe.tables.changes import Change
from raypipe.tables.commits import append_once
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import SCHEMA
from raypipe.tables.table import ImageTable, append
from tests.tables import handmade as by_hand

FIELDS = [("image_id", pa.string()), ("Label", pa.string()), ("n", pa.int64())]


def made(
    folder: Path, nullable: bool = True, check: str = "", labels: Any = ("a", "b"), **conf: str
) -> ImageTable:
    """Two files of three rows, labels a; `check` is a constraint."""
    schema = pa.schema([pa.field(*field) for field in [*FIELDS, ("image", pa.binary())]])
    schema = schema.set(1, pa.field("Label", pa.string(), nullable))
    for start in (0, 3):
        n = range(start, start + 3)
        columns = [[str(i) for i in n], ["a"] * 3, list(n), [b"x"] * 3]
        rows = pa.table(columns, schema=schema)
        write_deltalake(str(folder), rows, mode="append", configuration=conf or None)
    if check:
        DeltaTable(str(folder)).alter.add_constraint({"known": check})
    return ImageTable(str(folder))


def relabel(table: ImageTable, value: str | None, row: int = 1) -> int:
    place = rewrite.places(table, table.pin(), ["image_id"]).to_pylist()[row]
    change = Change(values={"Label": {place["place"]: value}})
    return rewrite.commit(table, table.delta(), {place["file"]: change}, commit_properties("mend"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("whole", [False, True], ids=["swapped", "whole"])
@pytest.mark.parametrize(
    ("settings", "value", "says"),
    [
        ({"check": "Label in ('a', 'b')"}, "z", r"break constraint 'known' .*got '1 rows'.*Label"),
        ({"check": "Label in ('a', 'b')"}, None, r"break constraint 'known'"),
        ({"check": "n < 9 and Label <> 'long'"}, "long", r"break constraint 'known'"),
        ({"nullable": False}, None, r"Column 'Label' of .* may not be null .*NOT NULL"),
        ({"delta.appendOnly": "true"}, "b", r"may not be changed or dropped .*appendOnly"),
    ],
)
def test_a_new_label_that_the_table_forbids_is_refused_before_anything_is_written(
    settings: dict[str, Any],
    value: str | None,
    says: str,
    whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On fe2916f the forbidden label was committed."""
    if whole:
        monkeypatch.setattr(rewrite, "_files_can_be_swapped", lambda *parts: False)
    table = made(tmp_path / "t", **settings)
    before = files(tmp_path / "t")
    with pytest.raises(DataError, match=says):
        relabel(table, value)
    assert files(tmp_path / "t") == before


@pytest.mark.parametrize("whole", [False, True], ids=["swapped", "whole"])
def test_what_is_allowed_is_written_and_the_constraints_stay(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        monkeypatch.setattr(rewrite, "_files_can_be_swapped", lambda *parts: False)
    table = made(tmp_path / "t", nullable=False, check="Label in ('a', 'b')")
    before = table.delta()
    relabel(table, "b")
    by_hand.drop(table, table.pin(), ["5"], "clean")
    versions.optimize(table)
    versions.optimize(table, ["Label"])
    after = table.delta()
    labels = scan.rows(table, table.pin(), ["Label"])["Label"].to_pylist()
    assert sorted(labels) == ["a", "a", "a", "a", "b"]
    assert after.metadata().configuration == before.metadata().configuration
    assert after.schema() == before.schema()
    # The engine still checks: the constraint is more than a text.
    with pytest.raises(DataError, match=r"break constraint 'known'"):
        relabel(table, "z")


def test_a_constraint_on_other_columns_stops_no_label(tmp_path: Path) -> None:
    """Nor does a row that broke it before: it is not what changes."""
    table = made(tmp_path / "t", check="n >= 0 and n < 9")
    assert relabel(table, "anything") == 3


def test_rows_that_are_dropped_break_nothing(tmp_path: Path) -> None:
    table = made(tmp_path / "t", nullable=False, check="Label = 'a'")
    by_hand.drop(table, table.pin(), ["0", "4"], "clean")
    assert len(scan.rows(table, table.pin(), ["image_id"])) == 4


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("spark_only(Label) > 1", r"'odd' .*cannot be checked: .*spark_only"),
        ("length(Label) = 1", ""),
    ],
)
def test_a_constraint_of_another_engine_is_understood_or_stops_the_change(
    expression: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    fields = [by_hand.column("image_id", "string"), by_hand.column("Label", "string")]
    content = pa.table({"image_id": ["1", "2"], "Label": ["a", "b"]})
    by_hand.commit(
        tmp_path / "t",
        by_hand.protocol(reader=1, writer=3),
        by_hand.metadata(fields, **{"delta.constraints.odd": expression}),
        by_hand.add(tmp_path / "t", content, "a.parquet"),
    )
    with pytest.raises(DataError, match=says or r"break constraint 'odd' .*length\(Label\) = 1"):
        relabel(ImageTable(str(tmp_path / "t")), "long")
    if not says:
        assert relabel(ImageTable(str(tmp_path / "t")), "c") == 1


def test_a_generated_column_cannot_be_left_behind(tmp_path: Path) -> None:
    fields = [by_hand.column("image_id", "string"), by_hand.column("Label", "string")]
    made_of = by_hand.column("big", "string")
    made_of["metadata"] = {"delta.generationExpression": "upper(Label)"}
    content = pa.table({"image_id": ["1", "2"], "Label": ["a", "b"], "big": ["A", "B"]})
    (tmp_path / "t").mkdir()
    by_hand.commit(
        tmp_path / "t",
        by_hand.protocol(reader=1, writer=4),
        by_hand.metadata([*fields, made_of]),
        by_hand.add(tmp_path / "t", content, "a.parquet"),
    )
    with pytest.raises(DataError, match=r"break constraint 'big' .*upper\(Label\)"):
        relabel(ImageTable(str(tmp_path / "t")), "c")


def row(**values: Any) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [None] for name in SCHEMA.names}
    columns |= {"image_id": ["i"], "label": ["z"], "split": ["train"], "image": [b"x"]}
    return pa.table(columns | {name: [value] for name, value in values.items()}, SCHEMA)


def add(folder: Path) -> DeltaTable:
    base = DeltaTable(str(folder))
    return append_once(str(folder), row(), base, commit_properties("ingest"))


@pytest.mark.parametrize("lacks", ["", "sha256"])
def test_a_row_that_breaks_a_constraint_ends_in_one_message(lacks: str, tmp_path: Path) -> None:
    """It was an error without a class; its preview of the row showed the whole image."""
    first = row(label="a")
    append(str(tmp_path / "t"), first.drop_columns([lacks] if lacks else []), "add")
    DeltaTable(str(tmp_path / "t")).alter.add_constraint({"known": "label in ('a', 'b')"})
    with pytest.raises(DataError, match=r"New rows break a constraint of .*known: label") as e:
        add(tmp_path / "t")
    assert "Preview" not in str(e.value) and "+--" not in str(e.value)
    assert DeltaTable(str(tmp_path / "t")).version() == 1


def test_a_column_that_must_have_a_value_and_gets_none_is_named(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("site", pa.string(), nullable=False))
    write_deltalake(str(tmp_path / "t"), row().append_column(schema.field("site"), [["a"]]))
    with pytest.raises(DataError, match=r"break a constraint of .*site is NOT NULL"):
        add(tmp_path / "t")


def test_a_column_of_the_tables_own_is_null_in_new_rows(tmp_path: Path) -> None:
    """It was a traceback: the number of fields does not match."""
    append(str(tmp_path / "t"), row().append_column("site", [["north"]]), "add")
    add(tmp_path / "t")
    table = ImageTable(str(tmp_path / "t"))
    assert scan.rows(table, table.pin(), ["site"])["site"].to_pylist() == ["north", None]


@pytest.mark.parametrize(
    ("name", "held", "value"),
    [("label", pa.int64(), 1), ("width", pa.string(), "3"), ("bytes", pa.int32(), 3)],
)
def test_another_type_is_named_and_nothing_is_cast(
    name: str, held: pa.DataType, value: Any, tmp_path: Path
) -> None:
    at = SCHEMA.get_field_index(name)
    append(str(tmp_path / "t"), row().set_column(at, name, pa.array([value], held)), "add")
    with pytest.raises(DataError, match=rf"Column '{name}' of .* has another type"):
        add(tmp_path / "t")
    assert DeltaTable(str(tmp_path / "t")).version() == 0


def test_a_full_disk_ends_in_one_message(small_disk: Path) -> None:
    uri = str(small_disk / "t")
    append(uri, row(), "add")
    large = row(image=os.urandom(3 * 2**20))
    says = r"The table cannot be written: .*No space left.*The disk is full\. Make room"
    with pytest.raises(FullDisk, match=says) as raised:
        append_once(uri, large, DeltaTable(uri), commit_properties("ingest"))
    assert raised.value.exit_code == 1
    assert DeltaTable(uri).version() == 0


def test_a_rewrite_on_a_full_disk_ends_in_one_message_and_leaves_no_file(small_disk: Path) -> None:
    uri = str(small_disk / "t")
    for number in range(2):
        append(uri, row(image_id=str(number), image=os.urandom(300_000)), "add")
    (small_disk / "filler").write_bytes(b"x" * 350_000)
    table, before = ImageTable(uri), files(small_disk)
    place = rewrite.places(table, table.pin(), ["image_id"]).to_pylist()[0]
    change = {place["file"]: Change(values={"label": {place["place"]: "b"}})}
    # Not "cannot be read": nothing is wrong with the file that was copied.
    says = r"^Rows of the table cannot be changed: .*No space left.* Make room"
    with pytest.raises(FullDisk, match=says):
        rewrite.commit(table, table.delta(), change, commit_properties("mend"))
    assert files(small_disk) == before


def test_other_ways_to_keep_texts_and_bytes_are_no_other_type(tmp_path: Path) -> None:
    append(str(tmp_path / "t"), row(), "add")
    large = row(image_id="j")
    for name, kind in (("label", pa.large_string()), ("image", pa.large_binary())):
        at = large.schema.get_field_index(name)
        large = large.set_column(at, name, large[name].cast(kind))
    base = DeltaTable(str(tmp_path / "t"))
    assert append_once(base.table_uri, large, base, commit_properties("ingest")).version() == 1


def test_a_plain_append_of_other_columns_ends_in_one_message(tmp_path: Path) -> None:
    append(str(tmp_path / "t"), pa.table({"a": [1]}), "add")
    with pytest.raises(DataError, match=r"The table cannot be written: "):
        append(str(tmp_path / "t"), pa.table({"b": [1]}), "add")
