"""--dry-run and cost: they say what a verb would do, write nothing and start no cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from deltalake import DeltaTable

from raypipe.config import validate
from raypipe.costs import rates
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from tests.conftest import encode, striped

pytestmark = pytest.mark.usefixtures("ray_session")
Cli = Callable[..., tuple[int, str, str]]
MODEL = ["model.name=small_cnn", "model.mode=finetune", "model.pretrained=false"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    for label in ("warm", "cold"):
        (folder / "photos" / label).mkdir(parents=True)
        for seed in range(40):
            picture = encode(striped(seed, label), "JPEG")
            (folder / "photos" / label / f"{seed}.jpg").write_bytes(picture)
    source = {"from": {"images": str(folder / "photos")}, "stratify": True}
    splits = {"splits": {"train": 0.5, "val": 0.25, "test": 0.25}}
    ingest(TableConfig(uri=str(folder / "table")), validate(IngestConfig, source | splits))
    return folder / "table"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DECODE_S", "STEP_S", "LOOK_S", "EMBED_S", "PREDICT_S"):
        monkeypatch.setattr(rates, name, 0.05)


@pytest.fixture
def config(table: Path, tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    run = {"dir": str(tmp_path / "run"), "name": "dry"}
    file.write_text(json.dumps({"table": {"uri": str(table)}, "run": run}))
    return file


def files(folder: Path) -> set[Path]:
    """All but what MLflow itself notes beside a model when it is read."""
    found = {path for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if path.name != "registered_model_meta"}


def test_train_says_what_it_would_do_and_take(cli: Cli, config: Path, table: Path) -> None:
    before = files(config.parent), files(table)
    given = [*MODEL, "train.epochs=3", "train.batch_size=16", "cost.node=g5.xlarge"]
    code, out, err = cli("train", config, *given, "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["dry_run"] and said["verb"] == "train" and said["is_upper_bound"]
    assert said["plan"]["images"] == {"train": 40, "val": 20, "test": 20}
    assert said["plan"]["table"] == f"{table}@v0" and said["plan"]["epochs"] == 3
    assert said["cpu_s"] == pytest.approx(sum(part["cpu_s"] for part in said["parts"]))
    assert said["usd"] == pytest.approx(1.006 * said["seconds"] / 3600)
    assert "single" in said["plan"]["strategy"]
    assert (files(config.parent), files(table)) == before, "a dry run wrote something"


def test_a_head_on_a_frozen_backbone_takes_the_memory_of_a_head(cli: Cli, config: Path) -> None:
    """It said what the whole backbone would take, and chose the strategy by that."""
    given = ["model.mode=frozen", "model.side_px=32", "train.batch_size=16"]
    code, out, err = cli("train", config, *given, "train.epochs=1", "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)["plan"]
    megabytes = float(plan["memory of a worker"].split()[0])
    assert megabytes < 1 and "optimizer take 0." in plan["strategy"]
    assert "3.4 million" in plan["model"]  # 13 MB


@pytest.mark.parametrize("solver", ["closed", "lbfgs"])
def test_a_head_that_is_fitted_at_once_has_no_epochs(cli: Cli, config: Path, solver: str) -> None:
    """Twenty epochs that nobody trains were most of the estimate."""
    given = ["model.mode=frozen", "model.side_px=32", "train.epochs=1000"]
    given.append(f"train.solver={solver}")
    code, out, err = cli("train", config, *given, "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)
    [looks] = [part for part in said["parts"] if part["name"] == "epochs"]
    assert looks["seconds"] < 20  # of 40 images once, with 20 others
    assert said["plan"]["epochs"] == f"none: train.solver={solver}"
    assert "fitting the head" in said["not_estimated"]
    code, out, err = cli("cost", config, *given, "--nodes", "m7i.xlarge", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert "40 images; without fitting the head" in said["job"]
    assert said["nodes"][0]["trial_usd"] < 20 * said["nodes"][0]["usd_per_hour"] / 3600


def test_workers_are_chosen_with_a_reason(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.epochs=1", "train.batch_size=16", "train.workers=auto"]
    code, out, err = cli("train", config, *given, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["plan"]["workers"].startswith("1 (there is no GPU")
    code, out, err = cli("train", config, *given, "--json")
    assert code == 0, err
    assert "train.workers=1: there is no GPU" in err


def test_a_finished_training_is_named(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.epochs=1", "train.batch_size=16", "train.precision=fp32"]
    code, out, err = cli("train", config, *given, "--json")
    assert code == 0, err
    spent = json.loads(out)["spent"]
    assert 0 < spent["device_s"] < spent["seconds"] and spent["usd"] is None
    _, out, _ = cli("train", config, *given, "--dry-run", "--json")
    assert "finished already" in json.loads(out)["plan"]["kept"]

    # What predicts says which version, and how many images.
    before = files(config.parent)
    for verb, images in (("predict", 80), ("evaluate", 20)):
        code, out, err = cli(verb, config, "--dry-run", "--json")
        assert code == 0, err
        said = json.loads(out)
        assert said["plan"]["images"] == images and said["plan"]["model"] == "dry/1"
    batch = f"watch.batch.uri={json.loads(config.read_text())['table']['uri']}"
    for verb in ("drift", "retrain"):
        code, out, err = cli(verb, config, *given, batch, "--dry-run", "--json")
        assert code == 0, err
        assert "the drift tests" in json.loads(out)["not_estimated"]
    # As a check would test, and not by drift.alpha.
    horizon = "watch.horizon={checks: 300, false_alarm: 0.03}"
    _, out, _ = cli("drift", config, batch, horizon, "--dry-run", "--json")
    assert json.loads(out)["plan"]["tests"].endswith("alpha 0.0001")
    assert files(config.parent) == before, "a dry run wrote something"


def test_a_check_is_planned_of_what_came_since_the_last_one(
    cli: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan was of all rows of the batch, though the last check had seen them."""
    uri = str(tmp_path / "night")
    given = [f"watch.batch.uri={uri}", "cluster.address=local"]

    def came(first: int, count: int) -> None:
        for seed in range(first, first + count):
            file = tmp_path / "photos" / "warm" / f"{seed}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode(striped(seed, "warm"), "JPEG"))
        source = {"from": {"images": str(tmp_path / "photos")}}
        ingest(TableConfig(uri=uri), validate(IngestConfig, source))

    def plan(verb: str = "drift") -> dict[str, Any]:
        before = files(tmp_path)
        code, out, err = cli(verb, config, *MODEL, *given, "--dry-run", "--json")
        assert code == 0, err
        assert files(tmp_path) == before, "a dry run wrote something"
        said = json.loads(out)
        return {**said["plan"], "not estimated": said["not_estimated"]}

    def done(*command: object) -> None:
        code, _, err = cli(*command, "--json")
        assert code == 0, err

    done("train", config, *MODEL, "train.epochs=1", "train.batch_size=16")
    came(100, 30)
    assert plan()["images"] == 30
    done("drift", config, *given)
    assert plan()["images"] == 0 and "already" in plan()["kept"]

    came(130, 5)
    waits = plan()
    assert waits["images"] == 5 and "a check needs 20" in waits["waits"]
    assert not waits["not estimated"], "there is no drift test"
    assert "a check needs 20" in plan("retrain")["check: waits"]

    came(135, 20)
    assert plan()["images"] == 25 and plan()["window"].startswith("window 2 (what came after v0")
    assert plan("retrain")["check: images"] == 25
    # Rows of the first window are in another file now: all are compared, and no cluster is started.
    rows = DeltaTable(uri).to_pyarrow_table(columns=["image_id"])["image_id"].to_pylist()
    first = DeltaTable(uri, version=0).to_pyarrow_table(columns=["image_id"])["image_id"][0]
    assert DeltaTable(uri).delete(f"image_id = '{first}'")["num_deleted_rows"] == 1
    assert len(rows) == 55
    with monkeypatch.context() as fresh:
        fresh.setattr(ray, "is_initialized", lambda: False)
        for name in ("init", "put"):
            fresh.setattr(ray, name, lambda *args, **how: pytest.fail("a cluster was started"))
        assert plan()["images"] == 25

    done("drift", config, *given)
    assert plan()["images"] == 0 and "nothing came" in plan()["kept"]
    # Another champion has predicted none of them.
    done("train", config, *MODEL, "train.epochs=1", "train.batch_size=16", "train.lr=0.002")
    done("promote", config, "--version", "2")
    assert plan()["images"] == 25 and plan()["model"] == "dry/2"


