"""Diff by id, lineage through tables, compaction that changes no row, vacuum that keeps tags."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.errors import DataError
from raypipe.tables import scan, versions
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import Columns, ImageTable, TableConfig, append
from tests.tables import handmade as by_hand
from tests.tables.handmade import drop

Cli = Callable[..., tuple[int, str, str]]
COLUMNS = ["image_id", "label", "split", "image"]


def rows(*images: tuple[str, str | None, str]) -> pa.Table:
    ids, labels, splits = (list(v) for v in zip(*images, strict=True))
    image = pa.array([i.encode() * 500 for i in ids], pa.binary())
    return pa.table(
        {"image_id": ids, "label": pa.array(labels, pa.string()), "split": splits, "image": image}
    )


def many(start: int, stop: int) -> pa.Table:
    return rows(*((f"{i:04d}", "ab"[i % 2], "train") for i in range(start, stop)))


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Versions 0 to 5 add 50 rows each."""
    for i in range(6):
        append(str(tmp_path / "t"), many(50 * i, 50 * i + 50), f"add {i}")
    return ImageTable(str(tmp_path / "t"))


def content(table: ImageTable, version: int | str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        scan.rows(table, table.pin(version), COLUMNS).sort_by("image_id").to_pylist()
    )
    return found


def test_a_diff_names_what_came_went_and_changed(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(
        uri,
        rows(("a", "x", "train"), ("b", "x", "train"), ("c", "y", "test"), ("d", None, "test")),
        "add",
    )
    after = rows(
        ("a", "x", "train"),
        ("b", "y", "train"),
        ("c", "y", "train"),
        ("d", "z", "test"),
        ("e", "z", "val"),
    )
    write_deltalake(uri, after.slice(0, 5), mode="overwrite")
    DeltaTable(uri).delete("image_id = 'a'")
    table = ImageTable(uri)
    found = versions.diff(table, table.pin(0), table.pin())
    assert (found.added, found.removed) == (["e"], ["a"])
    assert found.relabelled == [("b", "x", "y"), ("d", None, "z")]
    assert found.moved == [("c", "test", "train")]
    assert found.classes == {"x": (2, 0), "y": (1, 2), "z": (0, 2), "–": (1, 0)}
    assert found.splits == {"test": (2, 1), "train": (2, 2), "val": (0, 1)}


def test_a_diff_backwards_is_the_diff_turned_round(table: ImageTable) -> None:
    there, back = (versions.diff(table, table.pin(a), table.pin(b)) for a, b in ((1, 4), (4, 1)))
    assert (there.added, there.removed) == (back.removed, back.added)
    assert len(there.added) == 150
    same = versions.diff(table, table.pin(3), table.pin(3))
    assert not (same.added or same.removed or same.relabelled or same.moved)


def test_a_table_without_labels_still_has_a_diff_and_one_with_an_id_twice_has_none(
    tmp_path: Path,
) -> None:
    for ids in (["a", "b"], ["c"]):
        append(str(tmp_path / "t"), pa.table({"image_id": ids}), "add")
    table = ImageTable(str(tmp_path / "t"))
    found = versions.diff(table, table.pin(0), table.pin(1))
    assert (found.added, found.relabelled, found.classes) == (["c"], [], {"–": (2, 3)})
    append(str(tmp_path / "t"), pa.table({"image_id": ["a"]}), "again")
    with pytest.raises(DataError, match=r"@v2 has an id twice \(got 'a'\).*compared by id"):
        versions.diff(table, table.pin(0), table.pin(2))


def test_lineage_leads_from_a_cleaned_version_back_to_the_table_it_was_made_from(
    table: ImageTable, tmp_path: Path
) -> None:
    small = str(tmp_path / "small")
    for start in (0, 50):  # as ingest from Delta commits it, in batches
        why = commit_properties("ingest small", f"{table.uri}@v3")
        write_deltalake(small, many(start, start + 50), mode="append", commit_properties=why)
    derived = ImageTable(small)
    derived.tag("raw", 1)
    cleaned = drop(derived, derived.pin(), ["0001"], "clean it")
    steps = versions.lineage(derived, cleaned)
    assert [(s.uri, s.first, s.last, s.why, s.source) for s in steps] == [
        (small, 3, 3, "clean it", f"{small}@v2"),
        (small, 0, 1, "ingest small", f"{table.uri}@v3"),
        *[(table.uri, i, i, f"add {i}", "") for i in (3, 2, 1, 0)],
    ]
    assert versions.lineage(derived, derived.pin(0))[0].why == "ingest small"


def test_lineage_of_a_source_that_is_gone_still_names_it(tmp_path: Path) -> None:
    why = commit_properties("ingest", "/not/here@v7")
    write_deltalake(str(tmp_path / "t"), many(0, 2), commit_properties=why)
    table = ImageTable(str(tmp_path / "t"))
    assert [s.source for s in versions.lineage(table, table.pin())] == ["/not/here@v7"]


@pytest.mark.parametrize("by", [[], ["label"]], ids=["compact", "z-order"])
def test_optimizing_changes_files_and_no_row_and_old_versions_stay(
    by: list[str], table: ImageTable
) -> None:
    table.tag("raw", 2)
    before, raw = content(table), content(table, "raw")
    done = versions.optimize(table, by)
    assert (done["files_before"], done["files_after"]) == (6, 1)
    assert (content(table), content(table, "raw"), table.tags()) == (before, raw, {"raw": 2})
    (path,) = (u.removeprefix("file://") for u in DeltaTable(table.uri).file_uris())
    footer = pq.ParquetFile(path).metadata
    assert [footer.row_group(g).num_rows for g in range(footer.num_row_groups)] == [128, 128, 44]
    image = footer.row_group(0).column(3)
    assert (image.compression, image.is_stats_set, image.has_dictionary_page) == (
        "UNCOMPRESSED",
        False,
        False,
    )


def test_an_image_column_of_another_name_is_written_plain_too(tmp_path: Path) -> None:
    for i in range(2):
        write_deltalake(
            str(tmp_path / "t"),
            many(i, i + 1).rename_columns([*COLUMNS[:3], "photo"]),
            mode="append",
        )
    table = ImageTable.open(TableConfig(uri=str(tmp_path / "t"), columns=Columns(image="photo")))
    versions.optimize(table)
    (path,) = (u.removeprefix("file://") for u in DeltaTable(table.uri).file_uris())
    image = pq.ParquetFile(path).metadata.row_group(0).column(3)
    assert (image.compression, image.is_stats_set, image.has_dictionary_page) == (
        "UNCOMPRESSED",
        False,
        False,
    )


def test_optimizing_leaves_deleted_rows_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    content = pa.table({"x": pa.array(range(100), pa.int64())})
    adds = [
        by_hand.add(folder, content, f"{n}.parquet", dv=by_hand.on_disk(folder, [1, 2]))
        for n in "ab"
    ]
    by_hand.commit(
        folder, by_hand.protocol("deletionVectors"), by_hand.metadata([by_hand.column("x")]), *adds
    )
    table = ImageTable(str(folder))
    versions.optimize(table)
    assert sorted(scan.rows(table, table.pin(), ["x"])["x"].to_pylist()) == sorted(
        [0, *range(3, 100)] * 2
    )


def test_what_deltalake_cannot_write_right_is_refused(tmp_path: Path) -> None:
    fields = [by_hand.column("x", "long", 1, "col-1")]
    content = pa.table({"col-1": pa.array(range(3), pa.int64())})
    names = by_hand.metadata(
        fields, **{"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    )
    adds = [by_hand.add(tmp_path, content, f"{n}.parquet") for n in "ab"]
    by_hand.commit(tmp_path, by_hand.protocol("columnMapping"), names, *adds)
    with pytest.raises(DataError, match=r"cannot be optimized: Column mapping is not supported"):
        versions.optimize(ImageTable(str(tmp_path)))


def unprotected(table: ImageTable) -> None:
    """Without the week of grace that Delta gives old files."""
    DeltaTable(table.uri).alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 0 hours"}
    )


def test_vacuum_keeps_the_files_of_tagged_versions_and_says_for_which_tag(
    table: ImageTable,
) -> None:
    unprotected(table)
    for name, version in (("raw", 1), ("clean", 3)):
        table.tag(name, version)
    versions.optimize(table)
    tagged, newest = {n: content(table, n) for n in ("raw", "clean")}, content(table)
    planned = versions.vacuum(table)
    assert (len(planned.files), planned.kept, planned.deleted) == (2, {"raw": 2, "clean": 4}, False)
    assert content(table, 5) == newest  # nothing is gone yet
    done = versions.vacuum(table, delete=True)
    assert (done.files, done.deleted) == (planned.files, True)
    assert {n: content(table, n) for n in tagged} == tagged
    assert (content(table), table.tags()) == (newest, {"raw": 1, "clean": 3})
    with pytest.raises(DataError, match=r"lacks a file that its log names"):
        content(table, 5)


def test_vacuum_leaves_young_files_and_the_rule_of_the_table(table: ImageTable) -> None:
    versions.optimize(table)
    assert versions.vacuum(table, delete=True).files == []
    with pytest.raises(DataError, match=r"cannot be vacuumed.*retention"):
        versions.vacuum(table, keep_hours=0, delete=True)
    assert len(content(table, 5)) == 300


def test_vacuum_never_takes_a_live_deletion_vector(tmp_path: Path) -> None:
    """A full vacuum of deltalake 1.6 would: it does not count them among the files of the table."""
    folder = tmp_path / "t"
    folder.mkdir()
    added = by_hand.add(
        folder,
        pa.table({"x": pa.array(range(10), pa.int64())}),
        "a.parquet",
        dv=by_hand.on_disk(folder, [1]),
    )
    by_hand.commit(
        folder, by_hand.protocol("deletionVectors"), by_hand.metadata([by_hand.column("x")]), added
    )
    table = ImageTable(str(folder))
    live = list(folder.glob("deletion_vector_*.bin"))
    would = DeltaTable(str(folder)).vacuum(
        retention_hours=0, enforce_retention_duration=False, full=True
    )
    assert would == [live[0].name], "the danger is gone: full vacuum may be used again"
    unprotected(table)
    assert versions.vacuum(table, delete=True).files == []
    assert live[0].exists()
    assert len(scan.rows(table, table.pin(), ["x"])) == 9


def test_dropping_goes_on_after_a_compaction(table: ImageTable) -> None:
    """Optimizing and vacuuming change no row: what was pinned before them may still be cleaned."""
    pinned = table.pin()
    versions.optimize(table)
    assert len(content(table, drop(table, pinned, ["0007"], "clean").version)) == 299


def test_the_commands_take_a_table_or_a_configuration(
    table: ImageTable, tmp_path: Path, cli: Cli
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"table: {{uri: {table.uri}}}\n", encoding="utf-8")

    def said(*arguments: object) -> dict[str, Any]:
        code, out, err = cli("table", *arguments, "--json")
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]

    for target in (table.uri, config):
        assert said("tag", target, f"t{Path(str(target)).suffix}", "--version", 2)["tags"]
        assert [v["version"] for v in said("history", target)["versions"]][-6:] == [
            5,
            4,
            3,
            2,
            1,
            0,
        ]
        assert said("list", target)["versions"][0]["who"]
        assert len(said("diff", target, "2", "4")["added"]) == 100
        assert said("lineage", target, "--version", "t")["steps"][0]["why"] == "add 2"
        assert said("vacuum", target)["deleted"] is False
    # A setting is no second version.
    newest = said("diff", table.uri, "2")
    assert said("diff", config, "2", f"table.uri={table.uri}") == newest and newest["added"]
    assert said("optimize", table.uri, "--by", "label")["files_after"] == 1
    assert said("export", config, tmp_path / "o.parquet", "--tag", "t")["rows"] == 150
    code, _, err = cli("table", "diff", table.uri, "nobody")
    assert (code, "has no tag 'nobody'" in err) == (2, True)
    code, _, err = cli("table", "history", table.uri, "table.version=1")
    assert (code, "Overrides need a configuration" in err) == (2, True)


def test_a_name_of_unity_catalog_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "DATABRICKS_HOST",
        "DATABRICKS_TOKEN",
        "DATABRICKS_WORKSPACE_URL",
        "UNITY_CATALOG_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("main.vision.photos", "unity://main.vision.photos"):
        code, _, err = cli("table", "export", name, "o.parquet")
        assert code == 2
        assert "'main.vision.photos'" in err and "DATABRICKS_HOST" in err and "Traceback" not in err
    (tmp_path / "main.vision.photos").mkdir()  # a folder of that name is meant first
    assert "No Delta table here" in cli("table", "export", "main.vision.photos", "o.parquet")[2]


def test_a_tag_on_a_version_that_is_gone_has_a_way_out(table: ImageTable) -> None:
    table.tag("old", 0)
    table.delta().create_checkpoint()
    Path(table.uri, "_delta_log", f"{0:020d}.json").unlink()
    for work in (lambda: table.pin("old"), lambda: versions.vacuum(table)):
        with pytest.raises(
            DataError, match=r"has no version 0 any more.*log was cleaned up.*--remove"
        ):
            work()
    assert [h["version"] for h in table.history()][-1] == 1
    table.untag("old")
    assert versions.vacuum(table).kept == {}


def test_rows_without_an_id_are_not_compared(tmp_path: Path) -> None:
    append(str(tmp_path / "t"), pa.table({"image_id": ["a", None]}), "add")
    table = ImageTable(str(tmp_path / "t"))
    with pytest.raises(DataError, match=r"@v0 has a row without an id.*compared by id"):
        versions.diff(table, table.pin(), table.pin())


def test_a_table_inside_is_not_vacuumed_away(table: ImageTable) -> None:
    unprotected(table)
    write_deltalake(f"{table.uri}/predictions", pa.table({"n": [1]}))
    for delete in (False, True):
        with pytest.raises(DataError, match="Another table lies inside"):
            versions.vacuum(table, delete=delete)
    assert len(DeltaTable(f"{table.uri}/predictions").to_pyarrow_table()) == 1


def test_a_table_inside_is_seen_before_its_log_is_old(table: ImageTable) -> None:
    """In the first week only the files of an inner table that were old would have gone."""
    inner = Path(table.uri, "predictions")
    write_deltalake(str(inner), pa.table({"n": [1]}))
    (file,) = inner.glob("*.parquet")
    old = file.stat().st_mtime - 30 * 24 * 3600
    os.utime(file, (old, old))
    for delete in (False, True):
        with pytest.raises(DataError, match="Another table lies inside"):
            versions.vacuum(table, delete=delete)
    assert file.exists()


@pytest.mark.parametrize("odd", ["\x85", "\u2028", "\u2029"])
def test_a_log_with_another_kind_of_line_end_in_a_text_is_read(odd: str, tmp_path: Path) -> None:
    """Statistics of a column of texts made a version unreadable."""
    write_deltalake(str(tmp_path), pa.table({"n": [1], "note": [f"a{odd}b"]}))
    assert [entry["version"] for entry in ImageTable(str(tmp_path)).history()] == [0]
