"""`raypipe tune --table T --label L`: no config file, and what is missing is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.cli.app import _of_table
from raypipe.config import load, validate
from raypipe.job import Job
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig

from ..conftest import Cli

TINY = [
    "model.name=small_cnn",
    "model.pretrained=false",
    "model.mode=finetune",
    "train.epochs=2",
    "train.precision=fp32",
]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_table_and_a_label_are_enough(
    photos: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(
        TableConfig(uri="ours"),
        validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}),
    )
    theirs = DeltaTable("ours").to_pyarrow_table(columns=["image_id", "image", "label", "split"])
    write_deltalake("tables/cells", theirs.rename_columns(["image_id", "photo", "kind", "split"]))
    flags = ["--table", "tables/cells", "--label", "kind", "--image", "photo", "--json"]
    code, out, err = cli("tune", *TINY, "search.samples=2", *flags)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert (told["trials"], told["heads"]) == (2, 0)
    assert told["model"] == told["champion"] == "cells/1"
    saved = load(Job, next((tmp_path / "runs" / "cells" / "search").glob("*/config.yaml")))
    assert (
        saved.search.space
        # More than the rate: a space of that alone is for jobs that set everything else.
        and {"train.lr", "train.batch_size", "train.schedule"} <= set(saved.search.space)
        and "model.name" not in saved.search.space
    )
    assert set(told["best"]) <= set(saved.search.space)


def test_neither_file_nor_table_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["train.epochs=2"], ["--label", "kind"]):
        code, _, err = cli("tune", *arguments)
        assert code == 2 and err.count("\n") == 1
        assert "neither a config file nor a table" in err and "--table FOLDER --label COLUMN" in err
    code, _, err = cli("tune", "--table", "nowhere", "--label", "kind")
    assert code == 2 and "No Delta table here" in err and err.count("\n") == 1
    code, _, err = cli("tune", "nowhere.yaml", "--table", "nowhere")
    assert code == 2 and "No such config file" in err
    assert not list(tmp_path.iterdir())


def test_two_tables_of_one_name_share_no_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one gets a name with a hash of its address, again the same on a rerun."""
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "runs" / "cells" / "search" / "abc" / "config.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_text("table: {uri: a/cells}\n")
    assert _of_table(["table.uri=a/cells"])[:2] == ['run.name="cells"', 'run.dir="runs/cells"']
    assert _of_table([f"table.uri={tmp_path}/a/cells/"])[0] == 'run.name="cells"'
    other = _of_table(["table.uri=b/cells"])
    assert re.fullmatch(r'run.name="cells-[0-9a-f]{6}"', other[0])
    assert other == _of_table(["table.uri=b/cells"]) != _of_table(["table.uri=c/cells"])
