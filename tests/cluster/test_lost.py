"""The head of the cluster is killed under each verb: one message, a failure, within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 15  # from the kill to the exit code; quiet machines take one

VERBS = {
    "clean": [],
    "train": [],
    "tune": ["search.samples=1", "search.space.train.lr=grid(0.01)"],
    "predict": [],
    "drift": [],
    "retrain": ["watch.force=true"],
}
CASES = [(verb, who) for verb in VERBS for who in ("gcs_server", "raylet")]
FAST = [("clean", "gcs_server"), ("predict", "raylet")]


def killed(who: str, *command: str) -> tuple[int, str, float]:
    """Run raypipe, kill `who` of its cluster once it is there; code, stderr, seconds from then."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "raypipe", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    told = ""
    assert process.stderr is not None
    for line in process.stderr:
        told += line
        if "Ray cluster at" in line:
            break
    below = psutil.Process(process.pid).children(recursive=True)
    victims = [p for p in below if p.name() == who]
    assert len(victims) == 1, told + process.stderr.read()
    victims[0].kill()
    began = time.monotonic()
    try:
        told += process.communicate(timeout=90)[1]
    finally:
        process.kill()
    return process.returncode, told, time.monotonic() - began


@pytest.mark.parametrize(
    ("verb", "who"),
    [pytest.param(*c, marks=[] if c in FAST else pytest.mark.chaos) for c in CASES],
)
def test_a_lost_head_is_one_message(job: Path, verb: str, who: str) -> None:
    small = ["cluster.address=local", "cluster.cpus=1", "cluster.object_store_mb=100"]
    code, told, seconds = killed(who, verb, str(job), *small, *VERBS[verb])
    messages = [line for line in told.splitlines() if line.startswith("raypipe: ")]
    assert (code, len(messages)) == (1, 1), told
    assert "Ray cluster" in messages[0] and "Traceback" not in told, told
    assert seconds < BOUND_S


@pytest.mark.chaos
@pytest.mark.parametrize("who", ["gcs_server", "raylet"])
def test_the_story_that_loses_its_head_says_so(tmp_path: Path, who: str) -> None:
    small = [f"run.dir={tmp_path}/solar", f"table.uri={tmp_path}/solar/tables/cells"]
    small += ["cluster.address=local", "cluster.object_store_mb=100"]
    code, told, seconds = killed(who, "quickstart", *small)
    messages = [line for line in told.splitlines() if line.startswith("raypipe: ")]
    assert (code, len(messages)) == (1, 1) and "Ray cluster" in messages[0], told
    assert seconds < BOUND_S
