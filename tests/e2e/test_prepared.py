"""A prepared table in the place of its source: a training learns the same, in the same order, and
every verb says which version the table stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from raypipe.config import dump, replace, validate
from raypipe.feed.dataset import pin
from raypipe.feed.locate import locate
from raypipe.images.smaller import Shape
from raypipe.job import Job
from raypipe.registry import runs
from raypipe.registry.store import open_store
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.prepare.run import prepare
from raypipe.tables.table import TableConfig
from tests.conftest import encode, striped

pytestmark = pytest.mark.usefixtures("ray_session")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Photos of 200 px: warm and cold stripes."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "photos").mkdir()
    lines = ["file,label"]
    for seed in range(80):
        label = ("warm", "cold")[seed % 2]
        picture = striped(seed, label).resize((260, 200))
        (folder / "photos" / f"{seed}.jpg").write_bytes(encode(picture, "JPEG", quality=92))
        lines.append(f"{seed}.jpg,{label}")
    (folder / "photos" / "labels.csv").write_text("\n".join(lines) + "\n", "utf-8")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(folder / "photos"), "labels": str(folder / "photos" / "labels.csv")}
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    ingest(table, validate(IngestConfig, {"from": source, "splits": splits, "stratify": True}))
    return validate(
        Job,
        {
            "table": table.model_dump(),
            "run": {"dir": str(folder / "runs")},
            "cluster": {"address": "none"},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": 4, "batch_size": 10, "precision": "fp32"},
        },
    )


def test_everybody_takes_a_prepared_table_and_says_what_it_stands_for(
    job: Job, cli: Cli, tmp_path: Path
) -> None:
    source = f"{job.table.uri}@v0"
    done = prepare(job.table, str(tmp_path / "small"), Shape(64))
    assert done.bytes_after < done.bytes_before / 4
    mine = replace(job, {"table.uri": done.table.uri, "cluster.address": "auto"})

    # The same samples in the same row groups: the order of a training is the same.
    for split in ("train", "val", "test"):
        one, other = (locate(pin(one.table, one.feed), split, one.feed) for one in (job, mine))
        assert one.ids_of(range(len(one))) == other.ids_of(range(len(other)))
        assert np.array_equal(one.labels_N, other.labels_N)
        assert np.array_equal(one.sizes_F, other.sizes_F)
        assert len(one)

    trained: list[dict[str, Any]] = []
    for number, one in enumerate((job, mine)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(dump(one))
        code, out, err = cli("train", file, "--json")
        assert code == 0, err
        trained.append(json.loads(out.splitlines()[-1]))
    assert "prepared_from" not in trained[0]
    assert trained[1]["prepared_from"] == source
    # It learns what it learns from the source.
    for found in trained:
        assert found["test"]["test_accuracy"] >= 0.9, found["test"]

    # The run, the registered version and the card say it, too.
    store = open_store(mine.run, mine.registry)
    tag = f"tags.`{runs.PREPARED_FROM}` = '{source}'"
    found_runs = store.client.search_runs([store.experiment_id], tag)
    assert len(found_runs) == 1
    assert len(found_runs[0].inputs.dataset_inputs) == 2
    name, version = trained[1]["model"].removeprefix("models:/").rsplit("/", 1)
    logged = store.client.get_model_version(name, version)
    assert logged.tags[runs.PREPARED_FROM] == source
    place = f"{found_runs[0].info.artifact_uri}/card-{logged.tags[runs.KEY]}.md"
    card = mlflow.artifacts.load_text(place)
    assert source in card
    # Test images were looked at twice: on the source, and on its copy.
    assert runs.looks(store, done.table) == runs.looks(store, done.source) == 2

    code, out, err = cli("predict", tmp_path / "1.yaml", "--json")
    found = json.loads(out.splitlines()[-1])
    assert (code, found["prepared_from"], found["images"]) == (0, source, 80), err
    code, out, err = cli(
        "drift", tmp_path / "1.yaml", f"watch.batch={{uri: {done.table.uri}}}", "--json"
    )
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["prepared_from"] == source
    assert source in Path(found["report"]).read_text("utf-8")
    # Each model's training images are known in the table that it was not trained on.
    for found, other in zip(trained, (done.table.uri, job.table.uri), strict=True):
        number = found["model"].rpartition("/")[2]
        named = f"evaluate.model={number}", f"evaluate.table={{uri: {other}}}"
        code, out, err = cli("evaluate", tmp_path / "1.yaml", *named)
        assert code == 0, err
        assert "The model has learned from 40 of the 80 labelled images here" in err
