"""Versions are pinned by number, tag or newest; tags are promises; dropping twice is dropping once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.table import Columns, ImageTable, TableConfig, append, resolve


def rows(*ids: str) -> pa.Table:
    return pa.table({"image_id": list(ids), "label": ["a"] * len(ids), "image": pa.array([b"x"] * len(ids), pa.binary())})


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Three versions: a and b, c, d."""
    uri = str(tmp_path / "cells")
    for ids in (("a", "b"), ("c",), ("d",)):
        append(uri, rows(*ids), f"add {' '.join(ids)}")
    return ImageTable.open(TableConfig(uri=uri))


def ids(table: ImageTable, version: int | str | None = None) -> list[str]:
    return sorted(scan.rows(table, table.pin(version), ["image_id"])["image_id"].to_pylist())


def test_a_version_is_pinned_by_number_by_tag_and_as_the_newest(table: ImageTable) -> None:
    table.tag("raw", 1)
    assert ids(table, 0) == ids(table, "0") == ["a", "b"]
    assert ids(table, "raw") == ["a", "b", "c"]
    assert ids(table) == ["a", "b", "c", "d"]
    assert str(table.pin("raw")) == f"{table.uri}@v1"


def test_a_pinned_version_stays_while_others_append(table: ImageTable) -> None:
    pinned = table.pin()
    append(table.uri, rows("e"), "later")
    assert len(scan.rows(table, pinned, ["image_id"])) == 4
    assert ids(table) == ["a", "b", "c", "d", "e"]


def test_versions_and_tags_that_are_not_there_are_named(table: ImageTable) -> None:
    with pytest.raises(DataError, match=r"has no version 99: .*raypipe table list"):
        table.pin(99)
    with pytest.raises(DataError, match=r"has no version -1: .*raypipe table list"):
        table.pin(-1)
    with pytest.raises(DataError, match=r"has no tag 'raw'. It has no tags yet"):
        table.pin("raw")
    table.tag("raw", 1)
    with pytest.raises(DataError, match=r"has no tag 'row'. Did you mean 'raw'"):
        table.pin("row")


def test_tags_survive_new_versions_checkpoints_and_a_copy_of_the_table(table: ImageTable, tmp_path: Path) -> None:
    table.tag("raw", 0)
    table.tag("golden", 2)
    append(table.uri, rows("e"), "later")
    delta = DeltaTable(table.uri)
    delta.create_checkpoint()
    delta.cleanup_metadata()
    assert table.tags() == {"raw": 0, "golden": 2}
    moved = Path(table.uri).rename(tmp_path / "moved")
    assert ImageTable(str(moved)).tags() == {"raw": 0, "golden": 2}


def test_naming_the_same_version_again_writes_nothing(table: ImageTable) -> None:
    table.tag("raw", 1)
    before = table.pin()
    assert table.tag("raw", 1).version == 1
    assert table.pin() == before


def test_a_tag_moves_only_when_asked_to(table: ImageTable) -> None:
    table.tag("raw", 0)
    with pytest.raises(DataError, match=r"Tag 'raw' already names v0 .*\(got 'v2'\).*--move"):
        table.tag("raw", 2)
    assert table.tags() == {"raw": 0}
    table.tag("raw", 2, move=True)
    assert table.tags() == {"raw": 2}


@pytest.mark.parametrize("name", ["12", ""])
def test_a_tag_that_could_not_be_told_from_a_number_is_refused(name: str, table: ImageTable) -> None:
    with pytest.raises(DataError, match=r"This cannot be a tag .*A number means a version"):
        table.tag(name, 1)


def test_dropping_leaves_the_pinned_version_and_makes_one_without_the_rows(table: ImageTable) -> None:
    pinned = table.pin()
    dropped = table.drop(pinned, ["b", "d"], "clean")
    assert ids(table, dropped.version) == ["a", "c"]
    assert ids(table, pinned.version) == ["a", "b", "c", "d"]


def test_dropping_again_gives_the_same_version_and_adds_none(table: ImageTable) -> None:
    pinned = table.pin()
    first = table.drop(pinned, ["b"], "clean x")
    table.tag("clean", first.version)
    newest = table.pin()
    assert table.drop(pinned, ["b"], "clean x") == first
    assert table.pin() == newest
    assert table.drop(newest, [], "nothing to drop") == newest


def test_dropping_is_refused_when_the_table_changed_since(table: ImageTable) -> None:
    pinned = table.pin()
    table.tag("raw", pinned.version)  # a tag is no change
    append(table.uri, rows("e"), "later")
    with pytest.raises(DataError, match=r"has changed since version 2 \(got 'WRITE in version 4'\).*Pin the newest"):
        table.drop(pinned, ["b"], "clean")
    assert ids(table) == ["a", "b", "c", "d", "e"]


