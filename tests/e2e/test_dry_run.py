"""--dry-run and cost: they say what a verb would do, write nothing and start no cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

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
        assert "sidecar" in json.loads(out)["not_estimated"]
    assert files(config.parent) == before, "a dry run wrote something"


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
