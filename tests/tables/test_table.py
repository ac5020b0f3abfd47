"""Versions are pinned by number, tag or newest; tags are promises; a second drop does nothing."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.errors import DataError
from raypipe.tables import rewrite, scan
from raypipe.tables.address import resolve
from raypipe.tables.table import Columns, ImageTable, TableConfig, append
from tests.tables import handmade as by_hand
from tests.tables.handmade import drop


def rows(*ids: str) -> pa.Table:
    return pa.table(
        {
            "image_id": list(ids),
            "label": ["a"] * len(ids),
            "image": pa.array([b"x"] * len(ids), pa.binary()),
        }
    )


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


def test_tags_survive_new_versions_checkpoints_and_a_copy_of_the_table(
    table: ImageTable, tmp_path: Path
) -> None:
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


def test_the_newest_version_may_be_tagged_again_until_a_row_changes(table: ImageTable) -> None:
    """The tag's own commit made another version the newest: the tutorial's line failed when it was
    run again."""
    tagged = table.tag("raw")
    assert table.pin().version == tagged.version + 1
    before = table.pin()
    assert table.tag("raw") == tagged and table.pin() == before
    append(table.uri, rows("e"), "later")
    with pytest.raises(DataError, match=r"Tag 'raw' already names v2 .*--move"):
        table.tag("raw")
    # An older version was asked for by its number.
    with pytest.raises(DataError, match=r"Tag 'raw' already names v2 .*\(got 'v3'\)"):
        table.tag("raw", 3)
    assert table.tags() == {"raw": 2}


def test_a_tag_moves_only_when_asked_to(table: ImageTable) -> None:
    table.tag("raw", 0)
    with pytest.raises(DataError, match=r"Tag 'raw' already names v0 .*\(got 'v2'\).*--move"):
        table.tag("raw", 2)
    assert table.tags() == {"raw": 0}
    table.tag("raw", 2, move=True)
    assert table.tags() == {"raw": 2}


@pytest.mark.parametrize(
    "name", ["12", "", "0x10", "1_0", "+1", "0b11", "null", "~", "yes", "1.5", "a: b", "[x]", "#x"]
)
def test_a_tag_that_could_not_be_told_from_a_number_is_refused(
    name: str, table: ImageTable
) -> None:
    with pytest.raises(DataError, match=r"This cannot be a tag .*A number means a version"):
        table.tag(name, 1)


@pytest.mark.parametrize("name", [" raw", "raw\n", "a\0b", "\ud800"])
def test_a_tag_that_nobody_could_type_again_is_refused(name: str, table: ImageTable) -> None:
    with pytest.raises(DataError, match=r"This cannot be a tag .*no control characters"):
        table.tag(name, 1)


def test_dropping_leaves_the_pinned_version_and_makes_one_without_the_rows(
    table: ImageTable,
) -> None:
    pinned = table.pin()
    dropped = drop(table, pinned, ["b", "d"], "clean")
    assert ids(table, dropped.version) == ["a", "c"]
    assert ids(table, pinned.version) == ["a", "b", "c", "d"]


def test_dropping_again_gives_the_same_version_and_adds_none(table: ImageTable) -> None:
    pinned = table.pin()
    first = drop(table, pinned, ["b"], "clean x")
    table.tag("clean", first.version)
    newest = table.pin()
    assert drop(table, pinned, ["b"], "clean x") == first
    assert table.pin() == newest
    assert drop(table, newest, [], "nothing to drop") == newest


def test_dropping_is_refused_when_the_table_changed_since(table: ImageTable) -> None:
    pinned = table.pin()
    table.tag("raw", pinned.version)  # a tag is no change
    append(table.uri, rows("e"), "later")
    with pytest.raises(
        DataError, match=r"has changed since version 2 \(got 'WRITE in version 4'\).*Pin the newest"
    ):
        drop(table, pinned, ["b"], "clean")
    assert ids(table) == ["a", "b", "c", "d", "e"]


def test_ids_with_quotes_drop_themselves_and_nothing_else(tmp_path: Path) -> None:
    uri = str(tmp_path / "odd")
    append(uri, rows("it's", "x' or 'a'='a", "plain"), "add")
    table = ImageTable.open(TableConfig(uri=uri))
    drop(table, table.pin(), ["it's", "x' or 'a'='a"], "clean")
    assert ids(table) == ["plain"]


def test_history_says_what_why_and_how_many_newest_first(table: ImageTable) -> None:
    drop(table, table.pin(), ["b"], "clean it")
    table.tag("clean", 3)
    history = table.history()
    assert [h["version"] for h in history] == [4, 3, 2, 1, 0]
    assert [h["why"] for h in history] == ["tag clean", "clean it", "add d", "add c", "add a b"]
    assert [h["added"] for h in history[2:]] == [1, 1, 2]
    assert history[1]["removed"] == 1
    assert [h["tags"] for h in history] == [[], ["clean"], [], [], []]
    assert all(h["timestamp_ms"] > 1.6e12 for h in history)


def test_images_are_written_plain_without_dictionary_or_statistics_in_small_groups(
    tmp_path: Path,
) -> None:
    import pyarrow.parquet as pq

    append(str(tmp_path / "t"), rows(*[f"{i}" for i in range(300)]), "add")
    (file,) = (tmp_path / "t").glob("*.parquet")
    footer = pq.ParquetFile(file).metadata
    assert [footer.row_group(g).num_rows for g in range(footer.num_row_groups)] == [128, 128, 44]
    image = footer.row_group(0).column(2)
    assert (image.compression, image.is_stats_set, image.has_dictionary_page) == (
        "UNCOMPRESSED",
        False,
        False,
    )


def test_what_is_no_readable_image_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No Delta table here .*nowhere.*raypipe ingest"):
        ImageTable.open(TableConfig(uri=str(tmp_path / "nowhere")))
    file = tmp_path / "cells.csv"
    file.write_text("a,b\n")
    with pytest.raises(DataError, match=r"(No Delta table here|cannot be opened).*cells\.csv"):
        ImageTable.open(TableConfig(uri=str(file)))
    append(str(tmp_path / "paths"), pa.table({"image": ["/mnt/a.png"]}), "add")
    with pytest.raises(
        DataError,
        match=r"Column 'image' of .*paths holds no images .*bytes of the image files, not paths",
    ):
        ImageTable.open(TableConfig(uri=str(tmp_path / "paths")))
    append(str(tmp_path / "photos"), pa.table({"picture": pa.array([b"x"])}), "add")
    with pytest.raises(DataError, match=r"has no column 'image'.*picture.*table.columns"):
        ImageTable.open(TableConfig(uri=str(tmp_path / "photos")))
    assert ImageTable.open(
        TableConfig(uri=str(tmp_path / "photos"), columns=Columns(image="picture"))
    )


def test_local_paths_become_absolute_and_addresses_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_commits_keep_their_numbers_while_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake counts down from the version that was loaded: one commit later and all its numbers
    are off by one.
    """
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
    for newest, numbers in ((2, [2, 1]), (3, [3, 2, 1]), (4, [4, 3, 2, 1])):
        seen, entries = ImageTable(uri).commits(after=0)
        assert seen.version() == newest
        assert [(e["version"], e["raypipe"]) for e in entries] == [
            (n, f"commit {n}") for n in numbers
        ]
    assert ImageTable(uri).commits(after=4)[1] == []


