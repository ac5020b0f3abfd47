"""Claim: a verb that is submitted takes at most 1.3 times as long as the same verb run here.

python -m benchmarks.submit --json [--rounds 5] [--epochs 150]

One `ray start` cluster on this machine, for both. `local` joins it (cluster.address=HOST:PORT),
`submitted` sends the verb to its dashboard (--submit) and follows it. Each trains the same small
network for about a minute, in a run folder of its own, one after the other, in turn. Wall seconds
are those of the command, from its start to its end; the ratio is the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import pictures
from benchmarks.feed import commit, machine

MODEL = ["model.name=small_cnn", "model.mode=finetune", "model.pretrained=false"]
JOB = [*MODEL, "model.side_px=128", "train.batch_size=32", "train.stopping.patience=null"]
IMAGES = 1500
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, str]]:
    """Its address and its dashboard's. It runs in a process group of its own."""
    port, dashboard = free_port(), free_port()
    head = [*RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"]
    shown = ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    # Another cluster of this host may have the usual port.
    shown.append(f"--dashboard-agent-listen-port={free_port()}")
    command = [*head, *shown, f"--temp-dir={folder}"]
    # Keeps a token that is there. On a new machine there is none, and Ray would refuse to start.
    subprocess.run([*RAY, "get-auth-token", "--generate"], check=True, capture_output=True)
    printed = folder.parent / "ray.log"
    with printed.open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(dashboard, started, printed)
        time.sleep(8)  # processes that Ray starts in advance
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
    finally:
        started.terminate()
        started.wait(60)


def _wait_for(port: int, started: subprocess.Popen[bytes], printed: Path) -> None:
    """Until something listens on the port. Ends the benchmark if Ray does not start."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and started.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise SystemExit(f"Ray did not start:\n{printed.read_text()[-2000:]}")


def run(config: Path, folder: Path, how: list[str]) -> float:
    """Wall seconds of one training in a new folder."""
    command = [sys.executable, "-m", "raypipe", "train", str(config), f"run.dir={folder}", *how]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - began
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    shutil.rmtree(folder)
    return took


def measure(rounds: int, epochs: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="rp") as temporary:
        folder = Path(temporary)
        table = pictures.table(folder / "images", IMAGES)
        config = folder / "job.yaml"
        tree = {"table": {"uri": str(table)}, "feed": {"val": "train"}, "run": {"name": "submit"}}
        config.write_text(json.dumps(tree))
        settings = [*JOB, f"train.epochs={epochs}", "--json"]
        local, submitted = [], []
        with cluster(folder / "ray") as (address, dashboard):
            for turn in range(rounds):
                here = [*settings, f"cluster.address={address}"]
                local.append(run(config, folder / f"local-{turn}", here))
                sent = [*settings, "--submit", dashboard]
                submitted.append(run(config, folder / f"submitted-{turn}", sent))
                print(turn, local[-1], submitted[-1], file=sys.stderr, flush=True)
    pairs = [one / other for one, other in zip(submitted, local, strict=True)]
    extra = [one - other for one, other in zip(submitted, local, strict=True)]
    return {
        "ratios": {"submitted_vs_local": statistics.median(pairs)},
        "local_s": local,
        "submitted_s": submitted,
        "more_s": statistics.median(extra),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=150)
    asked = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    result = measure(asked.rounds, asked.epochs) | {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.submit " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