def test_a_training_names_augmentation_that_frozen_features_do_not_have(
    cli: Cli, config: Path
) -> None:
    """Features were computed of the images as they are, and nothing said so."""
    given = ["model.side_px=32", "train.epochs=1", "augment.flip_vertical=true"]
    code, _, err = cli("train", config, *given, "augment.degrees=0", "--json")
    assert code == 0, err
    assert "augment.flip_vertical has no effect on frozen features: set model.mode=finetune" in err
    code, _, err = cli("train", config, *given, *MODEL, "--json")
    assert code == 0 and "no effect" not in err, err


def test_tune_says_how_many_epochs_its_scheduler_leaves(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.epochs=9", "search.samples=6", "search.grace=1"]
    code, out, err = cli("tune", config, *given, "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)
    # Six trials to epoch 1, two to 3, one to 9.
    assert said["plan"]["epochs"].startswith("16 of 54")
    assert said["plan"]["trials"].startswith("6, ")
    names = [part["name"] for part in said["parts"]]
    assert "trials" in names and "Tune" in names


def test_trials_that_are_fitted_at_once_have_no_epochs(cli: Cli, config: Path) -> None:
    """Trials of a solver were planned with all epochs of their job."""
    given = ["model.mode=frozen", "model.side_px=32", "train.solver=closed", "search.samples=4"]
    given += ["train.epochs=1000", "search.space={model.head: 'choice(linear, kernel)'}"]
    code, out, err = cli("tune", config, *given, "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["plan"]["epochs"] == "none: train.solver=closed"
    [looks] = [part for part in said["parts"] if part["name"] == "trials"]
    assert looks["seconds"] < 20


def test_tune_says_what_of_a_budget_it_does_not_estimate(cli: Cli, config: Path) -> None:
    """It took "at most 29 s", without a word about the first answer; and trials that all fine-tune
    were those of a frozen backbone, which the job had."""
    space = {"model.mode": "choice(finetune)", "train.epochs": "choice(1, 3)"}
    given = ["model.side_px=32", "search.first_answer=true", "search.ensemble=3"]
    given += [f"search.space.{name}={text}" for name, text in space.items()]
    code, out, err = cli("tune", config, *given, "search.samples=2", "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert "the first answer" in said["not_estimated"] and "ensemble" in said["not_estimated"]
    assert said["plan"]["model"] == "efficientnet_lite0, finetune, 32 px"


def test_tune_says_which_models_its_limits_bar(cli: Cli, config: Path) -> None:
    space = "search.space={model.name: 'choice(small_cnn, efficientnet_lite0)'}"
    given = [*MODEL, "model.side_px=32", "train.epochs=1", "search.samples=4", space]
    code, out, err = cli("tune", config, *given, "search.limits.size_mb=5", "--dry-run", "--json")
    assert code == 0, err
    said = json.loads(out)["plan"]["limits"]
    assert said.startswith("1 of 2 models break") and "efficientnet_lite0 at 32 px has 13." in said
    code, _, err = cli("tune", config, *given, "search.limits.size_mb=0.001", "--dry-run")
    assert code == 2 and "No model of the search can keep" in err


def test_mistakes_are_those_of_the_verb(cli: Cli, config: Path, tmp_path: Path) -> None:
    code, _, err = cli("train", config, "table.uri=nowhere", *MODEL, "--dry-run")
    assert code == 2 and "nowhere" in err
    code, _, err = cli("predict", config, "--dry-run")
    assert code == 2 and "no model store" in err
    code, _, err = cli("train", config, *MODEL, "train.workers=64", "--dry-run")
    assert code == 2 and "train.workers=64" in err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_starts_no_cluster(
    cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a fresh process: nothing is joined, and nothing runs here.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *args, **how: pytest.fail("a cluster was started"))
    code, out, err = cli("train", config, *MODEL, "cluster.address=local", "--dry-run", "--json")
    assert code == 0, err
    assert "this machine" in json.loads(out)["plan"]["runs on"]


def test_cost_compares_nodes(cli: Cli, config: Path) -> None:
    nodes = "g5.xlarge,m7i.xlarge,g5.xlarge"
    code, out, err = cli("cost", config, *MODEL, "--nodes", nodes, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert {one["name"] for one in said["nodes"]} == {"g5.xlarge", "m7i.xlarge"}
    assert said["nodes"][0]["run_usd"] <= said["nodes"][1]["run_usd"]
    code, out, err = cli("cost", "--nodes", "list")
    assert code == 0 and "Standard_NC24ads_A100_v4" in out
    code, _, err = cli("cost")
    assert code == 2 and "no configuration" in err


@pytest.mark.parametrize(
    ("verb", "wrong", "said"),
    [
        ("tune", "by_epoch={1: {train.lr: 0.01}}", "by_epoch"),
        ("tune", "train.gpu=true", "Set train.gpu=auto"),
        ("tune", "cluster.address=none", "needs a cluster"),
        ("tune", "search.refit={train.workerz: 2}", "search.refit"),
        ("train", "train.start_from=/nowhere", "train.start_from"),
        ("train", "train.class_weights={nobody: 1}", "train.class_weights"),
        ("train", "registry.alias=v1", "registry.alias=v1"),
        ("retrain", "cluster.dashboard=false", "no batch"),
    ],
)
def test_what_the_verb_refuses_has_no_plan(
    cli: Cli, config: Path, verb: str, wrong: str, said: str
) -> None:
    code, out, err = cli(verb, config, *MODEL, wrong, "--dry-run")
    assert code == 2 and said in err and not out


def test_what_is_not_known_yet_is_said(cli: Cli, config: Path) -> None:
    auto = ["train.batch_size=auto", "train.lr=auto"]
    for verb in ("train", "tune"):
        code, out, err = cli(verb, config, *MODEL, *auto, "--dry-run", "--json")
        assert code == 0, err
        said = json.loads(out)
        assert "assumed" in said["plan"]["batch"]
        assert "train.batch_size" in said["not_estimated"]


def test_budgets_end_epochs(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.epochs=1000", "train.batch_size=16"]
    money = ["train.stopping.money=0.001", "train.stopping.price_per_hour=1"]
    code, out, err = cli("train", config, *given, *money, "--dry-run", "--json")
    assert code == 0, err
    [epochs] = [part for part in json.loads(out)["parts"] if part["name"] == "epochs"]
    assert epochs["seconds"] == pytest.approx(3.6)
    capped = [*MODEL, "train.epochs=9", "search.samples=6", "search.stopping.epochs=4"]
    code, out, err = cli("tune", config, *capped, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["plan"]["epochs"].startswith("4 of 54")


def test_the_money_of_a_search_ends_its_trials(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.epochs=1000", "train.batch_size=16", "search.samples=6"]
    money = ["search.limits.money=0.001", "search.stopping.price_per_hour=1"]
    code, out, err = cli("tune", config, *given, *money, "--dry-run", "--json")
    assert code == 0, err
    [trials] = [part for part in json.loads(out)["parts"] if part["name"] == "trials"]
    beside = min(6, int(ray.cluster_resources()["CPU"]))
    assert trials["seconds"] == pytest.approx(3.6 / beside)


def test_a_finished_and_an_interrupted_search_are_named(cli: Cli, config: Path) -> None:
    """A dry run said what they would take, as if nobody had begun them."""
    space = "search.space={train.lr: 'loguniform(0.001, 0.01)'}"
    given = [*MODEL, "train.epochs=1", "train.batch_size=16", "search.samples=2", space]
    _, out, _ = cli("tune", config, *given, "--dry-run", "--json")
    assert "kept" not in json.loads(out)["plan"]
    code, out, err = cli("tune", config, *given, "--json")
    assert code == 0, err
    _, out, _ = cli("tune", config, *given, "--dry-run", "--json")
    kept = json.loads(out)["plan"]["kept"]
    (result,) = (config.parent / "run").glob("search/*/result.json")
    assert (
        kept == f"the trials of this search have ended, in {result.parent}: it takes their result"
    )
    result.unlink()
    _, out, _ = cli("tune", config, *given, "--dry-run", "--json")
    assert json.loads(out)["plan"]["kept"].startswith("an interrupted search goes on, in ")


@pytest.mark.parametrize("more", ["search.scheduler=pbt", "search.concurrent=6"])
def test_no_more_trials_run_at_a_time_than_there_are_cpus(
    cli: Cli, config: Path, more: str
) -> None:
    space = "search.space={train.lr: 'loguniform(0.001, 0.01)'}"
    given = [*MODEL, "train.epochs=3", "search.samples=6", space, more]
    code, out, err = cli("tune", config, *given, "--dry-run", "--json")
    assert code == 0, err
    cpus = int(ray.cluster_resources()["CPU"])
    assert f"6, {min(6, cpus)} at a time" in json.loads(out)["plan"]["trials"]


def test_decoding_counts_all_threads_where_torch_has_one(cli: Cli, config: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code, out, err = cli("train", config, *MODEL, "train.epochs=1", "--dry-run", "--json")
    finally:
        torch.set_num_threads(before)
    assert code == 0, err
    [once] = [part for part in json.loads(out)["parts"] if part["name"] == "decoding once"]
    # To hash and decode a JPEG takes more than 20 us; to take it from a queue takes less.
    assert once["cpu_s"] > 60 * 20e-6


def test_a_named_model_and_a_finished_prediction_are_the_ones_planned(
    cli: Cli, config: Path, tmp_path: Path
) -> None:
    given = [*MODEL, "train.epochs=1", "train.batch_size=16"]
    for lr in ("0.001", "0.002"):
        code, _, err = cli("train", config, *given, f"train.lr={lr}", "--json")
        assert code == 0, err
    code, out, err = cli("evaluate", config, "evaluate.model=2", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["plan"]["model"] == "dry/2"
    code, _, err = cli("evaluate", config, "evaluate.model=9", "--dry-run")
    assert code == 2 and "9" in err

    # A challenger has the champion's settings, whatever the job says.
    retrain = ["watch.force=true", "watch.retrain_samples=1", "train.epochs=50"]
    code, out, err = cli("retrain", config, *MODEL, *retrain, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["plan"]["epochs"] == 1

    code, _, err = cli("predict", config, "--json")
    assert code == 0, err
    for more in ([], ["--once"]):
        code, out, err = cli("predict", config, *more, "--dry-run", "--json")
        assert code == 0, err
        said = json.loads(out)
        assert said["plan"]["images"] == 0 and "already" in said["plan"]["kept"]

    # A store that is not there is not made.
    nowhere = tmp_path / "nowhere.db"
    code, _, err = cli("predict", config, f"registry.uri=sqlite:///{nowhere}", "--dry-run")
    assert code == 2 and "no model store" in err and not nowhere.exists()


def test_the_plan_names_the_launcher_and_starts_no_spark(cli: Cli, config: Path) -> None:
    given = [*MODEL, "train.launcher=torch_distributor", "train.workers=3", "train.epochs=1"]
    code, out, err = cli("train", config, *given, "--dry-run", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["plan"]["launcher"] == "torch_distributor"
    assert told["plan"]["images come from"] == "threads"
    assert "executors of Spark" in told["plan"]["runs on"]
    assert "the start of Spark" in told["not_estimated"]
    code, _, err = cli("train", config, *given, "--dry-run", "feed.carrier=cache")
    assert code == 2 and "trains without Ray" in err
    code, _, err = cli("tune", config, *given, "--dry-run")
    assert code == 2 and "A search needs Ray" in err
