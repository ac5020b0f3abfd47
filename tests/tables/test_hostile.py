"""Ingest of a hostile folder: every file becomes a row, or is quarantined with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from raypipe.config import validate
from raypipe.images import decode
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, quarantine_uri
from raypipe.tables.table import ImageTable, TableConfig
from tests.images import hostile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about what is odd


def check_that_all_is_accounted_for(
    folder: Path, tmp_path: Path, **settings: object
) -> IngestResult:
    table = TableConfig(uri=str(tmp_path / "table"))
    wanted = {
        "from": {"images": str(folder), "labelled": False},
        "workers": 0,
        "threads": 2,
        **settings,
    }
    done = ingest(table, validate(IngestConfig, wanted))
    files = {
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    }
    assert (
        done.seen == len(files) == done.accepted + done.present + done.duplicates + done.quarantined
    )
    quarantine = ImageTable(quarantine_uri(table.uri))
    rejected = scan.rows(quarantine, quarantine.pin(), ["path", "reason", "detail"]).to_pylist()
    assert len(rejected) == done.quarantined
    assert all(row["reason"] and row["detail"] for row in rejected)
    assert {row["reason"]: 0 for row in rejected}.keys() == done.reasons.keys()
    images = ImageTable.open(table)
    accepted = scan.rows(images, images.pin(), ["path", "image"]).to_pylist()
    assert len(accepted) == done.accepted
    assert {row["path"] for row in rejected} | {row["path"] for row in accepted} <= files
    for row in accepted:  # what ingest accepts, training can read
        decode.decode(row["image"], 32)
    return done


def test_cut_flipped_exploding_and_renamed_files(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    hostile.generate(folder)
    done = check_that_all_is_accounted_for(folder, tmp_path)
    assert {"broken", "empty", "not_an_image", "too_large", "too_many_scans"} <= done.reasons.keys()


@pytest.mark.parametrize(
    "formats",
    [pytest.param(decode.FORMATS, marks=pytest.mark.slow), get_args(decode.Format)],
    ids=["default formats", "all formats"],
)
def test_the_images_that_pillow_tests_itself_with(tmp_path: Path, formats: tuple[str, ...]) -> None:
    try:
        folder = hostile.pillows_own()
    except OSError as e:
        pytest.skip(str(e))
    done = check_that_all_is_accounted_for(folder, tmp_path, formats=formats)
    assert done.seen > 1_000
    assert done.accepted > 300
