"""Claim: the sink of type azure_monitor takes at most 1 % of a training's CPU seconds, and a record
costs the training's own thread less than a millisecond.

python -m benchmarks.sink --json [--epochs 30]

One run of a real small training: small_cnn on drawn pictures, in this process, by the trainer that
`raypipe train` calls. Its records go over HTTPS to a service of the documented protocol, which is a
process of its own. Counted are the CPU seconds of each thread of the sink: taking a record, gzip,
TLS, HTTP, and the first import of Azure's client. The token comes from the environment: `login_s`
is what azure-identity's import and its credential take once, without a request. The whole is the
CPU time of this process from before the first epoch to after the last delivery. `outage` is the
same with a service that answers 503 to everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.feed import commit, machine  # noqa: E402
from raypipe.config import RunConfig, validate  # noqa: E402
from raypipe.monitor.monitor import Monitor  # noqa: E402
from raypipe.monitor.settings import AzureMonitorConfig  # noqa: E402
from raypipe.tables.ingest import IngestConfig, ingest  # noqa: E402
from raypipe.tables.table import TableConfig  # noqa: E402
from raypipe.train import telling, trainer  # noqa: E402
from raypipe.train.job import TrainJob  # noqa: E402

IMAGES, SIDE_PX = 1600, 96
SERVER = [sys.executable, "-m", "tests.ingestion_server"]
RULE, TOKEN = "dcr-00000000000000000000000000000001", "a-token-of-the-tests-alone"


def drawn(folder: Path) -> TableConfig:
    """A table of pictures: bright spots or none."""
    random = np.random.default_rng(7)
    pictures = folder / "pictures"
    for number in range(IMAGES):
        label = ("plain", "spots")[number % 2]
        pixels = random.integers(0, 80, (SIDE_PX, SIDE_PX, 3), np.uint8)
        if label == "spots":
            at = random.integers(8, SIDE_PX - 8, 2)
            pixels[at[0] : at[0] + 8, at[1] : at[1] + 8] = 250
        (pictures / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(pictures / label / f"{number}.png")
    table = TableConfig(uri=str(folder / "table"))
    source = {"from": {"images": str(pictures)}, "splits": {"train": 0.8, "val": 0.2}, "workers": 0}
    ingest(table, validate(IngestConfig, source))
    return table


def measure(folder: Path, table: TableConfig, epochs: int, endpoint: str) -> dict[str, Any]:
    """One training with a sink. Seconds are CPU seconds unless they are called wall."""
    job = validate(
        TrainJob,
        {
            "table": table.model_dump(),
            "run": {"dir": str(folder / "run")},
            "cluster": {"address": "none"},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {
                "epochs": epochs,
                "batch_size": 32,
                "lr": 0.01,
                "precision": "fp32",
                "stopping": {"patience": None},
            },
        },
    )
    sink = {"type": "azure_monitor", "endpoint": endpoint, "rule": RULE}
    cfg = validate(AzureMonitorConfig, sink | {"token_env": "SINK_TOKEN"})
    planned = trainer.plan(job)
    began, wall = time.process_time(), time.monotonic()
    monitor = Monitor(RunConfig(name="sink", dir=str(folder / "run")), cfg, "train")
    report = telling.epochs([monitor], planned.job, planned.key, lambda metrics, state: None)
    result = trainer.run(planned, report)
    telling.finished([monitor], planned.job, result)
    trained_wall_s = time.monotonic() - wall
    monitor.close()
    wall_s, cpu_s = time.monotonic() - wall, time.process_time() - began
    spent = monitor.spent()
    return {
        "epochs": epochs,
        "records": int(spent["records"]),
        "cpu_s": round(cpu_s, 2),
        "sink_cpu_s": round(spent["cpu_s"], 4),
        "sink_percent": round(100 * spent["cpu_s"] / (cpu_s - spent["cpu_s"]), 3),
        "note_ms": round(1000 * spent["note_cpu_s"] / max(1, spent["records"]), 3),
        "wall_s": round(wall_s, 2),
        "end_wall_s": round(wall_s - trained_wall_s, 3),
    }


def login_s() -> float:
    """CPU seconds until there is a credential that could ask for a token."""
    code = (
        "import time, azure.monitor.ingestion; t = time.process_time()\n"
        "from azure.identity import DefaultAzureCredential; DefaultAzureCredential()\n"
        "print(time.process_time() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return round(float(done.stdout), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--epochs", type=int, default=30)
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "commit": commit()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = drawn(folder)
        os.environ["SINK_TOKEN"] = TOKEN
        os.environ["REQUESTS_CA_BUNDLE"] = str(folder / "ca.pem")
        for case, more in (("sent", []), ("outage", ["503"])):
            command = [*SERVER, str(folder), *more]
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            try:
                found[case] = measure(folder / case, table, asked.epochs, endpoint)
            finally:
                server.kill()
                server.wait()
        found["login_s"] = login_s()
        taken = (folder / "taken.jsonl").read_text().splitlines()
        found["sent"]["arrived"] = len({json.loads(line)[1]["RecordId"] for line in taken})
    print(json.dumps(found) if asked.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
