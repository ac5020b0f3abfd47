"""The card of a finished training says what it was trained on, and how often the test was seen."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.config import validate
from raypipe.registry import tracking
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import trainer
from raypipe.train.job import TrainJob
from raypipe.train.publish import package_key, publish

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def published(job: TrainJob) -> str:
    """Train and register; the card as Markdown."""
    result = trainer.run(job)
    store = tracking.open_store(job.run, job.registry)
    publish(store, trainer.plan(job), result, "train")
    card = job.run.path / "packages" / package_key(job, result) / "card.md"
    return card.read_text(encoding="utf-8")


def test_numbers_of_a_test_split_say_how_often_it_was_looked_at(jobs: Jobs) -> None:
    # Trained on its validation images, the card is of the test split.
    on_all = {"train.epochs": 1, "feed.val": "train", "feed.test": "val"}
    job = jobs(**on_all)
    assert "This is look 1 at it" in published(job)

    store = tracking.open_store(job.run, job.registry)
    version = trainer.plan(job).pinned.version
    other = TableVersion(f"{version.uri}-other", 3)
    looked = {
        "a": (version, {"test_accuracy": 0.5}),
        "b": (version, {"eval.accuracy": 0.5}),
        "c": (None, {"gate.all.champion": 0.5}),
        "no test metric": (version, {"val_accuracy": 0.5}),
        "another table": (other, {"test_accuracy": 0.5}),
    }
    for name, (table, metrics) in looked.items():
        with tracking.run(store, name, name, {}, table) as run_id:
            tracking.log_metrics(store, run_id, metrics)
    assert "This is look 4 at it" in published(jobs(**on_all, **{"run.seed": 5}))
    # Of validation images another sentence is true.
    assert "It chose the epoch" in published(jobs(**{"train.epochs": 1}))


def test_numbers_have_a_distribution_of_labels(
    trained_table: TableConfig, jobs: Jobs, tmp_path: Path
) -> None:
    rows = DeltaTable(trained_table.uri).to_pyarrow_table().sort_by("image_id")
    place = rows.column_names.index("label")
    numbers = pa.array([str(10.0 * i) for i in range(len(rows))], pa.string())
    write_deltalake(str(tmp_path / "numbers"), rows.set_column(place, "label", numbers))
    tree = jobs(**{"train.epochs": 1}).model_dump(mode="json")
    tree["table"] = {"uri": str(tmp_path / "numbers")}
    tree["model"]["task"] = "regression"
    tree["train"]["stopping"] = {"patience": None}
    text = published(validate(TrainJob, tree))
    assert "### Training labels" in text and "Training images by class" not in text
    trained = [10 * i for i, split in enumerate(rows["split"].to_pylist()) if split == "train"]
    assert f"| least | {min(trained)} |" in text and f"| all | {max(trained)} |" in text
