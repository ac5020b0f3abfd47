"""Bad input on the real command line: exit code 2, one line with value and fix, no half files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import validate
from raypipe.registry import made_whole
from raypipe.tables.ingest import IngestConfig, ingest, quarantine_uri
from raypipe.tables.table import ImageTable, TableConfig, append

Cli = Callable[..., tuple[int, str, str]]
Draw = Callable[..., bytes]
MODEL = {"name": "small_cnn", "mode": "finetune", "pretrained": False}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A small job whose table and run folder are still to be made."""
    path = tmp_path / "job.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\n"
        f"table: {{uri: {tmp_path}/tables/cells}}\n"
        "model: {name: small_cnn, mode: finetune, pretrained: false}\n"
        "train: {epochs: 1, batch_size: 16}\n"
    )
    return path


@pytest.fixture
def ingested(job: Path, photos: Path, tmp_path: Path) -> Path:
    """The same job with the photos in its table."""
    source = {"from": {"images": str(photos), "labels": str(photos / "labels.csv")}}
    ingest(TableConfig(uri=str(tmp_path / "tables" / "cells")), validate(IngestConfig, source))
    return job


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def line_of(err: str) -> str:
    """The one message; progress lines may come before it, tracebacks may not come at all."""
    lines = [line for line in err.splitlines() if line.startswith("raypipe:")]
    assert "Traceback" not in err, err
    assert len(lines) == 1, err
    assert err.rstrip().endswith(lines[0]), err
    return lines[0]


def refused(result: tuple[int, str, str], *says: str, understood: bool = False) -> None:
    """`understood`: an ingest that had begun has said what it took the source for."""
    code, out, err = result
    line = line_of(err)
    for pattern in says:
        assert re.search(pattern, line), f"{pattern!r} is not in: {line}"
    assert code == 2
    assert out.startswith("from ") if understood else out == ""


# verb, overrides, what the line must say. None of these may write anything: the table is not there.
NOTHING_THERE: list[tuple[str, list[str], list[str]]] = [
    ("train", [], ["No Delta table here", "tables/cells", "raypipe ingest"]),
    ("tune", [], ["No Delta table here", "tables/cells"]),
    ("clean", [], ["No Delta table here", "tables/cells"]),
    ("predict", [], ["No Delta table here", "tables/cells"]),
    ("retrain", ["watch.force=true"], ["No Delta table here"]),
    ("drift", [], ["no batch to check", "watch.batch.uri"]),
    ("drift", ["watch.batch.uri=tables/night"], ["No Delta table here", "tables/night"]),
    ("train", ["train.lerning_rate=1"], ["Unknown config key train.lerning_rate", "got 1"]),
    ("train", ["train.epoch=1"], ["Unknown config key train.epoch", "Did you mean 'train.epochs'"]),
    ("train", ["tabel.uri=x"], ["Unknown config key tabel", "Did you mean 'table'"]),
    ("train", ["train.epochs=many"], ["train.epochs is wrong", "'many'", "integer"]),
    ("train", ["train.epochs=0"], ["train.epochs is wrong", "got 0", "greater than or equal to 1"]),
    ("train", ["train=fast"], ["Config key train is wrong", "'fast'"]),
    ("train", ["train.epochs"], ["not section.key=value", "'train.epochs'"]),
    (
        "train",
        ["train.stopping.metric=val_acc"],
        ["train.stopping.metric is wrong", "'val_acc'", "val_accuracy"],
    ),
    ("train", ["model.name=resnet50"], ["no backbone 'resnet50'", "efficientnet_lite0"]),
    ("train", ["table.version=[1]"], ["table.version", r"\[1\]"]),
    ("train", ["table.where=mono"], ["table.where is wrong", "'mono'"]),
    ("train", ["table.uri="], ["table.uri is wrong", "valid string"]),
    (
        "train",
        ["run.dir=s3://bucket/run"],
        ["run.dir is wrong", "s3://bucket/run", "not behind a URL", "NFS", "artifacts.uri"],
    ),
    ("train", ["run.dir=job.yaml"], ["run.dir is wrong", "'job.yaml'", "a file or lies below one"]),
    ("train", ["run.dir=job.yaml/run"], ["run.dir is wrong", "a file or lies below one"]),
    ("tune", ["search.samples=0"], ["search.samples is wrong", "got 0"]),
    ("predict", ["predict.batch_size=0"], ["predict.batch_size is wrong", "got 0"]),
    ("retrain", ["watch.retrain_workers=0"], ["watch.retrain_workers is wrong", "got 0"]),
    ("ingest", [], ["image folder does not exist", "ingest.from.images"]),
    (
        "ingest",
        ["ingest.from.images=nowhere"],
        ["image folder does not exist", "'nowhere'", "ingest.from.images"],
    ),
    (
        "ingest",
        ["ingest.from.images=.", "ingest.from.labels=nowhere.csv"],
        ["labels file does not exist", "nowhere.csv"],
    ),
    (
        "ingest",
        ["ingest.from.image=."],
        ["Unknown config key ingest.from.image", "Did you mean 'ingest.from.images'"],
    ),
    # Not 'ingest.from', which is the section itself.
    (
        "ingest",
        ["ingest.from.path=x"],
        ["Unknown config key ingest.from.path", "Known: ingest.from.", "ingest.from.images"],
    ),
    (
        "train",
        ["train.side_px=96"],
        ["Unknown config key train.side_px", "Did you mean 'model.side_px'"],
    ),
    ("ingest", ["ingest.from.kind=s3"], ["ingest.from.kind is wrong", "'s3'", "'folder', 'paths'"]),
]


