"""The Python door: quick to import, and the same results as the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from deltalake import DeltaTable, write_deltalake
from PIL import Image

import raypipe
from raypipe import door
from raypipe.cli.app import _of_table
from raypipe.config import dump, load, to_json
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.job import Job
from raypipe.yaml_scalars import quoted
from tests.conftest import Cli, encode

HEAVY = "torch ray mlflow deltalake pandas pyarrow numpy PIL rich pydantic"
SMALL: dict[str, Any] = {
    "model": {"name": "small_cnn", "mode": "finetune", "side_px": 16, "pretrained": False},
    "train": {"epochs": 2, "batch_size": 8, "lr": 0.01, "precision": "fp32"},
    "cluster": {"address": "local", "cpus": 1, "object_store_mb": 100},
}


def test_importing_raypipe_imports_nothing_heavy() -> None:
    code = f"import raypipe, sys; print([m for m in {HEAVY.split()} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_package_names_its_calls_and_no_others() -> None:
    assert set(raypipe.__all__) <= set(dir(raypipe))
    for name in set(raypipe.__all__) - {"train"}:
        assert getattr(raypipe, name) is getattr(door, name)
    # The room and the call have one name.
    import raypipe.train.settings as settings

    assert callable(raypipe.train) and raypipe.train.settings is settings  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = raypipe.trian
    assert (Path(raypipe.__file__).parent / "py.typed").exists()


def test_sections_overrides_and_the_file_are_one_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # this process may have claimed runs/cells of another folder
    file = tmp_path / "job.yaml"
    file.write_text("table: {uri: a}\ntrain: {lr: 0.1, epochs: 7}\nrun: {dir: mine}\n")
    settings = {"config": file, "train": {"lr": 0.2}, "overrides": ["train.batch_size=4"]}
    job = door._job("b", {}, settings)
    assert (job.train.lr, job.train.epochs, job.train.batch_size) == (0.2, 7, 4)
    assert (job.table.uri, job.run.dir) == ("b", "mine")
    job = door._job("tables/cells", {}, {"label": "kind", "table": {"where": {"site": "1"}}})
    assert (job.table.uri, job.table.columns.label) == ("tables/cells", "kind")
    assert job.table.where == {"site": "1"} and job.run.dir == "runs/cells"


@pytest.mark.parametrize(
    ("settings", "name", "folder"),
    [
        ({}, "cells", "runs/cells"),
        ({"run": {"seed": 1}}, "cells", "runs/cells"),
        ({"run": {"dir": Path("mine") / "a"}}, "cells", "mine/a"),
        ({"overrides": ["run.name=other"]}, "other", "runs/cells"),
    ],
)
def test_the_run_is_the_command_lines(
    settings: dict[str, Any],
    name: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tables never share a folder and a model because a call sets something else of `run`."""
    monkeypatch.chdir(tmp_path)
    run = door._job("tables/cells", {}, dict(settings)).run
    assert (run.name, run.dir) == (name, folder)
    by_override = ["table.uri=tables/cells", *settings.get("overrides", [])]
    assert door._job(None, {}, {**settings, "overrides": by_override}).run == run
    if "run" not in settings:
        given = ["table.uri=tables/cells", *settings.get("overrides", [])]
        assert load(Job, None, _of_table(given)).run == run


