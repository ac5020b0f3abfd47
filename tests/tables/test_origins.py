"""What a version's package says of its table: which rows, how cleaned; and tables of evidence."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.errors import DataError
from raypipe.tables import appended, cleaned, identity, rewrite, verdicts
from raypipe.tables.changes import Place
from raypipe.tables.table import ImageTable
from raypipe.tables.verdicts import Seen


def test_the_hash_is_what_anybody_can_compute() -> None:
    ids = ["b", "ä", "a\nb", 'a","b', "", "b"]
    said = identity.of_ids(ids)
    text = json.dumps(sorted(ids), separators=(",", ":"))
    assert said.ids_sha256 == hashlib.sha256(text.encode()).hexdigest() and said.rows == 6


def test_other_rows_have_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [["a", "b"], ["a", "b", "b"], ["ab"], ["a,b"], ["a\nb"], ["", "a"], [None, "a"], []]
    hashes = {identity.of_ids(ids).ids_sha256 for ids in texts}
    assert len(hashes) == len(texts)
    many = [f"i{n}" for n in range(1000)]
    whole = identity.of_ids(many)
    # Neither their order nor how many are read at a time counts.
    monkeypatch.setattr(identity, "AT_ONCE", 7)
    chunked = pa.chunked_array([many[500:], many[:500]])
    assert identity.of_ids(chunked) == whole == identity.of_ids(reversed(many))


def test_only_labelled_rows_count(tmp_path: Path) -> None:
    rows = {"image_id": ["a", "b", "c"], "label": ["x", None, " "], "image": [b"1", b"2", b"3"]}
    write_deltalake(str(tmp_path), pa.table(rows))
    table = ImageTable(str(tmp_path))
    found = identity.labelled(table, table.pin(), {}, "single_label")
    assert found == identity.of_ids(["a"])


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    ids = [f"i{n}" for n in range(6)]
    rows = {"image_id": ids, "label": ["x"] * 6, "image": [b"1"] * 6}
    write_deltalake(str(tmp_path / "t"), pa.table(rows))
    return ImageTable(str(tmp_path / "t"))


def judge(table: ImageTable, dropped: int, policy: str = "p") -> list[Place]:
    """Verdicts on the newest version, of which so many drop a row."""
    raw = table.pin()
    file = next(iter(table.snapshot(raw).paths(table.uri)))
    rows = []
    for n in range(dropped + 1):
        rows.append(verdicts.row(Seen(f"i{n}", file, n, "h"), "dark", dropped=n < dropped))
    verdicts.write(table.uri, raw, policy, "r", rows, 6, None)
    return [Place(file, n) for n in range(dropped)]


def test_a_version_that_nobody_judged_is_not_cleaned(table: ImageTable) -> None:
    was = cleaned.of(table, table.pin())
    assert was.state == "not cleaned"
    # Whoever judges it later does not change what it was.
    pinned = table.pin()
    judge(table, 2)
    assert cleaned.of(table, pinned, was) == was
    assert cleaned.of(table, pinned).state == "judged"


def test_a_cleaned_version_says_what_was_dropped(table: ImageTable) -> None:
    raw = table.pin()
    places = judge(table, 2)
    clean = rewrite.drop(table, raw, places, f"clean p of v{raw.version}")
    table.tag("clean", clean.version)
    for pinned in (table.pin(clean.version), table.pin()):  # the tag is a commit of its own
        said = cleaned.of(table, pinned)
        assert (said.state, said.images, said.dropped, said.policy) == ("cleaned", 6, 2, "p")
        assert said.verdicts == {"dark": 3} and said.judged == str(raw)
    assert "2 were dropped" in said.text()
    # The raw version was judged, and holds what was to be dropped.
    before = cleaned.of(table, raw)
    assert before.state == "judged" and "Not cleaned" in before.text()
    # A row that came later was seen by nobody.
    write_deltalake(table.uri, DeltaTable(table.uri).to_pyarrow_table().slice(0, 1), mode="append")
    assert cleaned.of(table, table.pin()).state == "not cleaned"


def test_a_version_with_nothing_to_drop_was_judged(table: ImageTable) -> None:
    judge(table, 0)
    was = cleaned.of(table, table.pin())
    assert was.state == "judged" and was.dropped == 0 and "nothing" in was.text()
    judge(table, 3, policy="another")
    assert cleaned.of(table, table.pin(), was) == was


def test_what_cannot_be_read_is_not_known(table: ImageTable) -> None:
    pinned = table.pin()
    for file in Path(table.uri, "_delta_log").iterdir():
        file.write_text("no json")
    said = cleaned.of(table, pinned)
    assert said.state == "unknown" and said.source


def _night(place: str, number: int, at: str) -> None:
    row = pa.table({"number": [number], "at": [at]})
    write_deltalake(place, row, mode="append")


def test_rows_come_in_the_order_of_commits(tmp_path: Path) -> None:
    place = str(tmp_path / "log")
    assert appended.read(place).rows == ()
    # The clock of the second night is a year behind.
    for number, at in enumerate(["2026-01-01", "2025-01-02", "2026-01-03"]):
        _night(place, number, at)
    # Neither what files say of their age.
    for age, file in enumerate(sorted(Path(place).glob("*.parquet"))):
        os.utime(file, (age, age))
    found = appended.read(place, clock="at")
    assert [row["number"] for row in found.rows] == [0, 1, 2] and found.altered == ""
    assert [row[appended.COMMIT] for row in found.rows] == [0, 1, 2]


def test_a_compaction_alters_nothing_and_a_deletion_does(tmp_path: Path) -> None:
    place = str(tmp_path / "log")
    for number in range(4):
        _night(place, number, f"2026-01-0{number + 1}")
    DeltaTable(place).optimize.compact()
    _night(place, 4, "2020-01-01")
    found = appended.read(place, clock="at")
    assert [row["number"] for row in found.rows] == [0, 1, 2, 3, 4] and found.altered == ""
    DeltaTable(place).delete("number = 2")
    assert "DELETE in commit 6" in appended.read(place).altered


def test_verdicts_on_a_table_that_is_gone_are_not_of_the_one_in_its_place(
    table: ImageTable,
) -> None:
    """The verdicts lie beside the table, and stayed: its images were not ingested again."""
    judge(table, 2)
    gone = str(DeltaTable(table.uri).metadata().id)
    assert verdicts.dropped_ids(table.uri, gone, None) == {"i0", "i1"}
    rows = DeltaTable(table.uri).to_pyarrow_table()
    shutil.rmtree(table.uri)
    write_deltalake(table.uri, rows)
    again = ImageTable(table.uri)
    new = str(DeltaTable(table.uri).metadata().id)
    assert cleaned.of(again, again.pin()).state == "not cleaned"
    assert verdicts.dropped_ids(table.uri, new, None) == set()
    judge(again, 1)
    assert cleaned.of(again, again.pin()).dropped == 1
    assert verdicts.dropped_ids(table.uri, new, None) == {"i0"}


def test_verdicts_of_an_older_raypipe_still_count(
    table: ImageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not say of which table they are."""
    index = verdicts.SCHEMA.get_field_index("table_id")
    with monkeypatch.context() as patched:
        patched.setattr(verdicts, "SCHEMA", verdicts.SCHEMA.remove(index))
        judge(table, 2, "old")
    assert cleaned.of(table, table.pin()).dropped == 2
    judge(table, 1, "new")
    own = str(DeltaTable(table.uri).metadata().id)
    assert verdicts.dropped_ids(table.uri, own, {"old"}) == {"i0", "i1"}


