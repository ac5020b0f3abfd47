"""The same search on two nodes, and as a job that is submitted to a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import dump, validate
from raypipe.job import Job

pytestmark = pytest.mark.slow
Searches = Callable[..., Job]
ROOT = Path(__file__).parents[2]
GRID = {"search.samples": 1, "search.space": {"train.lr": "grid(1e-2, 1e-6, 2e-2, 2e-6)"}}


def written(searches: Searches, folder: Path) -> str:
    job = validate(Job, searches(folder / "run", **GRID).model_dump())
    (folder / "job.yaml").write_text(dump(job))
    return str(folder / "job.yaml")


def told_by(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The verb's JSON: the last line that is one."""
    assert process.returncode == 0, process.stdout + process.stderr
    return dict(
        json.loads([line for line in process.stdout.splitlines() if line.startswith("{")][-1])
    )


@pytest.mark.share
def test_a_search_runs_on_two_nodes(
    searches: Searches, own_ray: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    notes = tmp_path / "notes"
    command = [
        sys.executable,
        "-m",
        "tests.search.two_nodes",
        written(searches, tmp_path),
        str(notes),
        port,
    ]
    told = told_by(
        subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | own_ray
        )
    )
    assert told["trials"] == 4 and told["best"]["train.lr"] >= 1e-2
    ran = {node.name: len(list(node.iterdir())) for node in notes.iterdir()}
    assert len(ran) == 2 and sum(ran.values()) >= 4, f"trials by node: {ran}"


@pytest.mark.share
def test_a_search_is_submitted(ray_session: str, searches: Searches, tmp_path: Path) -> None:
    """As the README says, to the cluster of this test session."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", ray_session]
    how = ["--runtime-env", "infra/ray/runtime_env.yaml", "--working-dir", ".", "--"]
    job = [sys.executable, "jobs/tune.py", written(searches, tmp_path), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for _ in range(6):
        done = subprocess.run(
            [*ray, *how, *job],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=environment,
        )
        if (
            "No available agent" not in done.stderr
        ):  # on a busy machine Ray's agent comes up after the dashboard
            break
        time.sleep(10)
    told = told_by(done)
    assert told["trials"] == 4 and told["best"]["train.lr"] >= 1e-2
    assert list((tmp_path / "run").glob("search/*/result.json"))


@pytest.mark.share
def test_a_submitted_verb_has_the_exit_code_of_its_job(ray_session: str, tmp_path: Path) -> None:
    """A model that is missing is found on the cluster only: its code and message come back."""
    job = tmp_path / "job.yaml"
    job.write_text(f"run: {{dir: {tmp_path / 'run'}}}\ntable: {{uri: {tmp_path / 'nothing'}}}\n")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "raypipe", "predict", str(job), "--submit", ray_session]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "ended with exit code 2" in done.stderr, said
    assert "nothing" in done.stdout and "Traceback" not in said, said