def test_ids_with_quotes_drop_themselves_and_nothing_else(tmp_path: Path) -> None:
    uri = str(tmp_path / "odd")
    append(uri, rows("it's", "x' or 'a'='a", "plain"), "add")
    table = ImageTable.open(TableConfig(uri=uri))
    table.drop(table.pin(), ["it's", "x' or 'a'='a"], "clean")
    assert ids(table) == ["plain"]


def test_history_says_what_why_and_how_many_newest_first(table: ImageTable) -> None:
    table.drop(table.pin(), ["b"], "clean it")
    table.tag("clean", 3)
    history = table.history()
    assert [h["version"] for h in history] == [4, 3, 2, 1, 0]
    assert [h["why"] for h in history] == ["tag clean", "clean it", "add d", "add c", "add a b"]
    assert [h["added"] for h in history[2:]] == [1, 1, 2]
    assert history[1]["removed"] == 1
    assert [h["tags"] for h in history] == [[], ["clean"], [], [], []]
    assert all(h["timestamp_ms"] > 1.6e12 for h in history)


def test_images_are_written_plain_without_dictionary_or_statistics_in_small_groups(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    append(str(tmp_path / "t"), rows(*[f"{i}" for i in range(300)]), "add")
    (file,) = (tmp_path / "t").glob("*.parquet")
    footer = pq.ParquetFile(file).metadata
    assert [footer.row_group(g).num_rows for g in range(footer.num_row_groups)] == [128, 128, 44]
    image = footer.row_group(0).column(2)
    assert (image.compression, image.is_stats_set, image.has_dictionary_page) == ("UNCOMPRESSED", False, False)


def test_what_is_no_readable_image_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No Delta table here .*nowhere.*raypipe ingest"):
        ImageTable.open(TableConfig(uri=str(tmp_path / "nowhere")))
    file = tmp_path / "cells.csv"
    file.write_text("a,b\n")
    with pytest.raises(DataError, match=r"(No Delta table here|cannot be opened).*cells\.csv"):
        ImageTable.open(TableConfig(uri=str(file)))
    append(str(tmp_path / "paths"), pa.table({"image": ["/mnt/a.png"]}), "add")
    with pytest.raises(DataError, match=r"Column 'image' of .*paths holds no images .*bytes of the image files, not paths"):
        ImageTable.open(TableConfig(uri=str(tmp_path / "paths")))
    append(str(tmp_path / "photos"), pa.table({"picture": pa.array([b"x"])}), "add")
    with pytest.raises(DataError, match=r"has no column 'image'.*picture.*table.columns"):
        ImageTable.open(TableConfig(uri=str(tmp_path / "photos")))
    assert ImageTable.open(TableConfig(uri=str(tmp_path / "photos"), columns=Columns(image="picture")))


def test_local_paths_become_absolute_and_addresses_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("tables/cells") == str(tmp_path / "tables" / "cells")
    assert resolve("s3://bucket/cells") == "s3://bucket/cells"
    assert resolve("~/cells") == str(Path.home() / "cells")


def test_an_append_is_whole_or_not_at_all(tmp_path: Path) -> None:
    uri = str(tmp_path / "cells")
    append(uri, rows("a"), "add")

    def batches() -> object:
        yield rows("b").to_batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(Exception, match=r"the disk is gone"):
        append(uri, pa.RecordBatchReader.from_batches(rows("b").schema, batches()), "half")
    assert ids(ImageTable(uri)) == ["a"]
    assert ImageTable(uri).pin().version == 0


def test_commits_keep_their_numbers_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deltalake numbers the log from the version that was loaded: one commit later and all are off by one."""
    uri = str(tmp_path / "t")
    for n in range(3):
        append(uri, pa.table({"n": [n]}), f"commit {n}")
    opened, late = ImageTable.delta, iter([3, 4])

    def delta(table: ImageTable, version: int | None = None) -> DeltaTable:
        """Twice, somebody commits just after we have looked."""
        found = opened(table, version)
        if version is None and (n := next(late, None)) is not None:
            append(uri, pa.table({"n": [n]}), f"commit {n}")
        return found

    monkeypatch.setattr(ImageTable, "delta", delta)
    newest, entries = ImageTable(uri).commits(after=0)
    assert newest.version() == 4 and [(e["version"], e["raypipe"]) for e in entries] == [
        (n, f"commit {n}") for n in (4, 3, 2, 1)
    ]
    assert ImageTable(uri).commits(after=4)[1] == []