def test_a_table_that_was_moved_with_its_verdicts_is_cleaned_as_before(
    table: ImageTable, tmp_path: Path
) -> None:
    """ "Of 0 images 0 were dropped": verdicts were found by their table's address."""
    raw = table.pin()
    rewrite.drop(table, raw, judge(table, 2), f"clean p of v{raw.version}")
    Path(table.uri).rename(tmp_path / "t2")
    Path(verdicts.uri_of(table.uri)).rename(verdicts.uri_of(str(tmp_path / "t2")))
    moved = ImageTable(str(tmp_path / "t2"))
    said = cleaned.of(moved, moved.pin())
    assert (said.state, said.images, said.dropped) == ("cleaned", 6, 2)
    shutil.rmtree(verdicts.uri_of(moved.uri))
    assert "of 0 images" not in cleaned.of(moved, moved.pin()).text()


def test_rows_of_a_table_that_was_moved_before_they_were_dropped_are_not_passed_over(
    table: ImageTable, tmp_path: Path
) -> None:
    """None of them was found, so none was dropped, and the version was called clean."""
    places = judge(table, 2)
    Path(table.uri).rename(tmp_path / "t2")
    moved = ImageTable(str(tmp_path / "t2"))
    with pytest.raises(DataError, match="2 rows are of files"):
        rewrite.drop(moved, moved.pin(), places, "clean p of v0")
    assert moved.newest().version == 0
