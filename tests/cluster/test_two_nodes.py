"""Two machines, each with its own network, temporary folder and processes, work as one cluster.

They share the folder of the run and the tables; the registry is an `mlflow server` on a third
machine. The model notes on which machine it was built, trained and predicted.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from raypipe.config import validate
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig, append
from tests import machines
from tests.two_nodes import MLFLOW, Notes, TwoNodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(machines.missing()), reason="no machines here: it needs root"),
]
BOTH = {"one", "two"}
TOKEN = "a-token-of-the-test-of-two-nodes"
PORT = 8123


@pytest.fixture(scope="module")
def nodes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("nodes")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    with TwoNodes(folder) as both:
        # It takes as long to start as Ray's second node.
        registry = both.start_mlflow()
        both.join()
        both.store.listens(MLFLOW)
        both.write("job.yaml", **job(folder, table, registry))
        yield both
    for machine in (both.one, both.two):
        assert machine is not None and not psutil.pid_exists(machine.pid)


def job(folder: Path, table: TableConfig, registry: str) -> dict[str, Any]:
    train = {"epochs": 3, "batch_size": 8, "lr": 0.01, "precision": "fp32", "timeout_s": 30}
    options = {"notes": str(folder / "notes")}
    return {
        "run": {"name": "two", "dir": str(folder / "run")},
        "table": {"uri": table.uri},
        "registry": {"uri": registry},
        # A cache would keep one of the two CPUs for its decode tasks.
        "feed": {"carrier": "threads"},
        "model": {
            "name": "file:tests.noted_model:net",
            "options": options,
            "mode": "finetune",
            "pretrained": False,
            "side_px": 32,
            "dropout": 0.0,
        },
        "train": train,
        "search": {"samples": 1, "space": {"train.lr": "grid(1e-2, 1e-3, 2e-3, 4e-3)"}},
        "serve": {"port": PORT, "host": "0.0.0.0", "replicas": 2, "keep": 0},
    }


@pytest.fixture
def notes(nodes: TwoNodes) -> Notes:
    found = Notes(nodes.folder / "notes")
    found.clear()
    return found


def history(folder: Path) -> list[dict[str, float]]:
    (result,) = folder.glob("train/*/result.json")
    found: list[dict[str, float]] = json.loads(result.read_text())["history"]
    return found


def test_a_training_takes_both_nodes_and_learns_what_it_learns_on_one(
    nodes: TwoNodes, notes: Notes
) -> None:
    config = nodes.folder / "job.yaml"
    done = nodes.run("train", config, "train.workers=2", "--json")
    assert done.returncode == 0, done.stderr
    # Nothing else, though MLflow's client likes to print where a run is.
    assert json.loads(done.stdout)["champion"] == "two/1"
    assert notes.machines("trained") == BOTH
    notes.clear()
    alone = f"run.dir={nodes.folder}/alone"
    nodes.told("train", config, "train.workers=1", alone, "run.name=alone")
    assert notes.machines("trained") == {"one"}
    both, one = history(nodes.folder / "run"), history(nodes.folder / "alone")
    assert len(both) == len(one) == 3
    for found, expected in zip(both, one, strict=True):
        for name in ("train_loss", "val_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_search_tries_on_both_nodes(nodes: TwoNodes, notes: Notes) -> None:
    found = nodes.told("tune", nodes.folder / "job.yaml", "run.name=searched")
    assert found["trials"] == 4 and found["model"] == "searched/1"
    assert notes.machines("trained") == BOTH


def test_both_nodes_predict_a_table(nodes: TwoNodes, notes: Notes, photos: Path) -> None:
    images = [file.read_bytes() for file in sorted(photos.glob("*.png"))]
    many = {"image_id": [str(n) for n in range(4800)], "image": pa.array(images * 80, pa.binary())}
    append(str(nodes.folder / "many"), pa.table(many), "many")
    out = nodes.folder / "out"
    where = [f"predict.table={{uri: {nodes.folder}/many}}", f"predict.out={out}"]
    found = nodes.told("predict", nodes.folder / "job.yaml", *where)
    assert (found["images"], found["made"], found["broken"]) == (4800, 4800, 0)
    assert notes.machines("predicted") == BOTH
    table = ImageTable(str(out))
    rows = scan.rows(table, table.pin(), ["image_id", "label"])
    assert sorted(map(int, rows["image_id"].to_pylist())) == list(range(4800))
    # The same image, the same answer, whichever node gave it.
    by_image: dict[int, set[str]] = {}
    for image_id, label in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        by_image.setdefault(int(image_id) % 60, set()).add(label)
    assert {len(labels) for labels in by_image.values()} == {1}


ASK = """
import sys, urllib.request
head = {"Authorization": "Bearer " + sys.argv[3], "Content-Type": "image/png"}
image = open(sys.argv[2], "rb").read()
asked = urllib.request.Request(sys.argv[1] + "/predict", image, head)
print(urllib.request.urlopen(asked, timeout=30).read().decode())
"""


def test_replicas_on_both_nodes_answer(nodes: TwoNodes, notes: Notes, photos: Path) -> None:
    log = nodes.folder / "serve.log"
    env = {"RAYPIPE_SERVE_TOKEN": TOKEN}
    server = nodes.popen("serve", nodes.folder / "job.yaml", env=env, log=log)
    until = time.monotonic() + 120
    while "serving" not in log.read_text():
        assert server.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.2)
    notes.clear()
    assert nodes.two is not None
    image = str(shutil.copy(photos / "00.png", nodes.folder))
    said = []
    # A third machine asks each of them.
    for machine in (nodes.one, nodes.two):
        there = nodes.store.run(
            "python", "-c", ASK, f"http://{machine.address}:{PORT}", image, TOKEN
        )
        assert there.returncode == 0, there.stderr
        said.append(json.loads(there.stdout)["label"])
    assert notes.machines("predicted") == BOTH and said[0] == said[1] == "warm"
    assert TOKEN not in log.read_text()
    for process in psutil.Process(server.pid).children():
        process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0, log.read_text()
    for machine in (nodes.one, nodes.two):
        left = [name for name in map(psutil.Process.name, machine.processes()) if "eplica" in name]
        assert not left


def test_a_run_folder_that_one_node_does_not_see_is_one_message(
    nodes: TwoNodes, notes: Notes
) -> None:
    """At once, and not when the first checkpoint lacks a part."""
    config, where = nodes.folder / "job.yaml", "run.dir=/tmp/of-one"
    for verb, workers in (("train", 2), ("tune", 1)):
        done = nodes.run(verb, config, where, f"train.workers={workers}", timeout_s=60)
        said = [line for line in done.stderr.splitlines() if line.startswith("raypipe: ")]
        assert done.returncode == 2 and len(said) == 1, done.stderr
        assert "10.77.0.12 and this node do not share run.dir (got '/tmp/of-one')" in said[0]
        assert "a folder that all nodes share" in said[0] and "Traceback" not in done.stderr
    assert not notes.machines("built")
    assert not list(nodes.one.path("/tmp/of-one").rglob(".seen-*"))
