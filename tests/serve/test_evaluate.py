"""An evaluation finds what was planted, says what it left out, and refuses what it cannot judge."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from PIL import Image

import raypipe
from raypipe.config import validate
from raypipe.job import Job
from raypipe.registry import fetching, promote
from raypipe.registry.store import open_store
from raypipe.serve import evaluation, judged_rows
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.train import trainer
from raypipe.train.publish import publish
from tests.conftest import Cli, encode, striped

DARK = 0.4  # the share of right labels of dark images; of the others all are right


@pytest.fixture(scope="module")
def run(ray_session: str, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a champion of warm and cold photographs."""
    root = tmp_path_factory.mktemp("evaluate")
    settings = {
        "run": {"name": "photos", "dir": str(root / "run")},
        "table": {"uri": str(root / "photos")},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {"epochs": 6, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
    }
    job = validate(Job, settings).training
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    splits = {"train": 0.6, "val": 0.2, "test": 0.2}
    ingest(job.table, validate(IngestConfig, {"from": source, "splits": splits, "name": "photos"}))
    store = open_store(job.run, job.registry)
    result = trainer.run(job)
    version = publish(store, trainer.plan(job), result, "train")
    promote.promote(store, version, expected=None)
    # A model of another name in the same store.
    other = replace(store, model="other")
    promote.promote(other, publish(other, trainer.plan(job), result, "train"), expected=None)
    return root


@pytest.fixture(scope="module")
def night(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """A labelled table: a quarter of its images is dark, and most dark ones have a wrong label."""
    rng = np.random.default_rng(8)
    rows: list[dict[str, Any]] = []
    for i in range(240):
        label = ("warm", "cold")[i % 2]
        pixels_HWC = np.asarray(Image.open(io.BytesIO(encode(striped(1000 + i, label)))))
        is_dark = i % 8 < 2
        if is_dark:
            pixels_HWC = np.maximum(pixels_HWC.astype(int) - 30, 0).astype(np.uint8)
        is_wrong = is_dark and rng.random() > DARK
        out = io.BytesIO()
        Image.fromarray(pixels_HWC).save(out, "PNG")
        said = {"warm": "cold", "cold": "warm"}[label] if is_wrong else label
        row = {"image_id": f"i{i}", "image": out.getvalue(), "label": said, "dark": is_dark}
        rows.append(row | {"line": f"line {i % 3}", "part": f"p{i // 4}"})
    # What cannot be judged: no label, no image.
    rows.append(rows[0] | {"image_id": "unlabelled", "label": None})
    rows.append(rows[1] | {"image_id": "broken", "image": b"no image"})
    uri = str(run / "night")
    write_deltalake(uri, pa.Table.from_pylist(rows))
    return uri, rows


def test_the_planted_slice_is_the_worst_and_its_interval_covers_the_truth(
    cli: Cli, run: Path, night: tuple[str, list[dict[str, Any]]]
) -> None:
    uri, rows = night
    code, out, err = cli(
        "evaluate",
        "models:/photos@champion",
        uri,
        f"run.dir={run / 'run'}",
        "evaluate.slices=[line]",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["images"] == 240
    assert found["skipped"] == {"without a label": 1, "do not decode": 1}
    worst = found["slices"][0]
    assert worst["column"] == "brightness" and worst["worse"], "the dark images"
    assert worst["images"] == 60 and worst["low"] <= DARK <= worst["high"]
    assert not any(part["worse"] for part in found["slices"] if part["column"] == "line")

    # What the model says of each image, asked one by one.
    model = raypipe.load("models:/photos@champion", run={"dir": str(run / "run")})
    said = model.predict([row["image"] for row in rows[:240]])["label"].tolist()
    right = [a == row["label"] for a, row in zip(said, rows[:240], strict=True)]
    assert found["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert page.count("data:image/") >= 20, "the surest mistakes as pictures"
    assert "slices are worse than all images beyond chance" in page

    # The same again changes nothing; it is one run in MLflow.
    store = open_store(*_store(run))
    before = len(store.client.search_runs([store.experiment_id]))
    done = raypipe.evaluate(
        "models:/photos/1",
        uri,
        run={"dir": str(run / "run")},
        evaluate={"slices": ["line"], "group": "part"},
    )
    assert done.done.quality.metrics["accuracy"] == pytest.approx(np.mean(right))
    assert {part.groups < part.images for part in done.done.sliced.slices} == {True}
    assert "worse where brightness" in repr(done) and "Slices, worst first" in done._repr_html_()
    assert len(store.client.search_runs([store.experiment_id])) == before + 1


def test_an_image_of_a_class_that_the_model_does_not_know_is_wrong(
    cli: Cli, run: Path, night: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """One new class in a table of thousands: the whole table was refused."""
    rows = night[1][:60]
    hot = [row | {"image_id": f"hot {n}", "label": "hot"} for n, row in enumerate(rows[:3])]
    write_deltalake(str(tmp_path / "known"), pa.Table.from_pylist(rows))
    write_deltalake(str(tmp_path / "all"), pa.Table.from_pylist(rows + hot))
    told = []
    for table in ("known", "all"):
        words = ["models:/photos@champion", str(tmp_path / table), f"run.dir={run / 'run'}"]
        code, out, err = cli("evaluate", *words, "--json")
        assert code == 0, err
        told.append((json.loads(out.splitlines()[-1]), " ".join(err.split())))
    (known, no_word), (found, said) = told
    assert known["unknown"] == {} and "unknown classes" not in no_word
    assert found["unknown"] == {"hot": 3} and (found["images"], known["images"]) == (63, 60)
    assert "3 images of classes that the model does not know ('hot' 3): wrong, in no row" in said
    right = known["metrics"]["accuracy"] * 60
    assert found["metrics"]["accuracy"] == pytest.approx(right / 63)
    assert found["metrics"]["balanced_accuracy"] == known["metrics"]["balanced_accuracy"]
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert "Unknown classes" in page and "labelled hot" in page


def _store(run: Path) -> tuple[Any, Any]:
    settings = {"run": {"name": "photos", "dir": str(run / "run")}, "table": {"uri": "unused"}}
    job = validate(Job, settings)
    return job.run, job.registry


def test_a_configuration_evaluates_its_own_test_split(cli: Cli, run: Path, tmp_path: Path) -> None:
    config = tmp_path / "photos.yaml"
    config.write_text(
        f"run: {{name: photos, dir: {run / 'run'}}}\ntable: {{uri: {run / 'photos'}}}\n"
    )
    code, out, err = cli("evaluate", config, "evaluate.least_images=2", "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert 5 <= found["images"] <= 20 and found["metrics"]["accuracy"] > 0.8
    assert found["caution"] is None
    # Named as a table, images of the training are judged too, and that is said.
    code, out, err = cli("evaluate", config, run / "photos", "--json")
    assert code == 0 and "has learned from" in err
    found = json.loads(out.splitlines()[-1])
    said = r"has learned from \d+ of the 60 labelled images here, so the metrics are too good: "
    assert found["images"] == 60 and re.search(said, found["caution"])
    assert re.search(said, Path(found["report"]).read_text())
    for split, is_trained in (("train", True), ("test", False), ("[val, test]", False)):
        where = f"evaluate.table.where={{split: {split}}}"
        code, _, err = cli("evaluate", config, run / "photos", where, "--json")
        assert code == 0 and ("has learned from" in err) == is_trained, split
    # The split that this configuration calls its test may be what the model was trained on.
    code, _, err = cli("evaluate", config, "feed.test=train", "--json")
    assert code == 0 and "has learned from" in err


def test_the_named_model_is_evaluated_whatever_the_configuration_is_of(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    config = tmp_path / "photos.yaml"
    config.write_text(
        f"run: {{name: photos, dir: {run / 'run'}}}\ntable: {{uri: {run / 'photos'}}}\n"
    )
    names = {
        "models:/other/1": "other/1",
        "models:/other@champion": "other/1",
        "models:/photos/1": "photos/1",
        "champion": "photos/1",
        "1": "photos/1",
    }
    reports = {}
    for named, evaluated in names.items():
        code, out, err = cli("evaluate", config, f"evaluate.model={named}", "--json")
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["model"] == evaluated, named
        reports[named] = found["report"]
    assert reports["1"] == reports["champion"] == reports["models:/photos/1"]
    assert reports["1"] != reports["models:/other/1"], "their pages name different models"

    # Neither may be taken for a version or an alias of the configuration's own model.
    refused = {
        "models:/other/3": "The model 'other' has no version 3",
        "models:/nobody/1": "The model 'nobody' has no version 1",
        "models:/other@best": "There is no best of 'other'",
        "-1": "This names no registered model",
        "runs:/0123456789abcdef/model": "This names no registered model",
        "models:/it's/1": "This names no registered model",
        "models:/m-0123456789abcdef": "This names no registered model",
    }
    for named, says in refused.items():
        code, _, err = cli("evaluate", config, f"evaluate.model={json.dumps(named)}")
        assert code == 2 and says in " ".join(err.split()), (named, err)


def test_other_rows_or_columns_are_another_evaluation(
    cli: Cli, run: Path, night: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    config = tmp_path / "photos.yaml"
    config.write_text(
        f"run: {{name: photos, dir: {run / 'run'}}}\ntable: {{uri: {run / 'photos'}}}\n"
    )
    given: list[list[object]] = [
        [config],
        [config, "table.sample=0.5"],
        [config, "table.columns.source=sha256"],
        [config, "evaluate.least_images=2"],
        [config, night[0]],
        [config, night[0], "evaluate.table.columns.source=line"],
    ]
    reports = []
    for words in given:
        code, out, err = cli("evaluate", *words, "--json")
        assert code == 0, err
        reports.append(json.loads(out.splitlines()[-1])["report"])
    assert len(set(reports)) == len(given)


def test_the_driver_keeps_no_picture_but_the_surest(
    run: Path, night: tuple[str, list[dict[str, Any]]]
) -> None:
    """240 images are four batches, and each sends its five surest mistakes."""
    store = open_store(*_store(run))
    package = fetching.fetch(store, promote.require_champion(store))
    table = ImageTable.open(TableConfig(uri=night[0]))
    cfg = evaluation.EvaluateConfig(mistakes=5)
    arguments = (package, table, table.pin(None), {}, [], cfg, lambda done, total: None)
    found = evaluation._judge(*arguments)
    assert len(found.rows) == 240 and "png" not in found.rows.column_names

    # The five surest of all images.
    scores_NC = np.array(found.rows["scores"].to_pylist(), np.float32)
    targets_NC = judged_rows.targets(package.task, found.rows["label"].to_pylist())
    sure_N = judged_rows.confidence_of_mistakes(package.task, scores_NC, targets_NC)
    surest = np.sort(sure_N)[::-1][:5].tolist()
    assert surest[-1] > 0.5, "there are more than five mistakes"
    assert found.surest["sure"].to_pylist() == pytest.approx(surest)
    assert all(png.startswith(b"\x89PNG") for png in found.surest["png"].to_pylist())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["models:/photos@champion"], "raypipe evaluate needs a table beside the model"),
        (["models:/photos/7", "NIGHT"], "has no version 7"),
        (
            ["models:/photos@nobody", "NIGHT"],
            "There is no nobody of 'photos'.*newest registered version.*registry.alias=nobody",
        ),
        (["models:/nobody@champion", "NIGHT", "run.dir=RUN/none"], "no model store here"),
        (["models:/photos@champion", "NIGHT", "evaluate.slices=[lin]"], "no column 'lin'.*line"),
        (["models:/photos@champion", "NIGHT", "evaluate.group=image"], "makes no slices"),
        (
            ["models:/photos@champion", "OTHER"],
            r"Labels that the model does not know.*hot.*evaluate.table.columns.label",
        ),
        (
            ["models:/photos@champion", "NIGHT", "evaluate.table.where={line: none}"],
            "no image to evaluate on",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_one_message(
    cli: Cli,
    run: Path,
    night: tuple[str, list[dict[str, Any]]],
    given: list[str],
    says: str,
) -> None:
    other = run / "other"
    if not other.exists():
        row = night[1][0] | {"label": "hot"}
        write_deltalake(str(other), pa.Table.from_pylist([row]))
    places = {"NIGHT": night[0], "OTHER": str(other)}
    words = [places.get(word, word).replace("RUN", str(run)) for word in given]
    if not any(word.startswith("run.dir") for word in words):
        words.append(f"run.dir={run / 'run'}")
    code, _, err = cli("evaluate", *words)
    assert code == 2, err
    assert re.search(says, " ".join(err.split())), err
    assert not (run / "none").exists()


def test_a_named_model_is_the_same_evaluation_where_it_was_submitted(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The job got its settings and took the first one for a configuration file."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("raypipe.cli.evaluate.run_verb", lambda *given: asked.append(given))
    words = ["models:/cells@blue", "tables/my night", "evaluate.least_images=2"]
    assert cli("evaluate", *words)[0] == 0
    # What cluster/submit.py hands on: the overrides, without a configuration.
    _, config, overrides, _ = asked[0]
    assert cli("evaluate", *overrides)[0] == 0
    assert asked[1] == asked[0] and config is None
    assert {'evaluate.table.uri="tables/my night"', words[2]} <= {*overrides}


def test_the_columns_are_the_models_or_those_that_are_named(
    cli: Cli, run: Path, night: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """`label=` and `image=` were ignored, and a table without a column `image` was refused."""
    rows = pa.Table.from_pylist(night[1])
    says = rows["label"].to_pylist()
    other = pa.array([{"warm": "cold", "cold": "warm"}.get(one, one) for one in says])
    odd = rows.rename_columns(["photo" if n == "image" else n for n in rows.column_names])
    uri = str(tmp_path / "odd")
    write_deltalake(uri, odd.append_column("checked", other))
    named, own = "models:/photos@champion", f"run.dir={run / 'run'}"

    def accuracy(*words: str) -> float:
        code, out, err = cli("evaluate", named, *words, own, "--json")
        assert code == 0, err
        return float(json.loads(out)["metrics"]["accuracy"])

    right = accuracy(night[0])
    assert accuracy(uri, "table.columns.image=photo") == pytest.approx(right)
    wrong = accuracy(uri, "table.columns.image=photo", "table.columns.label=checked")
    assert wrong == pytest.approx(1 - right)
    found = raypipe.evaluate(
        named, uri, label="checked", image="photo", run={"dir": str(run / "run")}
    )
    assert found.summary()["metrics"]["accuracy"] == pytest.approx(wrong)


def test_training_images_are_named_whatever_their_table_is_called(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    """By another address the warning was gone."""
    (tmp_path / "link").symlink_to(run / "photos")
    for uri in (run / "photos", run / "run" / ".." / "photos", tmp_path / "link"):
        words = ("evaluate", "models:/photos@champion", uri, f"run.dir={run / 'run'}", "--json")
        code, out, err = cli(*words)
        assert code == 0 and "has learned from" in json.loads(out)["caution"], err
