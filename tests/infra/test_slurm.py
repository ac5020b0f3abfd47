"""infra/ray/slurm/raypipe.sh on a real SLURM of this machine (slurm.py): two nodes with odd names.

The jobs start Ray by themselves.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.infra.slurm import NODES, Slurm, left_of

pytestmark = pytest.mark.cloud


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def config(slurm: Slurm, photos: Path) -> str:
    """A small table, and a training of two processes that takes seconds."""
    folder = slurm.folder
    tree = {
        "run": {"name": "tiny"},
        "table": {"uri": str(folder / "cells")},
        "ingest": {
            "from": {"images": str(photos), "labels": str(photos / "labels.csv")},
            "splits": {"train": 0.5, "val": 0.25, "test": 0.25},
        },
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "side_px": 16},
        "train": {"epochs": 2, "batch_size": 8, "workers": 2, "precision": "fp32"},
        "cluster": {"usage_every_s": None},
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    ingest = ["ingest", str(file), "ingest.workers=0", f"run.dir={folder}/ingest"]
    raypipe = str(Path(sys.executable).with_name("raypipe"))
    done = subprocess.run([raypipe, *ingest], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(file)


def test_two_jobs_side_by_side_train_while_one_waits_for_its_late_worker(
    slurm: Slurm, config: str
) -> None:
    one = ("--cpus-per-task=2", "--job-name=a name with spaces", f"--nodelist={NODES[0]}")
    two = ("--cpus-per-task=2", "--nodes=2")
    folders = [slurm.folder / "run of one", slurm.folder / "run-of-two"]
    with slurm.stopped(NODES[1]):
        second = slurm.submit("train", config, f"run.dir={folders[1]}", options=two)
        slurm.wait_for(second, "Ray runtime started", 120)
        first = slurm.submit("train", config, f"run.dir={folders[0]}", options=one)
        time.sleep(5)  # a head that waits
        assert "Ray on" not in slurm.log(second)
    assert slurm.ended(first, 240) == ("COMPLETED", 0), slurm.log(first)
    assert slurm.ended(second, 240) == ("COMPLETED", 0), slurm.log(second)
    for job, nodes, folder in ((first, 1, folders[0]), (second, 2, folders[1])):
        log = slurm.log(job)
        assert f"Ray on {nodes} node(s), head {NODES[0]}" in log
        assert f"with {2 * nodes} CPUs" in log  # those of the job, not of the machine
        assert "Training small_cnn (finetune) with 2 workers" in log
        assert "stopped     after all 2 epochs" in log
        assert next(folder.rglob("model.safetensors"), None) or list(folder.rglob("*.safetensors"))
        assert left_of(job) == []
    # Two tokens, and SLURM shows none.
    shown = slurm.run("scontrol", "show", "job", first) + slurm.log(first)
    assert "RAY_AUTH_TOKEN" not in shown


def test_a_job_that_is_told_to_end_saves_first_and_a_cancelled_one_leaves_nothing(
    slurm: Slurm, config: str
) -> None:
    words = ("train", config, "train.epochs=4000", "train.stopping.patience=null")
    options = ("--cpus-per-task=2",)
    told = slurm.submit(*words, f"run.dir={slurm.folder}/told", options=options)
    slurm.wait_for(told, r"epoch +2 of", 180)
    slurm.run("scancel", "--batch", "--signal=TERM", told)
    state, code = slurm.ended(told, 120)
    assert (state, code) == ("FAILED", 1), slurm.log(told)
    assert "is saved. Run it again" in slurm.log(told)
    assert left_of(told) == []
    # The same command goes on; it is cancelled.
    again = slurm.submit(*words, f"run.dir={slurm.folder}/told", options=options)
    slurm.wait_for(again, r"epoch +\d+ of", 180)
    assert "epoch   1 of" not in slurm.log(again)
    slurm.run("scancel", again)
    assert slurm.ended(again, 60)[0] == "CANCELLED"
    until = time.monotonic() + 60
    while left_of(again) and time.monotonic() < until:
        time.sleep(0.2)
    assert left_of(again) == []


def test_a_worker_that_never_comes_ends_the_job_with_a_reason(slurm: Slurm, config: str) -> None:
    with slurm.stopped(NODES[1]):
        job = slurm.submit("train", config, options=("--nodes=2",), RAYPIPE_NODES_WAIT_S="15")
        slurm.wait_for(job, "1 of 2 nodes joined in 15 s", 120)
    state, code = slurm.ended(job, 120)
    assert (state, code) == ("FAILED", 1)
    assert left_of(job) == []


def test_what_is_missing_is_named_before_ray_starts(slurm: Slurm, config: str) -> None:
    cases = [
        (("train", config), {"RAYPIPE_ENV": None}, "RAYPIPE_ENV: the folder of raypipe"),
        (("train", config), {"RAYPIPE_ENV": "/nowhere"}, "No bin/raypipe in RAYPIPE_ENV=/nowhere"),
        ((), {}, "No verb"),
    ]
    for words, env, said in cases:
        job = slurm.submit(*words, **env)
        state, code = slurm.ended(job, 60)
        assert state == "FAILED" and code in (1, 2, 127)
        assert said in slurm.log(job) and "Ray runtime" not in slurm.log(job)


def test_without_slurm_it_says_so() -> None:
    from tests.infra.slurm import SCRIPT

    done = subprocess.run(["bash", str(SCRIPT), "train"], capture_output=True, text=True, env={})
    assert done.returncode != 0 and "this is a script for sbatch" in done.stderr