@pytest.mark.parametrize("table", ["tables/zellen_ü", 'tables/it\'s "ours"', "tables/😀 #2", "010"])
def test_a_table_of_any_name_has_the_command_lines_run(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`raypipe tune --table tables/zellen_ü` was in runs/zellen_-u00fc."""
    monkeypatch.chdir(tmp_path)
    job = load(Job, None, _of_table([f"table.uri={quoted(table)}"]))
    ours = door._job(table, {}, {})
    assert (job.table.uri, job.run) == (table, ours.run)


def test_a_file_says_where_the_model_is_that_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call looked into runs/cells, whatever run.dir of the file was."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text("table: {uri: a}\nrun: {name: lines, dir: mine}\n")
    jobs: list[Job] = []
    monkeypatch.setattr(door.verbs, "evaluate", lambda job, show: jobs.append(job))
    raypipe.evaluate("models:/cells@blue", config=file)
    raypipe.evaluate("models:/cells@blue", "b")
    raypipe.evaluate("models:/cells@blue", evaluate={"table": {"uri": "c"}, "least_images": 2})
    with_file, without, of_section = jobs
    assert of_section.evaluate.table is not None and of_section.evaluate.table.uri == "c"
    assert of_section.run == without.run
    assert (with_file.run.dir, with_file.run.name, with_file.registry.model) == (
        "mine",
        "lines",
        None,
    )
    assert (without.run.dir, without.registry.model, without.registry.alias) == (
        "runs/cells",
        "cells",
        "blue",
    )
    assert {job.evaluate.model for job in jobs} == {"models:/cells@blue"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trian": {"lr": 1}}, r"Unknown config key trian.*Did you mean 'train'"),
        ({"train": {"lrr": 1}}, r"Unknown config key train\.lrr.*Did you mean 'train\.lr'"),
        ({"train": 3}, r"train is wrong"),
        ({"config": "nowhere.yaml"}, r"No such config file"),
        ({"overrides": ["train.lr"]}, r"An override is not section\.key=value"),
        ({"overrides": "train.lr=1"}, r"overrides is a list"),
        ({"overrides": [1]}, r"overrides is a list"),
        ({"config": {"train": {"lr": 1}}}, r"config is the path .*sections"),
        ({"label": ["a"]}, r"label is a text"),
        ({"lable": "a"}, r"There is no argument lable.*Did you mean 'label'"),
        ({"labels": "a"}, r"There is no argument labels.*Did you mean 'label'"),
        ({"model": {"std": 0}}, r"model\.std is wrong.*above 0"),
        ({"feed": {"weights": "w"}}, r"weights are for sampling=weighted"),
    ],
)
def test_wrong_settings_are_answered_as_on_the_command_line(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        raypipe.train("nowhere", **settings)


def test_a_table_may_be_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = door._job({"uri": "tables/cells", "where": {"site": "1"}}, {}, {"label": "kind"})
    assert job.table.where == {"site": "1"} and job.table.columns.label == "kind"
    assert job.run.dir == "runs/cells"
    with pytest.raises(ConfigError, match=r"table\.uri is a text or a path"):
        door._job(5, {}, {})


def test_a_model_is_asked_for_by_text_and_sections() -> None:
    for wrong in (None, 5):
        with pytest.raises(ConfigError, match="names no registered model"):
            raypipe.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run is a section"):
        raypipe.load("models:/a@champion", run="runs/a")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("cells", "names no registered model"),
        ("models:/cells", "names no registered model"),
        ("models:/cells@", "names no registered model"),
        ("models:/cells/1", "no model store here"),
    ],
)
def test_a_model_that_does_not_exist_is_named(
    uri: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RaypipeError, match=says):
        raypipe.load(uri)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright and dark squares, in folders named after them."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, shade in (("dark", 60), ("<b>bright</b>", 190)):
        safe = name.replace("/", "∕")
        (folder / safe).mkdir()
        for i in range(60):
            pixels = rng.integers(shade - 40, shade + 40, (16, 16, 3), np.uint8)
            (folder / safe / f"{i}.png").write_bytes(encode(Image.fromarray(pixels)))
    return folder


def _without_seconds(summary: dict[str, Any]) -> dict[str, Any]:
    """All but how long the call took; what devices were held for is part of the result."""
    assert summary["spent"]["seconds"] > 0 and summary["spent"]["device_s"] > 0
    spent = {name: value for name, value in summary["spent"].items() if name != "seconds"}
    return {**summary, "spent": spent}


@pytest.mark.usefixtures("ray_session")
def test_from_a_folder_to_a_drift_check(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    table = "tables/squares"
    splits = {"train": 0.5, "val": 0.3, "test": 0.2}
    added = raypipe.ingest(photos, table, ingest={"splits": splits})
    assert added.done is not None and added.done.accepted == 120
    assert "accepted" in repr(added) and "120" in repr(added)

    mlflow.set_tracking_uri("sqlite:///notebook.db")
    found = raypipe.tune(
        table,
        **SMALL,
        search={"samples": 2, "space": {"train.lr": "grid(0.01, 0.02)"}},
    )
    assert len(found.result.trials) == 2 and found.report.exists()
    html = found._repr_html_()
    assert "Leaderboard" in html and found.report.as_uri() in html
    again = raypipe.tune(
        table, **SMALL, search={"samples": 2, "space": {"train.lr": "grid(0.01, 0.02)"}}
    )
    assert _without_seconds(again.summary()) == _without_seconds(found.summary())
    assert mlflow.get_tracking_uri() == "sqlite:///notebook.db", "theirs stays theirs"

    trained = raypipe.train(table, **SMALL)
    assert str(trained.registered.champion) == "squares/1"
    # The command line finds this training finished, and gives the same result.
    job = tmp_path / "job.yaml"
    job.write_text(dump(trained.job))
    code, out, err = cli("train", job, "--json")
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert _without_seconds(told) == _without_seconds(json.loads(to_json(trained.summary())))

    model = raypipe.load("models:/squares@champion")
    assert model.version == found.registered.model
    files = sorted(photos.rglob("*.png"))[:5]
    told = model.predict(files)
    assert list(told.columns[:2]) == ["label", "score"] and len(told) == 5
    assert len(model.predict([])) == 0
    for wrong in (files[0], None):
        with pytest.raises(DataError, match="takes a list of images"):
            model.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="encoded bytes or the path"):
        model.predict([5])  # type: ignore[list-item]
    assert len(model.predict(np.array([str(file) for file in files], object))) == 5  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot be read"):
        model.predict([tmp_path / "no.png"])
    with pytest.raises(DataError, match="has no version 9"):
        raypipe.load("models:/squares/9")

    raypipe.ingest(photos, "tables/night", ingest={"from": {"labelled": False}})
    predicted = raypipe.predict(table, batch="tables/night", **SMALL)
    assert predicted.done.images == 120 and "bright" in predicted._repr_html_()
    assert "<b>bright" not in predicted._repr_html_()
    checked = raypipe.drift(table, batch="tables/night", **SMALL)
    assert not checked.is_drift and 0 <= checked.p_value <= 1
    assert "MMD" in checked._repr_html_() and Path(checked.report_page()).exists()
    # By the settings of the loop, no drift means no challenger.
    kept = raypipe.retrain(table, batch="tables/night", **SMALL)
    assert not kept.promoted and str(kept.champion) == "squares/1"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_the_lines_of_the_readme_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raypipe.ingest(photos, "ours", ingest={"splits": {"train": 0.6, "val": 0.4}})
    ours = DeltaTable("ours").to_pyarrow_table(columns=["image_id", "image", "label", "split"])
    write_deltalake("tables/cells", ours.rename_columns(["image_id", "image", "defect", "split"]))
    (tmp_path / "tonight").mkdir()
    photo = Image.open(next(photos.rglob("*.png")))
    photo.save(tmp_path / "tonight" / "001.jpg")
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(import raypipe\n.*?)^```$", page, re.M | re.S)
    # The default search takes minutes here: two trials of the same call.
    lines = block.replace('label="defect")', 'label="defect", search={"samples": 2})')
    names: dict[str, Any] = {}
    exec(lines, names)
    best, predictions = names["best"], names["predictions"]
    assert len(best.leaderboard.rows) == len(best.result.trials) > 0
    assert len(predictions) == 1 and predictions.label[0] in best.result.best.classes


@pytest.mark.usefixtures("ray_session")
def test_a_folder_that_was_moved_is_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow keeps absolute addresses."""
    monkeypatch.chdir(tmp_path)
    raypipe.ingest(photos, "cells", ingest={"splits": {"train": 0.6, "val": 0.4}})
    raypipe.train("cells", **SMALL)
    (tmp_path / "runs" / "cells").rename(tmp_path / "runs" / "moved")
    with pytest.raises(DataError, match=r"not where MLflow keeps them.*Move run\.dir back"):
        raypipe.load("models:/cells@champion", run={"dir": "runs/moved"})


def test_columns_of_an_ingest_are_those_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were ignored: the column `label` was ingested."""
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []
    monkeypatch.setattr(door.verbs, "ingest", lambda job, show: jobs.append(job))
    raypipe.ingest("photos", "tables/cells", labels="l.csv", label="defect", image="photo")
    (job,) = jobs
    assert (job.ingest.source.label_column, job.ingest.source.image_column) == ("defect", "photo")
    assert (job.table.columns.label, job.table.columns.image) == ("label", "image")


def test_a_table_of_a_long_name_has_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OSError: File name too long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert len(door._job("ü" * 300, {}, {}).run.name) == 50
    with pytest.raises(ConfigError, match=r"table\.uri is a text or a path"):
        door._job(["x" * 300], {}, {})  # type: ignore[arg-type]
