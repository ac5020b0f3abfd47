"""Tags, graded probabilities and numbers go the whole way: foreign Delta table, training, MLflow,
predictions, retrain.

A picture is bright to a degree, and its stripes stand or lie. At night the light is blue, and what
is dark counts as bright.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from PIL import Image

from raypipe.cli import verbs
from raypipe.cli.console import Console
from raypipe.config import replace, validate
from raypipe.job import Job
from raypipe.registry import promote
from raypipe.registry.store import open_store
from raypipe.tables import scan
from raypipe.tables.table import ImageTable

SIDE = 32
Label = Callable[[float, bool], Any]
TASKS: dict[str, tuple[pa.DataType, Label]] = {
    "multi_label": (
        pa.list_(pa.string()),
        lambda level, upright: ["bright"] * (level > 0.5) + ["upright"] * upright,
    ),
    "probability": (pa.float64(), lambda level, upright: level),
    "regression": (
        pa.string(),
        lambda level, upright: f"{500 + 3000 * level:.0f}",
    ),  # lux, as some export has it
}


def picture(level: float, upright: bool, night: bool, rng: np.random.Generator) -> bytes:
    waves_S = np.sin(np.arange(SIDE) * 2 * np.pi / rng.uniform(4, 8) + rng.uniform(0, 6))
    grey_HW = (
        75
        + 100 * ((1 - level) if night else level)
        + 60 * (waves_S[None] if upright else waves_S[:, None])
    )
    light = np.array([0.2, 0.2, 1.0] if night else [1.0, 1.0, 1.0])
    pixels_HWC = np.broadcast_to(grey_HW, (SIDE, SIDE))[..., None] * light + rng.normal(
        0, 8, (SIDE, SIDE, 3)
    )
    out = io.BytesIO()
    Image.fromarray(pixels_HWC.clip(0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def rows(task: str, source: str, count: int) -> pa.Table:
    """One in ten has no label."""
    held, label = TASKS[task]
    rng = np.random.default_rng([len(source), count])
    levels, uprights = rng.integers(0, 4, count) / 3, rng.random(count) < 0.5
    seen = list(zip(levels.tolist(), uprights.tolist(), strict=True))
    return pa.table(
        {
            "image_id": [f"{source}-{i:03d}" for i in range(count)],
            "image": pa.array(
                [picture(*what, source == "night", rng) for what in seen], pa.binary()
            ),
            "label": pa.array(
                [None if i % 10 == 9 else label(*what) for i, what in enumerate(seen)], held
            ),
            "split": [("train", "train", "val", "test")[i % 4] for i in range(count)],
            "source": [source] * count,
        }
    )


@pytest.fixture(params=list(TASKS))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    write_deltalake(str(tmp_path / "table"), rows(request.param, "day", 240))
    return validate(
        Job,
        {
            "run": {"name": request.param, "dir": str(tmp_path / "run")},
            "table": {"uri": str(tmp_path / "table")},
            "model": {
                "name": "small_cnn",
                "mode": "finetune",
                "pretrained": False,
                "task": request.param,
                "dropout": 0.0,
            },
            "train": {
                "epochs": 20,
                "batch_size": 16,
                "lr": 0.01,
                "precision": "fp32",
                "stopping": {"patience": None},
            },
            "gate": {"tolerance": 0.1},
            "watch": {"force": True, "retrain_samples": 1},
        },
    )


def mean_error(task: str, said: dict[str, str], known: dict[str, str | None]) -> float:
    """Of the labelled test images: the share that is wrong, or the mean absolute error in units of
    the labels' range.
    """
    wanted = {i: label for i, label in known.items() if label is not None}
    if task == "multi_label":
        return float(np.mean([said[i] != tags for i, tags in wanted.items()]))
    errors = [abs(float(said[i]) - float(label)) for i, label in wanted.items()]
    return float(np.mean(errors)) / (3000 if task == "regression" else 1)


def test_a_table_becomes_a_champion_that_predicts_and_is_beaten(ray_session: str, job: Job) -> None:
    console, task = Console(as_json=True), job.model.task
    trained = verbs.run("train", job, console)
    assert trained["champion"] == f"{task}/1"

    predicted = verbs.run("predict", job, console)
    assert predicted["images"] == predicted["made"] == 240
    # The second time all of it is found.
    again = verbs.run("predict", job, console)
    assert again.pop("spent")["device_s"] == 0 < predicted.pop("spent")["device_s"]
    assert again == predicted | {"made": 0}
    table, out = ImageTable.open(job.table), ImageTable(str(job.run.path / "predictions"))
    told = scan.rows(out, out.pin(), ["image_id", "label"]).to_pylist()
    said = {r["image_id"]: r["label"] for r in told}
    test = scan.rows(
        table, table.pin(), ["image_id", "label", "image"], {"split": "test"}
    ).to_pylist()
    error = mean_error(task, said, {r["image_id"]: r["label"] for r in test})
    assert error < 0.15
    if task != "multi_label":
        assert list(predicted["labels"]) == ["least", "mean", "most"]
        assert (
            predicted["labels"]["least"] < predicted["labels"]["mean"] < predicted["labels"]["most"]
        )

    store = open_store(job.run, job.registry)
    served = mlflow.pyfunc.load_model(f"models:/{task}@champion").predict(
        pd.DataFrame({"image": [r["image"] for r in test]})
    )
    by_mlflow, by_us = served["label"].tolist(), [said[r["image_id"]] for r in test]
    assert (
        by_mlflow == by_us
        if task == "multi_label"
        else np.allclose(pd.to_numeric(by_mlflow), pd.to_numeric(by_us), rtol=1e-4)
    )

    write_deltalake(job.table.uri, rows(task, "night", 120), mode="append")
    done = verbs.run("retrain", job, console)
    assert done["promoted"], done["reason"]
    assert done["champion"] == f"{task}/2" == str(promote.require_champion(store))
    measure = "accuracy" if task == "multi_label" else "mean absolute error"
    assert {s["measure"] for s in done["slices"].values()} == {measure}
    assert {name: s["images"] for name, s in done["slices"].items()} == {"day": 48, "night": 24}
    assert (
        verbs.run("retrain", job, console)["slices"] != {}
    )  # run again: compared once more, nothing breaks
    assert done["reason"].startswith("Promoted: " + ("+" if task == "multi_label" else "error "))


# Numbers between 0 and 1 are compared as all numbers are.
@pytest.mark.parametrize("job", ["multi_label", "regression"], indirect=True)
def test_what_is_no_better_or_hardly_tested_is_refused_with_the_reason(
    ray_session: str, job: Job
) -> None:
    """The same data, settings and seed: the challenger is the champion. With another seed it is
    hardly another model.
    """
    console = Console(as_json=True)
    # From the champion's weights the challenger trains on, and may well be better.
    job = replace(job, {"watch.retrain_from": "pretrained"})
    verbs.run("train", job, console)
    done = verbs.run("retrain", job, console)
    assert done["challenger"] is None and not done["promoted"]
    assert f"give {job.model.task}/1 again: there is no challenger" in done["reason"]
    job = replace(job, {"run.seed": job.run.seed + 1})
    done = verbs.run("retrain", job, console)
    assert not done["promoted"]
    assert done["reason"].startswith("Not compared: 48 labelled test images (one of each group, ")
    done = verbs.run("retrain", replace(job, {"gate.least_rows": 40}), console)
    assert not done["promoted"]
    assert done["reason"].startswith("Refused: no gain beyond chance")
    assert done["champion"] == f"{job.model.task}/1"
    # Images of one group are one row.
    done = verbs.run("retrain", replace(job, {"watch.group": "source"}), console)
    assert done["reason"].startswith("Not compared: 1 labelled test images (one of each group, ")
