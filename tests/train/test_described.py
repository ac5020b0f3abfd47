"""The card of a finished training says what it was trained on, and how often the test was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.config import replace, validate
from raypipe.feed.dataset import pin
from raypipe.registry import runs
from raypipe.registry.package import Reference
from raypipe.registry.store import open_store
from raypipe.tables.table import TableConfig, TableVersion, append
from raypipe.train import described, origin, trainer, unseen
from raypipe.train.job import TrainJob
from raypipe.train.publish import package_key, publish

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def published(job: TrainJob) -> str:
    """Train and register; the card as Markdown."""
    result = trainer.run(job)
    store = open_store(job.run, job.registry)
    publish(store, trainer.plan(job), result, "train")
    card = job.run.path / "packages" / package_key(job, result) / "card.md"
    return card.read_text(encoding="utf-8")


def test_numbers_of_a_test_split_say_how_often_it_was_looked_at(jobs: Jobs) -> None:
    # Trained on its validation images, the card is of the test split.
    on_all = {"train.epochs": 1, "feed.val": "train", "feed.test": "val"}
    job = jobs(**on_all)
    assert "This is look 1 at it" in published(job)

    store = open_store(job.run, job.registry)
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
        with runs.run(store, name, name, {}, table) as run_id:
            runs.log_metrics(store, run_id, metrics)
    assert "This is look 4 at it" in published(jobs(**on_all, **{"run.seed": 5}))
    # Of validation images another sentence is true.
    assert "It chose the epoch" in published(jobs(**{"train.epochs": 1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"feed.carrier": "cache"},
        {"feed.carrier": "threads"},
        {"model": {"mode": "frozen", "side_px": 32}},
    ],
    ids=["cache", "threads", "frozen"],
)
def test_a_large_split_judges_by_a_sample_and_the_card_says_so(
    changes: dict[str, Any], jobs: Jobs
) -> None:
    job = jobs(**{"train.epochs": 1, "feed.test": "val"} | changes)
    result = trainer.run(job)
    planned = trainer.plan(job)
    model = trainer.assemble(job, result)
    whole, labels_N = unseen.predict_split(job, model, planned.pinned, "val")
    most = len(labels_N) - 3
    sampled = replace(job, {"registry.judged_images": most})
    planned = trainer.plan(sampled)
    assert planned.folder == trainer.plan(job).folder, "it is the same training"

    some, some_labels_n = unseen.predict_split(sampled, model, planned.pinned, "val")
    again, _ = unseen.predict_split(sampled, model, planned.pinned, "val")
    assert again.ids == some.ids and len(set(some.ids)) == most
    place = {image_id: row for row, image_id in enumerate(whole.ids)}
    rows = [place[image_id] for image_id in some.ids]
    np.testing.assert_allclose(some.scores_NC, whole.scores_NC[rows], atol=1e-6)
    np.testing.assert_allclose(some.features_ND, whole.features_ND[rows], atol=1e-6)
    assert (some_labels_n == labels_N[rows]).all()

    assert f"Of {most} of its {len(labels_N)} images, drawn evenly" in published(sampled)
    tested = unseen.test(planned, result)
    assert tested["test_images"] == most < planned.pinned.counts["val"]


def test_images_that_were_trained_on_are_no_test(jobs: Jobs) -> None:
    """After a refit of a table without a test split, and where feed.test says so."""
    both = jobs(**{"train.epochs": 1, "feed.train": "train+val"})
    assert "The model was trained on them" in published(both)
    named = jobs(**{"train.epochs": 1, "feed.train": "train+val", "feed.test": "val"})
    assert "The model was trained on them" in published(named)
    planned, result = trainer.plan(named), trainer.run(named)
    assert unseen.test(planned, result) == {} and not (planned.folder / unseen.TEST).exists()


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
    # Rows that were left out made nothing of it.
    last = rows["image_id"].to_pylist()[max(trained) // 10]
    (tmp_path / "out.json").write_text(json.dumps([last]))
    tree["feed"]["leave_out"] = str(tmp_path / "out.json")
    job = validate(TrainJob, tree)
    text = published(job)
    assert f"| all | {max(trained)} |" not in text and f"| all | {sorted(trained)[-2]} |" in text
    said = origin.rows_of(job, trainer.plan(job).pinned)["train"]
    assert said["used"] == said["rows"] - 1


def test_every_source_has_its_row_and_the_rest_is_counted(tmp_path: Path) -> None:
    """Images of the sources 0 and null were in no row, and nothing said so."""
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}})
    ids = ["a", "b", "c", "d", "twin", "twin", None]
    columns: dict[str, Any] = {"image_id": pa.array([*ids, "t"], pa.string())}
    columns |= {"image": [b"x"] * 8, "label": ["p", "q"] * 4, "split": ["val"] * 7 + ["train"]}
    columns["source"] = pa.array([0, 0, 1, None, 1, 0, 1, 1], pa.int64())
    append(job.table.uri, pa.table(columns), "add")
    pinned = pin(job.table, job.feed)
    names = tuple(one or "" for one in ids)
    said = Reference(np.zeros((7, 2)), np.tile([0.9, 0.1], (7, 1)).astype(np.float32), names)
    found = described.judged(job, pinned, unseen.Unseen("val", said, np.array([0, 1] * 3 + [0])))
    assert [(one.name, one.images) for one in found.slices] == [("0", 2), ("1", 1), ("None", 1)]
    assert (found.left_out, found.unclear) == (0, 3)
    assert sum(one.images for one in found.slices) + found.unclear == len(ids)