def test_a_commit_that_says_nothing_about_itself_gives_no_other_its_number(tmp_path: Path) -> None:
    """commitInfo is optional: here versions 1 and 3 have none, and 3 is by another engine."""
    uri = tmp_path / "t"
    for n in range(4):
        append(str(uri), pa.table({"n": [n]}), f"commit {n}")
    for version in (1, 3):
        file = uri / "_delta_log" / f"{version:020d}.json"
        lines = [line for line in file.read_text().splitlines() if "commitInfo" not in line]
        file.write_text("\n".join(lines))
    table = ImageTable(str(uri))
    assert [(h["version"], h["why"]) for h in table.history()] == [
        (3, ""),
        (2, "commit 2"),
        (1, ""),
        (0, "commit 0"),
    ]
    with pytest.raises(
        DataError,
        match=r"has changed since version 2 \(got 'a commit in version 3'\).*Pin the newest",
    ):
        rewrite.drop(table, table.pin(2), rewrite_places(table, 2)[:1], "clean")


def rewrite_places(table: ImageTable, version: int) -> list[rewrite.Place]:
    found = rewrite.places(table, table.pin(version), table.delta().schema().to_arrow().names[:1])
    return [rewrite.Place(r["file"], r["place"]) for r in found.to_pylist()]


def set_times(uri: Path, times: list[int]) -> None:
    """The times of a log's files, in seconds."""
    for version, at in enumerate(times):
        os.utime(uri / "_delta_log" / f"{version:020d}.json", (at, at))


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def test_a_time_means_the_files_of_the_log_and_not_the_writers_clock(tmp_path: Path) -> None:
    """Version 1's writer was an hour ahead, version 2 says nothing, version 3's file is older than
    the one before it.
    """
    uri, start = tmp_path / "t", 1_700_000_000
    for n in range(4):
        append(str(uri), pa.table({"n": [n]}), f"commit {n}")
    first, second = (uri / "_delta_log" / f"{v:020d}.json" for v in (1, 2))
    ahead = [json.loads(line) for line in first.read_text().splitlines()]
    for line in ahead:
        line.get("commitInfo", {})["timestamp"] = (start + 3700) * 1000
    first.write_text("\n".join(map(json.dumps, ahead)))
    second.write_text(
        "\n".join(line for line in second.read_text().splitlines() if "commitInfo" not in line)
    )
    set_times(uri, [start, start + 100, start + 200, start + 150])
    table = ImageTable(str(uri))
    for seconds, version in (
        (0, 0),
        (99, 0),
        (100, 1),
        (199.999, 1),
        (200, 2),
        (200.001, 3),
        (1e6, 3),
    ):
        assert table.pin(moment(start + seconds)).version == version, seconds
    assert [h["timestamp_ms"] - start * 1000 for h in table.history()] == [
        200_001,
        200_000,
        100_000,
        0,
    ]
    with pytest.raises(
        DataError,
        match=r"has no version as old as that.*The oldest that its log names is 0 of 2023-11-14",
    ):
        table.pin(moment(start - 1))


