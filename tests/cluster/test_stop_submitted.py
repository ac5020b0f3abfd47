"""A submitted stream is stopped: it commits what it has begun, and the next one goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ROWS = 9000


def raypipe(*arguments: object) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "raypipe", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def told(*arguments: object) -> dict[str, Any]:
    process = raypipe(*arguments, "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def ids(out: Path) -> list[int]:
    table = ImageTable(str(out))
    if not ImageTable.exists(str(out)):
        return []
    return sorted(map(int, scan.rows(table, table.pin(), ["image_id"])["image_id"].to_pylist()))


def test_a_submitted_stream_that_is_stopped_loses_and_doubles_no_row(
    ray_session: str, job: Path, photos: Path, tmp_path: Path
) -> None:
    images = [file.read_bytes() for file in sorted(photos.glob("*.png"))]
    many = {"image_id": [str(n) for n in range(ROWS)], "image": pa.array(images * 150, pa.binary())}
    append(str(tmp_path / "many"), pa.table(many), "many")
    out = tmp_path / "out"
    where = [f"predict.table={{uri: {tmp_path}/many}}", f"predict.out={out}"]
    where += ["predict.latency_s=1", "--submit", ray_session]
    stream = told("predict", job, *where, "--follow", "--detach")["job"]
    follower = raypipe("jobs", ray_session, "--follow", stream)
    until = time.monotonic() + 120
    while not 0 < len(ids(out)) < ROWS:
        assert time.monotonic() < until and follower.poll() is None
        time.sleep(0.1)

    began = time.monotonic()
    stopped = told("jobs", ray_session, "--stop", stream)
    print(f"\nstopped within {time.monotonic() - began:.1f} s")
    assert stopped == {"job": stream, "status": "STOPPED"}
    said, err = follower.communicate(timeout=60)
    # Not killed: the verb has said what it did.
    assert "micro-batches" in said
    assert follower.returncode == 1 and f"Job {stream} was stopped" in err, err
    assert "Submit the same command again" in err and "Traceback" not in said + err
    words = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    assert not [line for line in words if "raypipe.submitted" in line and str(out) in line]

    committed = ids(out)
    assert 0 < len(committed) < ROWS and len(set(committed)) == len(committed)
    rest = told("predict", job, *where, "--once")
    assert rest["rows"] == ROWS - len(committed)
    assert ids(out) == list(range(ROWS))