@pytest.mark.parametrize(
    ("verb", "overrides", "says"),
    NOTHING_THERE,
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_a_mistake_in_the_command_costs_one_line_and_nothing_is_written(
    verb: str,
    overrides: list[str],
    says: list[str],
    job: Path,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(verb, job, *overrides)
    refused(result, *says)
    assert result[2].count("\n") == 1
    assert files(tmp_path) == {"job.yaml"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "job.yaml"], ["no verb 'trian'", "Did you mean 'train'"]),
        (["train"], ["Missing argument 'config'", "raypipe --help"]),
        (["train", "job.yaml", "--wrokers=2"], ["No such option", "--wrokers"]),
        (["train", "nowhere.yaml"], ["No such config file", "nowhere.yaml", "solar.yaml"]),
        (["train", "."], ["This is a folder, and no config file", "--table"]),
        (["table", "lsit", "job.yaml"], ["lsit"]),
        (["table", "list", "job.yaml"], ["No Delta table here"]),
        (["table", "tag", "job.yaml"], ["Missing argument 'name'"]),
        (["predict", "job.yaml", "--follow", "--once"], ["contradict each other"]),
        (["quickstart", "--config", "nowhere.yaml"], ["No such config file", "nowhere.yaml"]),
    ],
    ids=lambda v: " ".join(v) if v[0] != v[0].upper() else "",
)
def test_a_mistyped_command_line_is_one_line_too(
    arguments: list[str],
    says: list[str],
    job: Path,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments)
    refused(result, *says)
    assert result[2].count("\n") == 1
    assert files(tmp_path) == {"job.yaml"}


def test_a_home_that_nobody_knows_is_one_line(cli: Cli, job: Path) -> None:
    """It was a traceback of pathlib's."""
    refused(cli("train", str(job), "run.dir=~nobody-at-all/x"), "path with ~", "whole path")