@pytest.mark.parametrize("enabled", [0, 2])
def test_in_commit_timestamps_count_from_the_version_that_turned_them_on(
    enabled: int, tmp_path: Path
) -> None:
    """A copy of a table has new file times and the same in-commit timestamps."""
    uri, start = tmp_path / "t", 1_700_000_000
    uri.mkdir()
    on = {"delta.enableInCommitTimestamps": "true"}
    since = {
        "delta.inCommitTimestampEnablementVersion": str(enabled),
        "delta.inCommitTimestampEnablementTimestamp": str((start + 100 * enabled) * 1000),
    }
    for n in range(4):
        info = (
            {"commitInfo": {"inCommitTimestamp": (start + 100 * n) * 1000}} if n >= enabled else {}
        )
        add = by_hand.add(uri, pa.table({"x": pa.array([n], pa.int64())}), f"{n}.parquet")
        more = [by_hand.protocol(reader=1, writer=2)] if n == 0 else []
        if n in (0, enabled):
            more.append(
                by_hand.metadata(
                    [by_hand.column("x")],
                    **((on | (since if enabled else {})) if n == enabled else {}),
                )
            )
        by_hand.commit(uri, *([info] if info else []), *more, add)
    if enabled == 0:
        set_times(uri, [start + 5000] * 4)
        expected = {0: 0, 150: 1, 200: 2, 399: 3}
    else:
        set_times(uri, [start + 10, start + 20, start + 5000, start + 5000])
        expected = {10: 0, 150: 1, 199: 1, 200: 2, 299: 2, 300: 3, 9999: 3}
    table = ImageTable(str(uri))
    for seconds, version in expected.items():
        assert table.pin(moment(start + seconds)).version == version, seconds


