"""All claims about predicting and serving, in one run: serve_batch.py and serve_online.py.

python -m benchmarks.serve --json [--rounds 3] [--seconds 5]

The ratios of the online server are those of the model for which they are worse.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import serve_batch, serve_online
from benchmarks.feed import commit, machine

Result = dict[str, Any]
ONLINE = ("auto_vs_best_1", "auto_vs_best_8", "auto_vs_best_32", "online_vs_bare_server_8")


def measure(rounds: int, seconds: float) -> Result:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        batch = serve_batch.measure(folder / "batch", rounds, list(serve_batch.PARTS))
        online = {}
        for name in serve_online.MODELS:
            online[name] = serve_online.measure(folder / "online", name, rounds, seconds)
    ratios = {key: batch["ratios"][key] for key in ("batch_vs_bare", "incremental_vs_full")}
    for key in ONLINE:
        ratios[key] = min(one["ratios"][key] for one in online.values())
    return {"ratios": ratios, "batch": batch, "online": online}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    asked = parser.parse_args()
    result = measure(asked.rounds, asked.seconds) | {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.serve " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