def test_no_verb_at_all_shows_the_help(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, err) == (2, "")
    assert "quickstart" in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- table\n- run\n", ["not a mapping of sections", "'list'"]),
        ("table: [\n", ["not YAML"]),
        ("table:\n\turi: x\n", ["not YAML"]),
        ("", ["table is missing", "Add table="]),
        ("table: cells\n", ["Config key table is wrong", "'cells'"]),
        ("table: {uri: x}\n1: 2\n", ["1"]),
        ("table: {uri: x}\ntrain:\n", ["Config key train is wrong"]),
    ],
    ids=[
        "list",
        "open bracket",
        "tab",
        "empty",
        "text for a section",
        "number for a key",
        "section of nothing",
    ],
)
def test_a_config_file_that_is_none_is_one_line_too(
    text: str, says: list[str], cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    result = cli("train", path)
    refused(result, *says)
    assert result[2].count("\n") == 1


# Verb, overrides, words of the message. The table exists; these fail before Ray is started.
TABLE_THERE: list[tuple[str, list[str], list[str]]] = [
    ("train", ["table.version=99"], ["has no version 99", "raypipe table list"]),
    ("train", ["table.version=golden"], ["has no tag 'golden'", "no tags yet"]),
    (
        "train",
        ["table.columns.label=lable"],
        ["no column 'lable'", "Did you mean 'label'", "table.columns"],
    ),
    ("train", ["table.columns.image=picture"], ["no column 'picture'", "table.columns"]),
    ("train", ["table.columns.split=fold"], ["no column 'fold'"]),
    (
        "train",
        ["table.columns.image=path"],
        ["Column 'path'", "holds no images", "not paths to them"],
    ),
    ("train", ["table.where={sorce: x}"], ["no column 'sorce'", "Did you mean 'source'"]),
    ("train", ["table.where={source: nobody}"], ["no labels", "0 rows"]),
    ("train", ["table.where={label: warm}"], ["one class only", "'warm'", "table.columns.label"]),
    (
        "train",
        ["feed.val=validation"],
        ["no labelled rows in split 'validation'", "'val'", "feed.val"],
    ),
    ("predict", [], ["no model store here", "raypipe tune CONFIG"]),
    ("drift", ["watch.batch.uri=TABLE"], ["no model store here", "run.dir"]),
    ("drift", ["watch.batch.uri=TABLE", "--power"], ["no model store here"]),
    ("retrain", ["watch.force=true"], ["no model store here"]),
    ("clean", ["table.version=99"], ["has no version 99"]),
]


@pytest.mark.parametrize(
    ("verb", "overrides", "says"),
    TABLE_THERE,
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_a_mistake_about_the_table_is_one_line_and_leaves_it_alone(
    verb: str, overrides: list[str], says: list[str], ingested: Path, cli: Cli, tmp_path: Path
) -> None:
    before = files(tmp_path)
    table = str(tmp_path / "tables" / "cells")
    refused(cli(verb, ingested, *(text.replace("TABLE", table) for text in overrides)), *says)
    assert files(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_without_a_champion_a_shared_store_is_left_alone(
    ingested: Path, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    there = f"registry.uri=sqlite:///{tmp_path}/shared/store.db"
    made_whole.make(tmp_path / "shared" / "store.db")
    for verb, more in (
        ("predict", []),
        ("drift", [f"watch.batch.uri={tmp_path}/tables/cells"]),
        ("retrain", ["watch.force=true"]),
        ("evaluate", []),
    ):
        says = ("no champion of 'run'", "raypipe tune CONFIG")
        refused(cli(verb, ingested, there, *more), *says)
    assert not (tmp_path / "run").exists()


def test_a_table_without_labels_cannot_train_and_says_so(
    job: Path, photos: Path, cli: Cli, tmp_path: Path
) -> None:
    refused(
        cli("ingest", job, f"ingest.from.images={photos}"),
        "There are no labels",
        "ingest.from.labels",
        "labelled=false",
    )
    assert files(tmp_path) == {"job.yaml"}
    assert cli("ingest", job, f"ingest.from.images={photos}", "ingest.from.labelled=false")[0] == 0
    refused(
        cli("train", job),
        "has no labels in column 'label'",
        "60 rows, all unlabelled",
        "table.columns.label",
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_of_texts_is_quarantined_and_a_csv_of_missing_files_writes_nothing(
    job: Path, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.jpg").write_text(f"only words, {i}")
    labels = folder / "labels.csv"
    labels.write_text("file,label\n0.jpg,a\n9.jpg,b\n")
    command = ("ingest", job, f"ingest.from.images={folder}", f"ingest.from.labels={labels}")
    refused(cli(*command), "names 1 of 2 files", r"'9\.jpg'", "nothing was written")
    assert not (tmp_path / "tables").exists()
    labels.write_text("file,label\n0.jpg,a\n1.jpg,b\n")
    refused(
        cli(*command),
        "None of 3 files is a readable image",
        "'not_an_image': 3",
        "cells_quarantine",
        understood=True,
    )
    assert not (tmp_path / "tables" / "cells").exists()
    quarantine = ImageTable(quarantine_uri(str(tmp_path / "tables" / "cells")))
    assert quarantine.delta().to_pyarrow_table().num_rows == 3
    (tmp_path / "empty").mkdir()
    refused(
        cli("ingest", job, f"ingest.from.images={tmp_path}/empty"),
        "image folder is empty",
        "ingest.from.images",
    )


def test_a_table_uri_that_names_a_file_is_one_line_for_every_verb(
    job: Path, photos: Path, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "cells.csv"
    file.write_text("a,b\n")
    source = [f"ingest.from.images={photos}", f"ingest.from.labels={photos}/labels.csv"]
    for verb, more in (("train", []), ("ingest", source), ("clean", [])):
        refused(
            cli(verb, job, f"table.uri={file}", *more), r"cells\.csv", understood=verb == "ingest"
        )
    refused(cli("ingest", job, f"table.uri={file}/below", *source), r"cells\.csv", understood=True)
    assert file.read_text() == "a,b\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "train.workers=9",
            [
                "More workers than the cluster has",
                "train.workers=9",
                "2 CPUs",
                "Set train.workers=2",
            ],
        ),
        ("train.gpu=true", ["GPU"]),
    ],
)
@pytest.mark.usefixtures("ray_session")
def test_asking_for_more_than_the_cluster_has_is_refused_at_once(
    override: str, says: list[str], ingested: Path, cli: Cli, tmp_path: Path
) -> None:
    before = files(tmp_path)
    refused(cli("train", ingested, override), *says)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ("{train.lrr: 'uniform(1, 2)'}", ["unknown field train.lrr", "Did you mean 'train.lr'"]),
        (
            "{train.lr: 'normal(0, 1)'}",
            ["search.space.train.lr is not a draw", "normal", r"loguniform\(…\)"],
        ),
        ("{train.lr: 'uniform(2, 1)'}", ["search.space.train.lr is not a range", "low < high"]),
        ("{train.lr: 'choice(-1, 1)'}", ["draws a value the field refuses", "got -1"]),
        ("{train.lr: 'choice()'}", ["nothing to choose from"]),
        ("{table.uri: 'choice(a, b)'}", ["cannot vary table.uri"]),
    ],
)
@pytest.mark.usefixtures("ray_session")
def test_a_search_space_that_cannot_be_drawn_from_is_refused_before_a_trial_starts(
    space: str, says: list[str], ingested: Path, cli: Cli, tmp_path: Path
) -> None:
    before = files(tmp_path)
    refused(cli("tune", ingested, f"search.space={space}"), *says)
    assert files(tmp_path) == before


def foreign(uri: Path, textured: Draw, **change: Any) -> None:
    """A table that raypipe did not write: 24 images, two classes."""
    columns: dict[str, Any] = {
        "image_id": [f"{i}" for i in range(24)],
        "label": ["ab"[i % 2] for i in range(24)],
        "split": ["val" if i < 8 else "train" for i in range(24)],
        "image": [textured(i, 32) for i in range(24)],
    }
    append(str(uri), pa.table(columns | change), "theirs")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (None, ["its row holds no image"]),
        (b"no image at all", ["not_an_image: no JPEG/PNG/WEBP header"]),
    ],
    ids=["null", "words"],
)
@pytest.mark.usefixtures("ray_session")
def test_an_image_that_does_not_decode_in_training_is_one_line_with_the_way_out(
    bad: bytes | None, says: list[str], job: Path, cli: Cli, textured: Draw, tmp_path: Path
) -> None:
    foreign(
        tmp_path / "tables" / "cells", textured, image=[textured(i, 32) for i in range(23)] + [bad]
    )
    refused(cli("train", job, "feed.on_bad=stop"), *says, "raypipe clean")
    assert not list((tmp_path / "run").rglob("result.json"))


@pytest.mark.usefixtures("ray_session")
def test_numbers_for_ids_labels_and_splits_are_no_mistake(
    job: Path, cli: Cli, textured: Draw, tmp_path: Path
) -> None:
    numbers = {
        "image_id": list(range(24)),
        "label": [i % 2 for i in range(24)],
        "split": [int(i < 8) for i in range(24)],
    }
    foreign(tmp_path / "tables" / "cells", textured, **numbers)
    code, out, err = cli("train", job, "feed.train='0'", "feed.val='1'")
    assert (code, "Traceback" in err) == (0, False), err
    assert "champion" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "job.yaml"],
        ["train", "job.yaml", "train.lerning_rate=1"],
        ["trian", "job.yaml"],
    ],
    ids=" ".join,
)
def test_a_process_of_its_own_exits_with_2_and_one_line(arguments: list[str], job: Path) -> None:
    """What the tests above see in-process holds for the installed command."""
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "raypipe", *arguments]
    done = subprocess.run(
        command,
        cwd=job.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    refused(
        (done.returncode, done.stdout, done.stderr),
        "Did you mean|No Delta table here|Unknown config key",
    )
    assert files(job.parent) == {"job.yaml"}