def test_many_tags_at_once_are_all_set(table: ImageTable) -> None:
    """Each is a commit on the newest version: whoever comes second looks again."""
    names = [f"tag-{i}" for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: ImageTable(table.uri).tag(name, 1), names))
    assert table.tags() == dict.fromkeys(names, 1)


def test_of_two_who_give_one_name_to_two_versions_one_is_told(table: ImageTable) -> None:
    def named(version: int) -> str:
        try:
            ImageTable(table.uri).tag("golden", version)
        except DataError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(named, (0, 1)))
    assert sorted(map(bool, said)) == [False, True]
    assert "already names" in "".join(said)


def test_a_tag_can_be_removed_and_given_again(table: ImageTable) -> None:
    table.tag("raw", 0)
    table.tag("golden", 1)
    assert table.untag("raw") == 0
    assert table.tags() == {"golden": 1}
    with pytest.raises(DataError, match=r"has no tag 'raw'. (Known: golden|Did you mean)"):
        table.pin("raw")
    with pytest.raises(DataError, match=r"has no tag 'goldn'. Did you mean 'golden'"):
        table.untag("goldn")
    assert table.tag("raw", 2).version == 2  # no --move: nobody was promised anything any more
    assert table.tags() == {"golden": 1, "raw": 2}
    assert ids(table, 0) == ["a", "b"]


def test_a_table_that_may_not_be_changed_is_a_sentence(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    write_deltalake(uri, rows("a", "b"), configuration={"delta.appendOnly": "true"})
    table = ImageTable(uri)
    with pytest.raises(DataError, match=r"may not be changed or dropped .*appendOnly=true"):
        drop(table, table.pin(), ["a"], "clean")
    assert ids(table) == ["a", "b"]
    assert len(list(Path(uri).glob("*.parquet"))) == 1  # what was written for nothing is gone again
    log = Path(uri, "_delta_log")
    first = json.loads(
        next(
            line for line in (log / f"{0:020d}.json").read_text().splitlines() if "protocol" in line
        )
    )
    first["protocol"] = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [],
        "writerFeatures": ["rowTracking"],
    }
    (log / f"{1:020d}.json").write_text(json.dumps(first))
    with pytest.raises(DataError, match=r"Tag 'raw' cannot be written: .*"):
        table.tag("raw")


@pytest.mark.parametrize("uri", ["", "  ", "\t"])
def test_a_blank_address_is_not_the_working_directory(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`table.uri: ""` wrote a table into the folder that raypipe was started in."""
    monkeypatch.chdir(tmp_path)
    for use in (resolve, ImageTable.exists, lambda uri: append(uri, rows("a"), "add")):
        with pytest.raises(DataError, match=r"no address of a table .*Set table\.uri"):
            use(uri)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a[b]", "a[b", "a]b", "a\\b", "a\nb", "a\x7fb"])
def test_a_folder_name_that_deltalake_cannot_have_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    """Brackets ended the process with a panic of Rust."""
    folder = f"{tmp_path}/{name}/t"
    for uri in (folder, f"file://{folder}", "file://" + quote(folder)):
        with pytest.raises(DataError, match=r"No table can be in a folder.*Rename the folder"):
            append(uri, rows("a"), "add")
        with pytest.raises(DataError, match=r"Rename the folder"):
            ImageTable.open(TableConfig(uri=uri))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", " a", "a{b}", "a?b", "a*b", "a#b", "a%b", "ä", "~x"])
def test_other_odd_folder_names_work(name: str, tmp_path: Path) -> None:
    append(str(tmp_path / name), rows("a"), "add")
    table = ImageTable.open(TableConfig(uri=str(tmp_path / name)))
    assert len(scan.rows(table, table.pin(), ["image_id"])) == 1


@pytest.mark.parametrize("name", ["a%25b", "a%2Fb"])
def test_a_folder_name_that_deltalake_reads_as_another_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"No table can be in a folder of this name .*%2.*Rename the folder"
    ):
        append(str(tmp_path / name / "t"), rows("a"), "add")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"Rename the folder"):
        ImageTable.open(TableConfig(uri=str(tmp_path / name / "t")))
