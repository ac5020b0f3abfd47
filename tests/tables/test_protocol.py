"""A Delta feature that raypipe would read wrong is refused by its name.

Features that it reads: test_handmade.py and test_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append


def rows() -> pa.Table:
    return pa.table({"image_id": ["a", "b"], "image": pa.array([b"x", b"y"], pa.binary())})


def change_log(
    uri: str, protocol: dict[str, object] | None = None, configuration: dict[str, str] | None = None
) -> None:
    """Add a commit by hand, as another engine would write it."""
    log = Path(uri) / "_delta_log"
    actions = [
        json.loads(line) for line in (log / "00000000000000000000.json").read_text().splitlines()
    ]
    new = [a for a in actions if "metaData" in a]
    new[0]["metaData"]["configuration"] |= configuration or {}
    if protocol:
        new.append({"protocol": protocol})
    version = len(list(log.glob("*.json")))
    (log / f"{version:020d}.json").write_text("\n".join(json.dumps(a) for a in new) + "\n")


@pytest.mark.parametrize("feature", ["variantShredding-preview", "somethingOf2030"])
def test_a_reader_feature_that_we_do_not_know_is_refused_by_name(
    feature: str, tmp_path: Path
) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [feature],
        "writerFeatures": [feature],
    }
    change_log(uri, features)
    with pytest.raises(DataError, match=feature):
        ImageTable.open(TableConfig(uri=uri))
    with pytest.raises(DataError, match=feature):
        scan.rows(ImageTable(uri), ImageTable(uri).pin(), ["image_id"])


def test_a_feature_that_is_allowed_but_not_used_does_no_harm(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    names = ["columnMapping", "deletionVectors"]
    change_log(
        uri,
        {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": names,
            "writerFeatures": names,
        },
    )
    assert (
        len(scan.rows(ImageTable.open(TableConfig(uri=uri)), ImageTable(uri).pin(), ["image_id"]))
        == 2
    )


def test_an_old_version_is_refused_for_what_it_used_itself(tmp_path: Path) -> None:
    """The newest version may use fewer features than an older one, which must be refused, too."""
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": ["somethingOf2030"]}
    change_log(uri, features | {"readerFeatures": ["somethingOf2030"]})
    change_log(uri, {"minReaderVersion": 1, "minWriterVersion": 2})
    table = ImageTable.open(TableConfig(uri=uri))
    assert len(scan.rows(table, table.pin(), ["image_id"])) == 2
    with pytest.raises(
        DataError,
        match=r"uses a feature this version does not read \(got 'somethingOf2030'\).*DROP FEATURE",
    ):
        scan.rows(table, table.pin(1), ["image_id"])


def test_a_way_of_mapping_columns_that_we_do_not_know_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    append(uri, rows(), "add")
    change_log(
        uri, {"minReaderVersion": 2, "minWriterVersion": 5}, {"delta.columnMapping.mode": "guess"}
    )
    with pytest.raises(DataError, match=r"guess"):
        ImageTable.open(TableConfig(uri=uri))
