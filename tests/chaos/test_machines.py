"""A machine of two ends or joins while a verb runs on both (tests/two_nodes.py)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import validate
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig, append
from tests import machines
from tests.two_nodes import Notes, TwoNodes

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(machines.missing()), reason="no machines here: it needs root"),
]
EPOCHS = 10
# A group may grow as soon as there is room: the test is shorter than a minute of work.
SOON = (
    "import sys; from raypipe.train import elastic; "
    "elastic.LOOK_S, elastic.GROW_AFTER_S, elastic.RESTART_S = 1.0, 2.0, 0.0; "
    "from raypipe.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def nodes(photos: Path, tmp_path: Path) -> Iterator[TwoNodes]:
    """One node; another may join."""
    table = TableConfig(uri=str(tmp_path / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    options = {"notes": str(tmp_path / "notes"), "step_s": 0.5}
    with TwoNodes(tmp_path) as found:
        found.write(
            "job.yaml",
            run={"name": "lost", "dir": str(tmp_path / "run")},
            table=table.model_dump(),
            feed={"carrier": "threads"},
            model={
                "name": "file:tests.noted_model:net",
                "options": options,
                "mode": "finetune",
                "pretrained": False,
                "side_px": 32,
                "dropout": 0.0,
            },
            train={
                "epochs": EPOCHS,
                "batch_size": 8,
                "lr": 0.01,
                "precision": "fp32",
                "workers": [1, 2],
                "checkpoint_steps": 2,
                "timeout_s": 20,
                "result": "last",
                "stopping": {"patience": None},
            },
        )
        yield found


@pytest.fixture
def notes(nodes: TwoNodes) -> Notes:
    return Notes(nodes.folder / "notes")


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    until = time.monotonic() + 120
    while not reached():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def finished(nodes: TwoNodes) -> list[dict[str, float]]:
    (result,) = (nodes.folder / "run").glob("train/*/result.json")
    found: list[dict[str, float]] = json.loads(result.read_text())["history"]
    return found


@pytest.mark.parametrize("how", ["kill", "unplug"])
def test_a_machine_that_dies_mid_train_costs_no_epoch(
    how: str, nodes: TwoNodes, notes: Notes
) -> None:
    """unplug: its cable is drawn, as in a power cut: no connection is closed, packets vanish."""
    two, log = nodes.join(), nodes.folder / "log"
    training = nodes.popen("train", nodes.folder / "job.yaml", log=log)
    wait_for(lambda: notes.machines("trained") == {"one", "two"}, training, log)
    wait_for(lambda: "epoch   2" in log.read_text(), training, log)
    getattr(two, how)()
    began = time.monotonic()
    wait_for(lambda: "going on from the newest checkpoint" in log.read_text(), training, log)
    print(f"\n{how}: noticed after {time.monotonic() - began:.1f} s")
    notes.clear()
    assert training.wait(240) == 0, log.read_text()
    assert notes.machines("trained") == {"one"}
    history = finished(nodes)
    assert len(history) == EPOCHS
    assert "Traceback" not in log.read_text()
    # An epoch is saved before it is told.
    for epoch in (1, 2):
        assert log.read_text().count(f"epoch   {epoch} of {EPOCHS}") == 1, "trained again"

    # It has learned what a training without a fault learns.
    alone = [f"run.dir={nodes.folder}/alone", "train.workers=1", "model.options.step_s=0"]
    nodes.told("train", nodes.folder / "job.yaml", *alone)
    (result,) = (nodes.folder / "alone").glob("train/*/result.json")
    undisturbed = json.loads(result.read_text())["history"]
    for found, expected in zip(history, undisturbed, strict=True):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-3)


def test_a_machine_that_joins_mid_train_is_used(nodes: TwoNodes, notes: Notes) -> None:
    log = nodes.folder / "log"
    env = {"RAY_ADDRESS": nodes.address}
    words = ["-c", SOON, "train", str(nodes.folder / "job.yaml"), "model.options.step_s=1"]
    training = nodes.one.popen("python", *words, env=env, log=log)
    wait_for(lambda: "epoch   1" in log.read_text(), training, log)
    assert notes.machines("trained") == {"one"}
    nodes.join()
    began = time.monotonic()
    wait_for(lambda: "two" in notes.machines("trained"), training, log)
    print(f"\nused {time.monotonic() - began:.1f} s after it had joined")
    notes.clear()
    assert training.wait(240) == 0, log.read_text()
    assert notes.machines("trained") == {"one", "two"}
    assert len(finished(nodes)) == EPOCHS


def test_a_machine_that_dies_while_both_predict_loses_no_row(
    nodes: TwoNodes, notes: Notes, photos: Path
) -> None:
    nodes.told("train", nodes.folder / "job.yaml", "train.epochs=1", "model.options.step_s=0")
    images = [file.read_bytes() for file in sorted(photos.glob("*.png"))]
    many = {"image_id": [str(n) for n in range(9600)], "image": pa.array(images * 160, pa.binary())}
    append(str(nodes.folder / "many"), pa.table(many), "many")
    two, log = nodes.join(), nodes.folder / "log"
    notes.clear()
    out = nodes.folder / "out"
    where: list[Any] = [f"predict.table={{uri: {nodes.folder}/many}}", f"predict.out={out}"]
    predicting = nodes.popen("predict", nodes.folder / "job.yaml", *where, log=log)
    wait_for(lambda: "two" in notes.machines("predicted"), predicting, log)
    two.kill()
    assert predicting.wait(240) == 0, log.read_text()
    table = ImageTable(str(out))
    found = scan.rows(table, table.pin(), ["image_id"])["image_id"].to_pylist()
    assert sorted(map(int, found)) == list(range(9600))
    assert "Traceback" not in log.read_text()
