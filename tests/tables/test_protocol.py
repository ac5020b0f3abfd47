"""A Delta feature that we would read wrong is refused by its name; tables that Spark wrote read as Spark reads them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from raypipe.errors import DataError
from raypipe.tables import protocol, scan
from raypipe.tables.table import ImageTable, TableConfig, append

GOLDEN = Path(__file__).parents[2].parent / "shared" / "delta-golden"
ARCHIVES = sorted(GOLDEN.glob("*.tar.zst"))
# A partition timestamp without a zone is in the session's zone (this one in US Pacific), which the table does not tell.
UNTOLD = {"data-reader-partition-values": ["as_timestamp"]}


def rows() -> pa.Table:
    return pa.table({"image_id": ["a", "b"], "image": pa.array([b"x", b"y"], pa.binary())})


MAPPED = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}


def change_log(uri: str, protocol: dict[str, object] | None = None, configuration: dict[str, str] | None = None) -> None:
    """Add a commit by hand, as another engine would write it."""
    log = Path(uri) / "_delta_log"
    actions = [json.loads(line) for line in (log / "00000000000000000000.json").read_text().splitlines()]
    new = [a for a in actions if "metaData" in a]
    new[0]["metaData"]["configuration"] |= configuration or {}
    if configuration == MAPPED:
        schema = json.loads(new[0]["metaData"]["schemaString"])
        for i, field in enumerate(schema["fields"], 1):
            field["metadata"] |= {"delta.columnMapping.id": i, "delta.columnMapping.physicalName": f"col-{i}"}
        new[0]["metaData"]["schemaString"] = json.dumps(schema)
    if protocol:
        new.append({"protocol": protocol})
    version = len(list(log.glob("*.json")))
    (log / f"{version:020d}.json").write_text("\n".join(json.dumps(a) for a in new) + "\n")


@pytest.mark.parametrize("feature", ["typeWidening", "typeWidening-preview", "variantType", "somethingOf2030"])
def test_a_reader_feature_that_we_do_not_know_is_refused_by_name(feature: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature], "writerFeatures": [feature]}
    change_log(uri, features)
    with pytest.raises(DataError, match=feature):
        ImageTable.open(TableConfig(uri=uri))
    with pytest.raises(DataError, match=feature):
        scan.rows(ImageTable(uri), ImageTable(uri).pin(), ["image_id"])


def test_column_mapping_with_the_old_reader_version_is_refused(tmp_path: Path) -> None:
    """Ray 2.60 and delta-rs's Arrow readers return nulls for such a table without a word."""
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    change_log(uri, {"minReaderVersion": 2, "minWriterVersion": 5}, MAPPED)
    with pytest.raises(DataError, match=r"columnMapping \(name\).*REORG TABLE"):
        ImageTable.open(TableConfig(uri=uri))


def test_a_feature_that_is_allowed_but_not_used_does_no_harm(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    names = ["columnMapping", "deletionVectors"]
    change_log(uri, {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names})
    assert len(scan.rows(ImageTable.open(TableConfig(uri=uri)), ImageTable(uri).pin(), ["image_id"])) == 2


def test_an_old_version_is_refused_for_what_it_used_itself(tmp_path: Path) -> None:
    """Newest versions may have shed a feature: pinning an older one must not bring nulls or deleted rows back."""
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    names = ["columnMapping", "deletionVectors"]
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}
    change_log(uri, features, MAPPED)
    change_log(uri, configuration={"delta.columnMapping.mode": "none"})
    table = ImageTable.open(TableConfig(uri=uri))
    assert len(scan.rows(table, table.pin(), ["image_id"])) == 2
    with pytest.raises(DataError, match=r"uses a feature this version does not read \(got 'columnMapping \(name\)'\)"):
        scan.rows(table, table.pin(1), ["image_id"])


def unpacked(archive: Path, folder: Path) -> Path:
    with pa.input_stream(archive, compression="zstd") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.zst")


def same_rows(found: pa.Table, expected: pa.Table) -> bool:
    if any(pa.types.is_nested(t) for t in found.schema.types):
        return sorted(map(repr, found.to_pylist())) == sorted(map(repr, expected.to_pylist()))
    by_all = [(name, "ascending") for name in found.schema.names]
    return found.sort_by(by_all).equals(expected.sort_by(by_all))  # 15 times faster on a million decimals


@pytest.mark.skipif(not ARCHIVES, reason="the golden tables are not beside this checkout")
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda p: p.name.removesuffix(".tar.zst"))
def test_a_table_of_spark_reads_as_expected_or_is_refused(archive: Path, tmp_path: Path) -> None:
    """Never fewer rows, never nulls: equal to what Spark returns, or one DataError."""
    folder = unpacked(archive, tmp_path)
    table = ImageTable(str(folder / "delta"))
    try:
        columns = [f.name for f in table.delta().schema().fields if f.name not in UNTOLD.get(folder.name, [])]
        found = scan.rows(table, table.pin(), columns)
    except DataError as refusal:
        assert str(table.uri) in str(refusal)
        return
    files = sorted((folder / "expected").glob("*.parquet"))
    assert files, f"{folder.name} has nothing that a reader could return, and gave {len(found)} rows"
    expected = pa.concat_tables([pq.ParquetFile(f).read() for f in files]).select(columns).cast(found.schema)
    assert same_rows(found, expected)


@pytest.mark.skipif(not ARCHIVES, reason="the golden tables are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("dv-partitioned-with-checkpoint", "deletionVectors"),
        ("table-with-columnmapping-mode-name", r"columnMapping \(name\)"),
        ("data-reader-timestamp_ntz-name-mode", r"columnMapping \(name\)"),
    ],
)
def test_what_other_readers_return_wrong_is_refused_by_name(name: str, feature: str, tmp_path: Path) -> None:
    delta = DeltaTable(str(unpacked(GOLDEN / f"{name}.tar.zst", tmp_path) / "delta"))
    with pytest.raises(
        DataError, match=rf"uses a feature this version does not read \(got '{feature}'\).*read in full or refused"
    ):
        protocol.preflight(delta)


@pytest.mark.skipif(not ARCHIVES, reason="the golden tables are not beside this checkout")
def test_most_of_them_are_read_and_not_just_refused(tmp_path: Path) -> None:
    """The negative control of the test above: refusing everything would pass it."""
    for name in ("data-reader-primitives", "v2-checkpoint-json", "data-reader-escaped-chars", "kernel-timestamp-int96"):
        table = ImageTable(str(unpacked(GOLDEN / f"{name}.tar.zst", tmp_path) / "delta"))
        columns = [f.name for f in table.delta().schema().fields]
        assert len(scan.rows(table, table.pin(), columns)) > 0
