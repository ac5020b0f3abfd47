"""Claim: the plan of a table with 300,000 files takes at most 5 s and 500 MB of memory.

python -m benchmarks.scale --json [--files 300000]

What two cores cannot run is simulated: the log of a table is written as an engine writes it, with
statistics of six columns and a checkpoint, and none of its files exists but one. The footer of that
one, copied, stands for all of them. All else is raypipe's own code, in a process of its own. Memory
is the driver's peak above what it had after its imports. Reading real footers comes on top: 0.2 ms
each on a local disk, two requests each on an object store, eight at a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.feed import commit, machine

ROWS, BYTES = 333, 20_000_000  # of each file


def make(folder: Path, files: int) -> None:
    """A table of which one file exists, and the log names so many more."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    names = ["image_id", "label", "split", "source", "sha256"]
    columns: dict[str, Any] = {name: ["a"] for name in names}
    write_deltalake(str(folder), pa.table(columns | {"image": [b"x"]}))
    log = folder / "_delta_log"
    lines = (log / f"{0:020}.json").read_text("utf-8").splitlines()
    add = next(json.loads(line)["add"] for line in lines if '"add"' in line)
    with (log / f"{1:020}.json").open("w", encoding="utf-8") as out:
        for n in range(files):
            low = {"image_id": f"img{n:09d}", "label": "a"}
            statistics = {"numRecords": ROWS, "minValues": low, "maxValues": low, "nullCount": {}}
            path = f"part-{n:08d}-{n * 2654435761 % 2**32:08x}-c000.parquet"
            action = {"path": path, "size": BYTES, "modificationTime": 1_700_000_000_000 + n}
            line = {"add": add | action | {"stats": json.dumps(statistics)}}
            out.write(json.dumps(line) + "\n")
    DeltaTable(str(folder)).create_checkpoint()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plan(folder: Path) -> dict[str, float]:
    """Seconds and memory of planning the table; in a process of its own."""
    from raypipe.tables import footer, scan, snapshot
    from raypipe.tables.table import ImageTable, TableConfig

    before = peak_mb()
    began = time.perf_counter()
    table, version = ImageTable.open_pinned(TableConfig(uri=str(folder)))
    opened = time.perf_counter() - began
    real = next(folder.glob("*.parquet"))
    schema = table.snapshot(version).schema()
    one = footer.read_footer(str(folder), str(real), schema, "image", None)
    assert one.data is not None
    data = one.data

    def copied(*_: Any) -> footer.Footer:
        return footer.Footer(
            bytes(bytearray(data)), one.schema, one.rows_G, one.bytes_G, one.images_G
        )

    snapshot.read_footer = copied
    began = time.perf_counter()
    fragments, _ = scan.plan(table, version)
    took = time.perf_counter() - began
    return {
        "files": len(fragments),
        "open_s": opened,
        "plan_s": took,
        "more_mb": peak_mb() - before,
        "footer_bytes": len(data),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--files", type=int, default=300_000)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(plan(Path(asked.only))))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "table"
        make(folder, asked.files)
        command = [sys.executable, "-m", "benchmarks.scale", "--only", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result = {
        "plan": json.loads(done.stdout.splitlines()[-1]),
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.scale " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
