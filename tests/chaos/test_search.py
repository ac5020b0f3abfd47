"""A search whose driver is killed: the same command loses no trial that had finished, and finds
what it would have found.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest

from raypipe.config import dump, replace, validate
from raypipe.job import Job
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_session")]
EPOCHS, RATES = 20, (1e-6, 1e-2, 2e-6, 3e-3, 3e-6, 1e-4)


@pytest.fixture(scope="module")
def job(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("search")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    settings: dict[str, Any] = {
        "table": table.model_dump(),
        "run": {"dir": str(folder / "undisturbed")},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {
            "epochs": EPOCHS,
            "batch_size": 8,
            "precision": "fp32",
            "stopping": {"metric": "val_loss", "patience": None},
        },
        "search": {
            "samples": 1,
            "scheduler": "none",
            "keep": len(RATES),
            "space": {"train.lr": f"grid({', '.join(map(str, RATES))})"},
        },
    }
    return validate(Job, settings)


def tune(job: Job) -> subprocess.Popen[str]:
    job.run.path.mkdir(parents=True, exist_ok=True)
    file = job.run.path / "job.yaml"
    file.write_text(dump(job))
    command = [sys.executable, "-m", "raypipe", "tune", str(file), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def finished(job: Job) -> dict[str, float]:
    """Trial folder -> seconds that its epochs took, which no second training would repeat to the
    nanosecond.
    """
    found: dict[str, float] = {}
    for manifest in job.run.path.glob(
        f"search/*/trials/trial-*/*/epoch-{EPOCHS:04}-*/manifest.json"
    ):
        found[manifest.parents[2].name] = json.loads(manifest.with_name("state.json").read_text())[
            "seconds"
        ]
    return found


@pytest.fixture(scope="module")
def undisturbed(job: Job) -> dict[str, Any]:
    return ended(tune(job))


@pytest.mark.share
def test_a_search_goes_on_where_its_driver_died(
    job: Job, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    mine = replace(job, {"run.dir": str(tmp_path / "run")})
    process = tune(mine)
    deadline = time.monotonic() + 300
    while len(finished(mine)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL and not list(
        mine.run.path.glob("search/*/result.json")
    ), "killed mid-search"
    before = finished(mine)
    assert 3 <= len(before) < len(RATES)

    again = ended(tune(mine))
    after = finished(mine)
    assert before.items() <= after.items(), "no finished trial trained again"
    assert len(after) == len(RATES) == again["trials"]
    assert (again["best"], again["metrics"]["val_loss"]) == (
        undisturbed["best"],
        undisturbed["metrics"]["val_loss"],
    )

    mlflow.set_tracking_uri(again["mlflow_uri"])
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    names = [run.info.run_name for run in runs]
    assert len(names) == len(set(names)) == 1 + len(RATES), names


@pytest.mark.parametrize("ended_before", [2, 4])
def test_a_killed_search_that_keeps_one_trial_finds_the_same(
    job: Job, undisturbed: dict[str, Any], tmp_path: Path, ended_before: int
) -> None:
    """Checkpoints of trials that had ended are gone when it is killed."""
    mine = replace(job, {"run.dir": str(tmp_path / "run"), "search.keep": 1})
    process = tune(mine)
    gone = "search/*/trials/*/*/ended.json"
    deadline = time.monotonic() + 300
    while len(list(mine.run.path.glob(gone))) < ended_before and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not list(mine.run.path.glob("search/*/result.json")), "killed mid-search"

    again = ended(tune(mine))
    assert (again["best"], again["trials"]) == (undisturbed["best"], undisturbed["trials"])
    (result,) = mine.run.path.glob("search/*/result.json")
    (whole,) = job.run.path.glob("search/*/result.json")
    assert lines_of(result) == lines_of(whole)
    assert len({path.parents[1] for path in result.parent.glob("trials/*/*/epoch-*")}) == 1


def lines_of(result: Path) -> list[tuple[str, float, int]]:
    """The leaderboard without times and places."""
    trials = json.loads(result.read_text())["trials"]
    return [(trial["name"], trial["metric"], trial["epochs"]) for trial in trials]
