"""Claims about the driver at large sizes. Real code paths, simulated data; about ten minutes.

python -m benchmarks.scale --json [--files 300000] [--trials 1000] [--only rows,trials]

table         300,000 files are planned in at most 5 s and 500 MB (table.py)
rows          100 million images are pinned, located and put in order in at most 60 s and 2 GB
              (rows.py)
features      stored features take little more memory than the features themselves (features.py)
trials        1,000 trials: the driver's share of each report, and their place on disk (trials.py)
results       1,000 trials become a leaderboard, a page and MLflow runs (results.py)
checkpoints   64 workers save one checkpoint; what a ViT-L search hashes and keeps (checkpoints.py)

Each part runs in a process of its own, one after the other. more_mb is the peak of its memory above
what it had after its imports. Other work on the machine makes times longer, memory not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib import import_module
from typing import Any

from benchmarks.feed import commit, machine

PARTS = "table", "rows", "features", "trials", "results", "checkpoints"


def measured(part: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What a part measures, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--part", part]
    for name, size in sizes.items():
        command += [f"--{name}", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{part} failed")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--files", type=int, default=300_000, help="of 333 images each")
    parser.add_argument("--features", type=int, default=100_000)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sizes = {name: getattr(asked, name) for name in ("files", "features", "trials", "workers")}
    if asked.part:
        part = import_module(f"benchmarks.scale.{asked.part}")
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(part.measure(temporary, sizes)))
        return 0
    result: dict[str, Any] = {}
    for name in asked.only.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        result[name] = measured(name, sizes)
        print(json.dumps(result[name], indent=1), file=sys.stderr, flush=True)
    result |= {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.scale " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
