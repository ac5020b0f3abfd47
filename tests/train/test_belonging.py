"""A registered model keeps the domain and the group of each image of its reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raypipe.config import replace, validate
from raypipe.errors import DataError
from raypipe.feed.dataset import pin
from raypipe.feed.locate import locate
from raypipe.job import Job
from raypipe.registry import fetching
from raypipe.registry.store import open_store
from raypipe.search.settings import SearchConfig
from raypipe.search.tuner import search
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.train import belonging, trainer, unseen
from raypipe.train.job import TrainJob
from raypipe.train.publish import _listed, package_key, publish
from raypipe.watch import by_domain

from .conftest import Jobs


@pytest.fixture(scope="module")
def two_sources(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TableConfig:
    table = TableConfig(uri=str(tmp_path_factory.mktemp("domains") / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    for name, share in (("east", (0.0, 0.4)), ("west", (0.4, 1.0))):
        cfg = {"from": source, "name": name, "share": share, "splits": {"train": 0.6, "val": 0.4}}
        ingest(table, validate(IngestConfig, cfg))
    return table


@pytest.mark.usefixtures("ray_session")
def test_the_package_says_of_each_image_where_it_comes_from(
    jobs: Jobs, two_sources: TableConfig
) -> None:
    job = jobs(**{"table": two_sources.model_dump(), "train.epochs": 1, "registry.group": "label"})
    store = open_store(job.run, job.registry)
    version = publish(store, trainer.plan(job), trainer.run(job), "two")
    reference = fetching.fetch(store, version).reference()

    table = ImageTable.open(two_sources)
    rows = scan.rows(table, table.pin(), ["image_id", "source", "label"]).to_pylist()
    by_id = {row["image_id"]: row for row in rows}
    assert reference.domains == tuple(by_id[i]["source"] for i in reference.ids)
    assert reference.groups == tuple(by_id[i]["label"] for i in reference.ids)
    assert set(reference.domains) == {"east", "west"} and len(set(reference.groups)) > 1

    # A sample of the split, out of order in the table, is named as it is.
    few = replace(job, {"registry.judged_images": 9, "registry.domain": "image_id"})
    pinned = pin(few.table, few.feed)
    model = trainer.assemble(few, trainer.run(few))
    sampled = unseen._predicted(few, model, pinned, "val", unseen.ALL)[0]
    assert len(sampled.ids) == 9 and sampled.domains == sampled.ids
    plain, _ = unseen.predict_split(few, model, pinned, "val")
    assert plain.domains is None and plain.groups is None


def test_nan_names_neither_a_group_nor_a_domain(tmp_path: Path) -> None:
    """All images whose part was NaN were one large group, of the name "nan"."""
    rows = {
        "image_id": [f"i{n}" for n in range(5)],
        "image": [b"x"] * 5,
        "label": ["a", "b", "a", "b", "a"],
        "split": ["train"] * 2 + ["val"] * 3,
        "part": [1.0, 2.0, 3.0, float("nan"), float("nan")],
    }
    append(str(tmp_path / "parts"), pa.table(rows), "add")
    named = {"domain": "part", "group": "part"}
    given = {"table": {"uri": str(tmp_path / "parts")}, "registry": named}
    job = validate(TrainJob, given)
    pinned = pin(job.table, job.feed)
    samples = locate(pinned, "val", job.feed)
    domains, groups = belonging.names(job.registry, pinned, samples, np.arange(len(samples)))
    assert domains == groups and sorted(domains) == ["", "", "3.0"]


@pytest.mark.usefixtures("ray_session")
def test_a_missing_column_is_refused_before_the_training(jobs: Jobs) -> None:
    for name in ("domain", "group"):
        with pytest.raises(DataError, match="no column 'camra'"):
            trainer.plan(jobs(**{f"registry.{name}": "camra"}))


@pytest.mark.usefixtures("ray_session")
def test_a_model_that_cannot_be_packed_is_refused_before_the_training(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained for hours, and a mended module is another training."""
    (tmp_path / "beside_a_file.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "WIDTH = int((Path(__file__).parent / 'width').read_text())\n"
        "def make(pretrained: bool) -> nn.Module:\n"
        "    conv = nn.Conv2d(3, WIDTH, 3)\n"
        "    return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    (tmp_path / "width").write_text("4")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {"name": "file:beside_a_file:make", "mode": "finetune", "pretrained": False}
    job = jobs(**{f"model.{name}": value for name, value in named.items()})
    says = r"code that was packed.*__file__.*keep data files out"
    with pytest.raises(DataError, match=says):
        trainer.run(job)
    with pytest.raises(DataError, match=says):
        search(job, SearchConfig())


def test_the_drift_check_and_the_reference_are_set_in_one_place() -> None:
    watched = {"table": {"uri": "x"}, "watch": {"domain": "camera", "group": "module"}}
    job = validate(Job, watched)
    assert (job.training.registry.domain, job.training.registry.group) == ("camera", "module")
    # Again, as a job is changed on its way: nothing is lost.
    assert replace(job, {"train.epochs": 3}).training.registry.domain == "camera"
    own = validate(Job, watched | {"registry": {"domain": "site"}})
    assert (own.registry.domain, own.registry.group) == ("site", "module")
    assert validate(Job, {"table": {"uri": "x"}}).registry.domain is None


def test_a_table_without_sources_has_clusters_and_an_older_package_has_one_domain() -> None:
    features = np.random.default_rng(0).normal(size=(200, 8))
    features[:100] += 20
    assert by_domain.names(None, features) is None
    assert by_domain.names(("a", "b"), features) == ("a", "b")
    clustered = by_domain.names((), features)
    assert clustered == ["cluster 1"] * 100 + ["cluster 2"] * 100 or clustered == (
        ["cluster 2"] * 100 + ["cluster 1"] * 100
    )


def test_what_is_named_later_makes_another_package_of_the_same_weights() -> None:
    """The version without it was found, and nothing said that the setting had no effect."""
    result: Any = SimpleNamespace(key="k")

    def key(**registry: object) -> str:
        return package_key(
            validate(TrainJob, {"table": {"uri": "x"}, "registry": registry}), result
        )

    keys = [key(), key(group="module"), key(domain="module"), key(intended_use="Solar cells")]
    assert keys[0] == "k" and len(set(keys)) == 4
    assert key(group="module") == keys[1]
    # A budget lowers these by the clock, and a rerun finds the version that is there.
    assert key(severity_images=0, judged_images=50, severity_s=14.4) == "k"


def test_a_tag_of_many_sources_is_one_that_mlflow_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source a file: MLflow refused the version when the training was over."""
    assert _listed(["east", "west"]) == "east,west"
    said = _listed([f"line-1/{number:06}.jpg" for number in range(10_000)])
    assert said.startswith("10,000 sources") and len(said) < 100
    monkeypatch.setenv("CAMERA_TOKEN", "not-for-everybody")
    assert "not-for" not in _listed(["https://x/?t=not-for-everybody"])
