"""Features on a cluster with a GPU: actors compute them. The cluster only pretends to have one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.tables.table import TableConfig

ROOT = Path(__file__).parents[2]
EMBEDS = """
import json, os, sys
from raypipe.cluster import connect
connect.prepare_environment()
import numpy as np
import ray
from raypipe.config import validate
from raypipe.feed import feature_tasks
from raypipe.feed.dataset import pin
from raypipe.feed.feed import fetch
from raypipe.train import launch, trainer
from raypipe.train.job import TrainJob

folder, uri = sys.argv[1:]
ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)

# An actor dies with the first call that any of them gets, and is made again.
plain = feature_tasks._OnGpu.call
def dies(self, *given):
    mark = folder + "/died"
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
    return plain(self, *given)
feature_tasks._OnGpu.call = dies

def made(name, gpu):
    fields = {
        "run": {"name": name, "dir": f"{folder}/{name}"}, "table": {"uri": uri},
        "model": {"mode": "frozen", "side_px": 32}, "train": {"gpu": gpu},
    }
    job = validate(TrainJob, fields)
    sources = trainer.sources(job, pin(job.table, job.feed), ["train", "val"])
    return launch.feature_gpus(job.train), [fetch(sources[s].inputs) for s in ("train", "val")]

share, on_gpu = made("gpu", "auto")
died = os.path.exists(folder + "/died")
none, on_cpu = made("cpu", False)
same = all(np.array_equal(a, b) for a, b in zip(on_gpu, on_cpu, strict=True))
print("told: " + json.dumps([share, died, none, same, sum(map(len, on_gpu))]))
"""


@pytest.mark.slow
def test_actors_on_a_gpu_compute_what_tasks_do_and_one_that_dies_costs_nothing(
    half_labelled: TableConfig, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", EMBEDS, str(tmp_path), half_labelled.uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told = next(line for line in done.stdout.splitlines() if line.startswith("told: "))
    assert json.loads(told.removeprefix("told: ")) == [0.5, True, 0.0, True, 60]
