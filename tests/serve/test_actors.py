"""predict.gpus: actors predict. The cluster only pretends to have a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.tables.table import append
from tests.serve.conftest import Registered

ROOT = Path(__file__).parents[2]
PREDICTS = """
import json, os, sys
from raypipe.cluster import connect
connect.prepare_environment()
import ray
from raypipe.config import RunConfig
from raypipe.errors import ClusterError
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve import batch, pieces, workers
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import TableConfig

folder, registry = sys.argv[1:]
ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
pieces.PIECE_ROWS, workers.MOST_PIECES = 10, 1
store = open_store(RunConfig(name="mixed", dir=registry), RegistryConfig())
run, table = RunConfig(name="mixed", dir=folder), TableConfig(uri=folder + "/t")

# The second actor dies with its third call, and is made again.
plain = workers._OnGpu.predict
def dies(self, *given):
    self.calls = getattr(self, "calls", 0) + 1
    mark = folder + "/died"
    if self.calls == 3 and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
    return plain(self, *given)
workers._OnGpu.predict = dies

done = batch.predict(store, run, table, PredictConfig(out=folder + "/out", gpus=0.5))
rows = batch.read_rows(folder + "/out", done.key, ["image_id", "label"]).sort_by("image_id")
try:
    batch.predict(store, run, table, PredictConfig(out=folder + "/more", gpus=2))
except ClusterError as e:
    print("refused:", e)
print("done:", json.dumps([done.made, os.path.exists(folder + "/died"), rows["label"].to_pylist()]))
"""


@pytest.mark.slow
def test_actors_predict_and_one_that_dies_costs_no_row(
    registered: Registered, tmp_path: Path
) -> None:
    columns = {"image_id": [f"{n:03d}" for n in range(200)], "image": registered.images}
    rows = pa.table(columns)
    for start in range(0, 200, 10):
        append(str(tmp_path / "t"), rows.slice(start, 10), "ten")
    command = [sys.executable, "-c", PREDICTS, str(tmp_path), str(registered.files.parent / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray prints lines of its own.
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "predict.gpus=2, the cluster has 1" in said["refused"]
    assert json.loads(said["done"]) == [200, True, registered.answers.labels]
