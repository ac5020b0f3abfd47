"""Claim: `--dry-run` says what a verb takes, within 30 % of its CPU and device seconds.

python -m benchmarks.costs --json [--rounds 5] [--jobs train_small,predict]

Five jobs: two fine-tunings, heads on frozen features, a search, and a prediction. In each round,
each job is estimated by `raypipe VERB --dry-run` (its calibration counts as `calibration_s`) and
then run, in a control group of its own: its CPU seconds are those of all its processes, those of
Ray's, too. Device seconds are what the verb itself reports. The ratio is estimate ÷ measured; the
result is the median of the rounds. It needs root, to make control groups.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.feed import commit, machine

SMALL = ["model.name=small_cnn", "model.mode=finetune", "model.pretrained=false"]
LITE = ["model.name=efficientnet_lite0"]
JOBS: dict[str, list[str]] = {
    "train_small": ["train", *SMALL, "model.side_px=128", "train.epochs=40", "train.batch_size=32"],
    "train_lite": ["train", *LITE, "model.mode=finetune", "model.side_px=128", "train.epochs=3"],
    "train_frozen": ["train", *LITE, "model.mode=frozen", "train.epochs=60"],
    "tune": ["tune", *SMALL, "model.side_px=96", "search.samples=12", "train.epochs=27"],
    "predict": ["predict", *LITE, "model.mode=finetune", "model.side_px=128"],
}
NO_STOP = ["train.stopping.patience=null", "cluster.address=local", "feed.val=train"]
IMAGES = 1500
GROUPS = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")


def run(command: list[str]) -> tuple[dict[str, Any], float]:
    """The verb's JSON line, and the CPU seconds of all its processes."""
    group = next(path for path in GROUPS if (path / "cgroup.procs").exists())
    group = group / f"raypipe-{os.getpid()}"
    group.mkdir()

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(
            command, preexec_fn=enter, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        # Ray's processes end a moment after the driver.
        deadline = time.monotonic() + 20
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        return json.loads(done.stdout.splitlines()[-1]), _cpu_s(group)
    finally:
        group.rmdir()


def _cpu_s(group: Path) -> float:
    first = group / "cpuacct.usage"
    if first.exists():
        return int(first.read_text()) / 1e9
    usage = (group / "cpu.stat").read_text().split()
    return int(usage[usage.index("usage_usec") + 1]) / 1e6


def measure(rounds: int, names: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table = pictures.table(folder / "images", IMAGES)
        config = folder / "job.yaml"
        config.write_text(json.dumps({"table": {"uri": str(table)}}))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn in range(rounds):
            for name in names:
                found[name].append(_once(folder, config, name, turn))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    ratios = {}
    for name, rows in found.items():
        for kind in ("cpu", "device"):
            values = [row[f"{kind}_ratio"] for row in rows if row[f"{kind}_ratio"] > 0]
            if values:
                ratios[f"{name}_{kind}"] = statistics.median(values)
    return {"ratios": ratios, "rounds": found}


def _once(folder: Path, config: Path, name: str, turn: int) -> dict[str, float]:
    verb, *settings = JOBS[name]
    # A run of its own each time: nothing is kept of an earlier one.
    run_dir = folder / f"{name}-{turn}"
    where = [f"run.dir={run_dir}", f"run.name={name}", *NO_STOP, "--json"]
    raypipe = [str(Path(sys.executable).with_name("raypipe"))]
    if verb == "predict":
        run([*raypipe, "train", str(config), *settings, "train.epochs=1", *where])
    began = time.monotonic()
    said, _ = run([*raypipe, verb, str(config), *settings, *where, "--dry-run"])
    dry_s = time.monotonic() - began
    done, cpu_s = run([*raypipe, verb, str(config), *settings, *where])
    shutil.rmtree(run_dir)
    device_s = done.get("spent", {}).get("device_s", 0.0)
    return {
        "dry_run_s": dry_s,
        "calibration_s": said["calibration_s"],
        "estimated_cpu_s": said["cpu_s"],
        "cpu_s": cpu_s,
        "cpu_ratio": said["cpu_s"] / cpu_s,
        "estimated_device_s": said["device_s"],
        "device_s": device_s,
        "device_ratio": said["device_s"] / device_s if device_s else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", default=",".join(JOBS))
    asked = parser.parse_args()
    result = measure(asked.rounds, asked.jobs.split(",")) | {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.costs " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
