"""Every image of a version gets one row that says which model said what; asking twice adds none."""

from __future__ import annotations

import dataclasses
import html
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from raypipe.config import save, validate
from raypipe.errors import DataError
from raypipe.feed.dataset import pin
from raypipe.images.measure import SEEN
from raypipe.job import Job
from raypipe.registry import fetching, promote, versions
from raypipe.registry.store import Store, open_store
from raypipe.registry.versions import ModelVersion
from raypipe.serve import batch, commits, evaluate, pieces, workers
from raypipe.serve.batch import PredictConfig
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import Columns, ImageTable, TableConfig, append
from raypipe.train import trainer, unseen
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.publish import publish
from raypipe.watch import records
from raypipe.watch.check import check
from raypipe.watch.detect import DriftConfig, DriftReport
from raypipe.watch.pictures import images_of, picture_of
from raypipe.watch.predicted import read_batch
from raypipe.watch.settings import WatchConfig
from raypipe.work.results.watching import Drifted


@pytest.fixture(scope="module")
def job(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    root = tmp_path_factory.mktemp("serve")
    made = validate(
        TrainJob,
        {
            "run": {"name": "photos", "dir": str(root / "run")},
            "table": {"uri": str(root / "photos")},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": 4, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
        },
    )
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    splits = {"train": 0.5, "val": 0.3, "test": 0.2}
    ingest(made.table, validate(IngestConfig, {"from": source, "splits": splits, "name": "photos"}))
    return made


@pytest.fixture(scope="module")
def trained(ray_session: str, job: TrainJob) -> TrainResult:
    return trainer.run(job)


@pytest.fixture(scope="module")
def store(job: TrainJob) -> Store:
    return open_store(job.run, job.registry)


@pytest.fixture(scope="module")
def champion(store: Store, job: TrainJob, trained: TrainResult) -> ModelVersion:
    made = publish(
        store,
        trainer.plan(job),
        trained,
        "train",
        children=[("trial 1", {"train.lr": 0.01}, trained.history, {"cost.seconds": 1.0})],
    )
    promote.promote(store, made, expected=None)
    return made


def test_a_result_is_published_once_with_its_lineage(
    store: Store, job: TrainJob, trained: TrainResult, champion: ModelVersion
) -> None:
    assert (
        publish(store, trainer.plan(job), trained, "train") == champion
        and len(versions.every(store)) == 1
    )
    package = fetching.fetch(store, champion)
    assert package.info["table"] == {
        "uri": trained.version.uri,
        "version": 0,
        "where": {},
        "sources": ["photos"],
    }
    assert package.info["metrics"] == trained.metrics and package.classes == ("cold", "warm")
    assert validate(TrainJob, package.info["config"]) == job
    val = scan.rows(ImageTable.open(job.table), trained.version, ["image_id"], {"split": "val"})
    reference = package.reference()
    assert sorted(reference.ids) == sorted(val["image_id"].to_pylist())
    accuracy = float((reference.scores_NC.max(axis=1) > 0.5).mean())
    assert accuracy == 1.0
    runs = store.client.search_runs([store.experiment_id])
    assert sorted(r.info.run_name for r in runs) == ["train", "trial 1"]


def test_of_a_larger_configuration_a_training_gets_its_own_sections(job: TrainJob) -> None:
    """By type: a Job is no TrainJob, so nothing of its other sections gets into a package."""
    whole = Job.model_validate(job.model_dump() | {"watch": {"force": True}})
    assert type(whole.training) is TrainJob and whole.training == job
    assert not isinstance(whole, TrainJob) and whole.watch.force


def test_every_image_gets_one_row_and_asking_twice_adds_none(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    told: list[tuple[int, int]] = []
    done = batch.predict(
        store, job.run, job.table, PredictConfig(batch_size=16), progress=lambda *n: told.append(n)
    )
    assert done.images == 60 and told[-1] == (60, 60) and sum(done.labels.values()) == 60
    rows = scan.rows(
        ImageTable(done.out.uri),
        done.out,
        ["image_id", "label", "scores", "embedding", "classes", "model", "table"],
    ).to_pylist()
    table = ImageTable.open(job.table)
    known = scan.rows(table, table.pin(), ["image_id", "image"]).to_pylist()
    images = {r["image_id"]: r["image"] for r in known}
    assert sorted(r["image_id"] for r in rows) == sorted(images)
    assert {(r["model"], r["table"], tuple(r["classes"])) for r in rows} == {
        ("photos/1", str(done.table), ("cold", "warm"))
    }
    expected = fetching.fetch(store, champion).predict([images[r["image_id"]] for r in rows])
    assert [r["label"] for r in rows] == expected.labels
    np.testing.assert_allclose([r["scores"] for r in rows], expected.scores_NC, atol=1e-5)
    np.testing.assert_allclose([r["embedding"] for r in rows], expected.features_ND, atol=1e-4)

    again = batch.predict(store, job.run, job.table, PredictConfig())
    assert again == done  # the same version of the predictions table: nothing was appended


def test_another_version_of_the_table_is_another_prediction(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    before = batch.predict(store, job.run, job.table, PredictConfig())
    ImageTable.open(job.table).tag("named")
    after = batch.predict(store, job.run, job.table, PredictConfig())
    assert (
        after.table.version == before.table.version + 1
        and after.out.version == before.out.version + 1
    )
    assert len(batch.read_rows(after.out.uri, before.key, ["label"])) == 60


def test_a_prediction_of_some_rows_is_not_one_of_all(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    """`where`, `sample` and `columns` are part of what was asked."""

    def of(**changes: object) -> batch.PredictResult:
        cfg = PredictConfig(out=str(job.run.path / "some"))
        return batch.predict(store, job.run, job.table.model_copy(update=changes), cfg)

    some = of(where={"split": "test"})
    half = of(sample=0.5)
    whole = of()
    assert 0 < some.images < 60 and 0 < half.images < 60 and whole.images == 60
    assert len({some.key, half.key, whole.key, of(columns=Columns(id="sha256")).key}) == 4
    assert of(where={"split": "test"}) == dataclasses.replace(
        some, out=of().out
    )  # found again, nothing appended
    mine = read_batch(some.table, some.out.uri, some.key)
    assert len(mine.ids) == some.images  # what a drift check of the subset looks at


def test_a_row_of_a_prediction_names_its_bytes(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    done = batch.predict(store, job.run, job.table, PredictConfig())
    rows = batch.read_rows(done.out.uri, done.key, ["image_id", "sha256", "format"]).to_pylist()
    table = ImageTable.open(job.table)
    images = scan.rows(table, done.table, ["image_id", "image"]).to_pylist()
    assert {r["image_id"]: r["sha256"] for r in rows} == {
        r["image_id"]: sha256(r["image"]).hexdigest() for r in images
    }
    assert {r["format"] for r in rows} == {batch.FORMAT}


def test_another_package_under_the_same_name_is_another_prediction(
    job: TrainJob, champion: ModelVersion
) -> None:
    other = dataclasses.replace(champion, tags=champion.tags | {versions.SEAL: "0" * 64})
    table, version = ImageTable.open_pinned(job.table)
    one = batch.target_of(job.table, table, version, champion)
    assert one.key != batch.target_of(job.table, table, version, other).key


def test_predictions_are_not_put_into_a_table_of_something_else(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    before = ImageTable.open(job.table).pin()
    with pytest.raises(
        DataError, match=r"is a table of something else.*got 'bytes, family.*Name another place"
    ):
        batch.predict(store, job.run, job.table, PredictConfig(out=job.table.uri))
    assert ImageTable.open(job.table).pin() == before
    with pytest.raises(DataError, match=r"has no images to predict.*got \{'split': 'nowhere'\}"):
        batch.predict(
            store,
            job.run,
            job.table.model_copy(update={"where": {"split": "nowhere"}}),
            PredictConfig(),
        )


def test_without_a_champion_there_is_nothing_to_predict_with(store: Store, job: TrainJob) -> None:
    with pytest.raises(DataError, match=r"There is no challenger of 'photos'.*raypipe promote"):
        batch.predict(
            dataclasses.replace(store, alias="challenger"), job.run, job.table, PredictConfig()
        )


def test_two_models_are_judged_on_the_same_rows(
    store: Store, job: TrainJob, champion: ModelVersion
) -> None:
    package = fetching.fetch(store, champion)
    table = ImageTable.open(job.table)
    judged = evaluate.judge([package, package], table, table.pin(), {"split": "test"})
    labels = (
        scan.rows(table, table.pin(), ["image_id", "label", "image"], {"split": "test"})
        .sort_by("image_id")
        .to_pylist()
    )
    assert judged["id"].to_pylist() == [r["image_id"] for r in labels]
    right = [
        a == r["label"]
        for a, r in zip(package.predict([r["image"] for r in labels]).labels, labels, strict=True)
    ]
    assert judged["model_0"].to_pylist() == judged["model_1"].to_pylist() == right
    assert set(judged["group"].to_pylist()) == {"photos"}
    assert len(evaluate.judge([package], table, table.pin(), {"split": "nowhere"})) == 0


@pytest.mark.parametrize("broken", [b"no image", None, b""])
def test_broken_images_are_not_compared_and_counted(
    broken: bytes | None, store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    """One of them ended a retrain after its training."""
    known = ImageTable.open(job.table)
    rows = scan.rows(known, known.pin(), ["image_id", "label", "image"])
    images: list[Any] = rows["image"].to_pylist()
    images[3] = images[7] = broken
    labels: list[Any] = rows["label"].to_pylist()
    labels[7] = None  # nobody compares it anyway
    rows = rows.set_column(1, "label", pa.array(labels, pa.string()))
    rows = rows.set_column(2, "image", pa.array(images, pa.binary()))
    append(str(tmp_path / "t"), rows, "add")
    table = ImageTable(str(tmp_path / "t"))
    package, said = fetching.fetch(store, champion), list[str]()
    judged = evaluate.judge([package, package], table, table.pin(), {}, said.append)
    assert {"id", "group", "model_0", "model_1"} <= {*judged.column_names}
    names = rows["image_id"].to_pylist()
    assert set(judged["id"].to_pylist()) == {*names} - {names[3], names[7]}
    whole = evaluate.judge([package], known, known.pin(), {}, said.append)
    whole = whole.filter(pc.is_in(whole["id"], value_set=judged["id"]))
    assert judged["model_0"].to_pylist() == whole["model_0"].to_pylist()
    [line] = said
    assert "1 of 59 labelled images" in line and "do not decode" in line


@pytest.mark.parametrize("ids", ["all", "some"])
def test_rows_without_an_id_are_predicted_judged_and_checked(
    ids: str, store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    """A null id ended a prediction or its drift check with an error of ours."""
    known = ImageTable.open(job.table)
    rows = scan.rows(known, known.pin(), ["image_id", "label", "image"])
    names: list[Any] = rows["image_id"].to_pylist()
    names = [None if ids == "all" or i % 2 else name for i, name in enumerate(names)]
    rows = rows.set_column(0, "image_id", pa.array(names, pa.string()))
    append(str(tmp_path / "t"), rows, "add")
    source = TableConfig(uri=str(tmp_path / "t"))
    done = batch.predict(store, job.run, source, PredictConfig(), champion)
    found = read_batch(done.table, done.out.uri, done.key)
    assert sorted(found.ids, key=str) == sorted(names, key=str)

    table = ImageTable(source.uri)
    package = fetching.fetch(store, champion)
    judged = evaluate.judge([package], table, table.pin(), {})
    assert len(judged) == 60 and judged["id"].to_pylist().count("") == names.count(None)

    # The report shows what it can find, and says of the others that they have no id.
    unusual = tuple((row, 2.0) for row in range(60))
    seen = DriftReport((), 0.5, False, 0.01, 17, 60, unusual)
    page = picture_of(seen, "nameless", package, found, table)
    assert len(page.unusual) == 60 - names.count(None)


def test_a_reference_without_ids_is_kept_and_shown(
    store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    known = ImageTable.open(job.table)
    rows = scan.rows(known, known.pin(), ["image_id", "label", "split", "image"])
    rows = rows.set_column(0, "image_id", pa.nulls(len(rows), pa.string()))
    append(str(tmp_path / "t"), rows, "add")
    table = TableConfig(uri=str(tmp_path / "t"))
    nameless = job.model_copy(update={"table": table})
    pinned = pin(table, job.feed)
    model = fetching.fetch(store, champion).model
    reference = unseen.reference(nameless, model, pinned, tmp_path).reference
    assert set(reference.ids) == {""}
    opened = ImageTable(table.uri)
    features = reference.features_ND[:2]
    package = fetching.fetch(store, champion)
    assert images_of(opened, opened.pin(), ["", ""], features, package) == [None, None]


def test_an_image_that_does_not_decode_is_a_row_with_its_error(
    store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    known = ImageTable.open(job.table)
    good = scan.rows(known, known.pin(), ["image_id", "image"]).slice(0, 25)
    images = [*good["image"].to_pylist(), None, b"no image", b""]
    ids = [*good["image_id"].to_pylist(), "null", None, "empty"]
    columns = {"image_id": ids, "image": pa.array(images, pa.binary())}
    append(str(tmp_path / "t"), pa.table(columns), "add")
    done = batch.predict(store, job.run, TableConfig(uri=str(tmp_path / "t")), PredictConfig())
    assert (done.images, done.broken, sum(done.labels.values())) == (28, 3, 25)
    wanted = ["image_id", "label", "scores", "embedding", "error", "sha256", "width", "brightness"]
    rows = batch.read_rows(done.out.uri, done.key, wanted).to_pylist()
    broken = {row["image_id"]: row for row in rows if row["error"]}
    assert broken.keys() == {"null", None, "empty"}
    for row in broken.values():
        assert [row[n] for n in ("label", "scores", "embedding", "brightness")] == [None] * 4
    assert "there is no image" in broken["null"]["error"] and broken["null"]["sha256"] is None
    whole = [row for row in rows if not row["error"]]
    assert {(row["width"], len(row["scores"])) for row in whole} == {(32, 2)}
    assert all(0 < row["brightness"] < 1 for row in whole)
    # A drift check compares those that have features.
    compared = read_batch(done.table, done.out.uri, done.key)
    assert len(compared.ids) == 25
    assert compared.looks_NK is not None and np.isfinite(compared.looks_NK).all()
    assert (compared.looks_NK[:, SEEN.index("width")] == 32).all()


def test_a_check_shows_which_engine_it_was_and_why(
    store: Store, job: TrainJob, champion: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page, in the summary and in the MLflow run."""
    monkeypatch.setattr("raypipe.watch.sides.LEAST_ROWS", 10)  # the reference has 17 images
    every = ("mmd", "ks", "cvm", "chi2", "looks")
    drift = DriftConfig(detectors=every, permutations=800)
    done = check(store, job.run, job.table, "wide", PredictConfig(), drift, champion)
    again = check(store, job.run, job.table, "wide", PredictConfig(), drift, champion)
    assert again.report == done.report, "as it was stored"
    assert {e.on for e in done.report.evidence} == {"embedding", "scores", "classes", "looks"}
    assert {e.engine for e in done.report.evidence} == {"exact"}
    # The others are about labels: it is the table that the champion was trained on.
    why, of_images, *of_labels = done.report.notes
    assert "has learned from 30 of these 60 images" in of_images
    assert "has learned from" in of_labels[0] and "no test of 30" in of_labels[1]
    assert done.report.engine == "exact" and "exact for mmd, ks, cvm, chi2, looks" in why
    assert why in html.unescape(Path(done.page).read_text())
    shown = Drifted(done)
    both = "; ".join(done.report.notes)
    assert shown.summary()["engine"] == "exact" and shown.facts()["tests"] == both
    runs = store.client.search_runs([store.experiment_id], max_results=100)
    (run,) = (run for run in runs if run.info.run_name == "drift wide")
    assert run.data.params["drift.engine"] == "exact" and run.data.params["drift.notes"] == both

    # The row had the name of the first that asked, and another watch never saw it in its history.
    for _ in range(2):
        other = check(store, job.run, job.table, "other", PredictConfig(), drift, champion)
    rows = records.checks(job.run, WatchConfig()).rows
    assert [row["name"] for row in rows if row["key"] in (done.key, other.key)] == ["wide", "other"]


def test_where_no_image_decodes_there_are_rows_and_nothing_to_compare(
    store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    columns = {"image_id": ["a", None], "image": pa.array([None, None], pa.binary())}
    append(str(tmp_path / "t"), pa.table(columns), "add")
    done = batch.predict(store, job.run, TableConfig(uri=str(tmp_path / "t")), PredictConfig())
    assert (done.images, done.broken, done.labels) == (2, 2, {})
    with pytest.raises(DataError, match=r"No image of .* decodes"):
        read_batch(done.table, done.out.uri, done.key)


@pytest.fixture
def in_parts(job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableConfig:
    """The job's images in six files; a prediction of them has three pieces and three commits."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 20)
    monkeypatch.setattr(commits, "COMMIT_ROWS", 20)
    monkeypatch.setattr(workers, "MOST_PIECES", 1)
    known = ImageTable.open(job.table)
    rows = scan.rows(known, known.pin(), ["image_id", "image"])
    for start in range(0, 60, 10):
        append(str(tmp_path / "t"), rows.slice(start, 10), "add")
    return TableConfig(uri=str(tmp_path / "t"))


def ids_of(out: str) -> list[str]:
    table = ImageTable(out)
    return sorted(scan.rows(table, table.pin(), ["image_id"])["image_id"].to_pylist())


def test_a_prediction_that_ended_between_two_parts_goes_on_and_is_read_only_as_a_whole(
    store: Store,
    job: TrainJob,
    champion: ModelVersion,
    in_parts: TableConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = PredictConfig(out=str(tmp_path / "out"))
    real, made = workers.result, []

    def ends(reference: Any) -> Any:
        if len(made) == 2:
            raise OSError("the machine went away")
        made.append(reference)
        return real(reference)

    monkeypatch.setattr(workers, "result", ends)
    with pytest.raises(OSError, match="went away"):
        batch.predict(store, job.run, in_parts, cfg)
    assert len(ids_of(cfg.out or "")) == 40
    table = ImageTable.open(in_parts)
    key = batch.target_of(in_parts, table, table.pin(), champion).key
    assert len(batch.read_rows(cfg.out or "", key, ["label"])) == 0, "nobody reads a half one"

    made.clear()
    done = batch.predict(store, job.run, in_parts, cfg)
    assert len(made) == 1, "only the piece that was missing"
    assert (
        done.images == 60
        and done.made == 20
        and len(set(ids_of(done.out.uri))) == len(ids_of(done.out.uri)) == 60
    )
    assert len(batch.read_rows(done.out.uri, key, ["label"])) == 60
    made.clear()
    assert batch.predict(store, job.run, in_parts, cfg) == done and not made


def test_two_predictions_at_once_keep_every_row_once(
    store: Store, job: TrainJob, champion: ModelVersion, in_parts: TableConfig, tmp_path: Path
) -> None:
    cfg = PredictConfig(out=str(tmp_path / "out"))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(batch.predict, store, job.run, in_parts, cfg) for _ in range(2)]
        one, other = (each.result() for each in both)
    assert one.key == other.key and one.images == other.images == 60
    assert len(set(ids_of(one.out.uri))) == len(ids_of(one.out.uri)) == 60


KILLED = """
import os, signal, sys
from pathlib import Path
from raypipe.config import load
from raypipe.job import Job
from raypipe.registry.store import open_store
from raypipe.serve import batch, commits, pieces, workers
from raypipe.serve.batch import PredictConfig
from raypipe.tables import parts
from raypipe.tables.table import TableConfig

config, table, out, point = sys.argv[1:]
job = load(Job, Path(config))
pieces.PIECE_ROWS = commits.COMMIT_ROWS = 20
workers.MOST_PIECES = 1
count = 0

def after(number, function):
    def counted(*given, **more):
        global count
        count += 1
        if count == number and point != "committed":
            os.kill(os.getpid(), signal.SIGKILL)
        done = function(*given, **more)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return counted

if point == "predicting":
    commits.whole = after(2, commits.whole)
elif point in ("committing", "committed"):
    parts.append_once = after(2, parts.append_once)
store = open_store(job.run, job.registry)
batch.predict(store, job.run, TableConfig(uri=table), PredictConfig(out=out))
"""


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["predicting", "committing", "committed"])
def test_sigkill_at_any_point_and_the_same_again_every_row_once(
    point: str,
    store: Store,
    job: TrainJob,
    champion: ModelVersion,
    in_parts: TableConfig,
    tmp_path: Path,
) -> None:
    config = save(job, tmp_path / "job.yaml")
    out = str(tmp_path / "out")
    command = [sys.executable, "-c", KILLED, str(config), in_parts.uri, out]
    ended = subprocess.run([*command, point], capture_output=True, text=True, timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(ids_of(out)) == (40 if point == "committed" else 20)
    again = subprocess.run([*command, "none"], capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert len(set(ids_of(out))) == len(ids_of(out)) == 60


def test_predictions_are_not_put_among_labels(
    store: Store, job: TrainJob, champion: ModelVersion, tmp_path: Path
) -> None:
    """A predicted label for each image stood among those that people had given."""
    labels = pa.table({"image_id": ["1"], "label": ["a"]})
    uri = append(str(tmp_path / "labels"), labels, "x").uri
    with pytest.raises(DataError, match=r"table of something else.*no column scores"):
        batch.predict(store, job.run, job.table, PredictConfig(out=uri))
    assert DeltaTable(uri).version() == 0
