"""What commit ba74455 left is read right, made again, or refused by name with the way out; it is
never misread.

tests/data/ba74455/run.tar.xz is a run folder that it made: see the README.md beside it.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.registry import fetching, promote, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.search import trial_files
from raypipe.serve.predicted_rows import FORMAT
from raypipe.tables import scan
from raypipe.tables.table import ImageTable
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob

from .conftest import Cli

ARCHIVE = Path(__file__).parent / "data" / "ba74455" / "run.tar.xz"
MADE_AT = "/tmp/registry/old2"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds run/ and table/, with MLflow's records pointing there."""
    root = tmp_path_factory.mktemp("ba74455")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    with sqlite3.connect(root / "run" / "mlflow" / "mlflow.db") as db:
        for (table,) in db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall():
            for _, column, kind, *_ in db.execute(f"PRAGMA table_info({table})").fetchall():
                if any(word in kind.upper() for word in ("CHAR", "TEXT")):
                    db.execute(
                        f"UPDATE {table} SET {column} = replace({column}, ?, ?)",
                        (MADE_AT, str(root)),
                    )
    return root


@pytest.fixture(scope="module")
def store(left: Path) -> Store:
    return open_store(RunConfig(name="old", dir=str(left / "run")), RegistryConfig())


@pytest.fixture(scope="module")
def job(left: Path) -> Path:
    """The configuration that made it."""
    told = yaml.safe_load((ARCHIVE.parent / "job.yaml").read_text().replace("ROOT", str(left)))
    (left / "job.yaml").write_text(yaml.safe_dump(told))
    return left / "job.yaml"


def rows(folder: Path) -> list[dict[str, object]]:
    table = ImageTable(str(folder))
    names = [f.name for f in table.delta().schema().fields]
    return scan.rows(table, table.pin(), names).to_pylist()  # type: ignore[no-any-return]


def test_a_package_is_read_right(left: Path) -> None:
    before = {r["image_id"]: r for r in rows(left / "run" / "predictions")}
    images = {r["image_id"]: r["image"] for r in rows(left / "table")}
    assert len(before) == len(images) == 48
    (made_by,) = {str(r["model"]) for r in before.values()}
    package = Package(
        next(
            p
            for p in (left / "run" / "packages").iterdir()
            if json.loads((p / "package.json").read_text())
        )
    )
    assert "format" not in json.loads(package.files["manifest.json"]) and made_by == "old/1"
    assert (
        package.classes == ("cold", "warm")
        and validate(TrainJob, package.info["config"]).train.epochs == 1
    )
    reference = package.reference()
    assert len(reference.ids) == 22 and np.isfinite(reference.features_ND).all()


def test_its_model_is_refused_with_the_way_out_and_then_predicts_as_it_did(
    left: Path, store: Store, job: Path, cli: Cli, ray_session: str
) -> None:
    """Nobody can say whether its package is the registered one, so somebody has to."""
    for verb in ("predict", "drift", "retrain"):
        code, _, err = cli(verb, job, "watch.force=true")
        assert code == 2, err
        assert (
            "old/1 has no seal" in err
            and "set_model_version_tag('old', '1', 'raypipe.manifest', " in err
        )
    assert [len(rows(left / "run" / name)) for name in ("predictions", "drift")] == [48, 2]

    first = promote.require_champion(store)
    with pytest.raises(DataError, match="has no seal") as refused:
        fetching.fetch(store, first)
    exec(
        str(refused.value.fix).partition("the tag: ")[2].replace("MlflowClient()", "client"),
        {"client": store.client},
    )

    code, out, err = cli("predict", job, "--json")
    assert code == 0, err
    assert sum(json.loads(out)["labels"].values()) == 48
    found = rows(left / "run" / "predictions")
    formats = Counter(r["format"] for r in found)
    assert formats == {None: 48, FORMAT: 48}  # what was there stays there
    then, now = (
        {r["image_id"]: r["scores"] for r in found if bool(r["key"]) is new}
        for new in (False, True)
    )
    assert len(now) == 48 and then.keys() == now.keys()
    np.testing.assert_allclose([then[i] for i in now], list(now.values()), atol=1e-5)

    code, out, err = cli("drift", job, "--json")
    assert code == 0, err
    evidence = rows(left / "run" / "drift")
    assert Counter(r["format"] for r in evidence) == {None: 2, 2: 1}
    assert {(r["model"], r["table"], r["batch_images"]) for r in evidence} >= {
        ("old/1", f"{left}/table@v0", 48)
    }


def test_a_training_is_read_or_made_again_and_registered_with_a_seal(
    left: Path, store: Store, job: Path, cli: Cli, ray_session: str
) -> None:
    before = {p: p.read_bytes() for p in (left / "run" / "train").rglob("*") if p.is_file()}
    code, out, err = cli("train", job, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["champion"] == "old/1" != said["model"]
    made = next(v for v in versions.every(store) if str(v) == said["model"])
    assert made.seal and fetching.fetch(store, made).seal == made.seal
    assert {p: p.read_bytes() for p in before} == before  # what was there is not written over


def test_its_retrain_goes_on_from_its_champion(
    left: Path, store: Store, job: Path, cli: Cli, ray_session: str
) -> None:
    first = next(v for v in versions.every(store) if v.version == 1)
    if first.seal is None:
        seal = Package(next((left / "run" / "packages").glob(f"{first.tags[runs.KEY]}"))).seal
        store.client.set_model_version_tag("old", "1", versions.SEAL, seal)
    code, out, err = cli(
        "retrain", job, "watch.force=true", "run.seed=8", "watch.retrain_samples=1", "--json"
    )
    assert code == 0, err
    said = json.loads(out)
    assert said["challenger"] and said["reason"]
    assert Counter(r["format"] for r in rows(left / "run" / "decisions")) == {None: 1, 2: 1}


def test_checkpoints_and_searches_are_read_right(left: Path) -> None:
    folders = [p.parent for p in (left / "run").glob("**/state.json")]
    assert folders
    for folder in folders:
        saved = checkpoint.read(folder)
        assert saved.state.epoch == 1 and len(saved.state.history) == 1
        assert all(np.isfinite(t.numpy()).all() for t in saved.weights.values())
    (file,) = (left / "run" / "search").glob("*/result.json")
    trials, stopped, decoded, notes = trial_files.read(file)
    assert len(trials) == 2 and stopped is None and decoded and notes == ()
    assert trials[0].metric >= trials[1].metric and set(trials[0].changes) == {"train.lr"}


def test_versions_and_tags_of_its_table_are_read_right(job: Path, cli: Cli) -> None:
    code, out, err = cli("table", "list", job, "--json")
    assert code == 0, err
    assert [v["operation"] for v in json.loads(out)["versions"]] == ["WRITE"]
