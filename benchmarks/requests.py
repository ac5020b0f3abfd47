"""Claim: what planning a run once saves where each request takes time.

`raypipe train` on a table behind moto's S3 and a relay that sleeps DELAY_S before each answer, on
two checkouts in turn: `before` and this one. The same 60 small photographs in 4 files, two epochs
of a small network in this process, a new run folder each time. Log reads are requests for
`_last_checkpoint`, one for each time the table is opened.

    python -m benchmarks.requests BEFORE [--json]    # BEFORE: a checkout of an older commit
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DELAY_S, PAIRS, FILES, PHOTOS = 0.02, 3, 4, 60
OPTIONS = {
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "ours",
    "AWS_SECRET_ACCESS_KEY": "only-on-loopback",
}


@contextmanager
def served(command: list[str], folder: Path) -> Iterator[str]:
    """The address that a server prints when it listens; it ends with the block."""
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            found = [w for w in log.read_text().split() if w.startswith("http://127.0.0.1:")]
            if found:
                yield found[0]
                return
            time.sleep(0.1)
        raise RuntimeError(log.read_text())
    finally:
        server.terminate()
        server.wait(30)


def write_table(uri: str, options: dict[str, str]) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    from benchmarks import pictures

    photos = list(pictures.photos(range(PHOTOS)))
    per_file = PHOTOS // FILES
    for part in range(FILES):
        some = range(part * per_file, (part + 1) * per_file)
        rows = {
            "image_id": [str(i) for i in some],
            "image": [photos[i] for i in some],
            "label": ["ab"[i % 2] for i in some],
            "split": [("train", "train", "train", "val", "test")[i % 5] for i in some],
        }
        write_deltalake(uri, pa.table(rows), mode="append", storage_options=options)


def trained(root: Path, folder: Path, uri: str, options: dict[str, str]) -> float:
    """Seconds of one `raypipe train` with the code at `root`."""
    job = {
        "run": {"name": "photos", "dir": str(folder / "run")},
        "table": {"uri": uri, "storage_options": {"AWS_ENDPOINT_URL": options["AWS_ENDPOINT_URL"]}},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "side_px": 32},
        "train": {"epochs": 2, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
        "feed": {"carrier": "threads"},
    }
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    environment = os.environ | OPTIONS | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "raypipe", "train", str(folder / "job.yaml"), "--json"]
    began = time.perf_counter()
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    return time.perf_counter() - began


def log_reads(log: Path, start: int) -> int:
    lines = log.read_text().splitlines()[start:]
    return sum(json.loads(line)["path"].endswith("_delta_log/_last_checkpoint") for line in lines)


def measure(before: Path) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    reads: dict[str, int] = {}
    asked: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "moto").mkdir()
        (folder / "relay").mkdir()
        moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with served(moto, folder / "moto") as endpoint:
            host, port = endpoint.removeprefix("http://").split(":")
            log = folder / "requests.jsonl"
            log.touch()
            script = str(ROOT / "tests" / "cloud" / "request_log.py")
            relay = [sys.executable, script, host, port, str(log), str(DELAY_S)]
            with served(relay, folder / "relay") as address:
                bucket = urllib.request.Request(f"{endpoint}/images", method="PUT")
                urllib.request.urlopen(bucket, timeout=10).close()
                options = OPTIONS | {"AWS_ENDPOINT_URL": address}
                write_table("s3://images/cells", options)
                for i in range(PAIRS):
                    for which, root in (("before", before), ("now", ROOT)):
                        start = len(log.read_text().splitlines())
                        took = trained(root, folder / f"{which}-{i}", "s3://images/cells", options)
                        seconds[which].append(took)
                        reads[which] = log_reads(log, start)
                        asked[which] = len(log.read_text().splitlines()) - start
    ratios = [b / n for b, n in zip(seconds["before"], seconds["now"], strict=True)]
    return {
        "ratios": {"before_vs_now": round(statistics.median(ratios), 2)},
        "pairs": [round(ratio, 2) for ratio in ratios],
        "seconds": {name: [round(s, 1) for s in values] for name, values in seconds.items()},
        "log_reads": reads,
        "requests": asked,
        "delay_s": DELAY_S,
    }


if __name__ == "__main__":
    result = measure(Path(sys.argv[1]).absolute())
    print(json.dumps(result) if "--json" in sys.argv else yaml.safe_dump(result, sort_keys=False))
