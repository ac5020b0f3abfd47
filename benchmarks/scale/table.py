"""Claim: the plan of a table with 300,000 files takes at most 5 s and 500 MB of memory.

The log of a table is written as an engine writes it, with statistics of its columns and a
checkpoint, and none of its files exists but one. The footer of that one, copied, stands for all of
them. Reading real footers comes on top: 0.2 ms each on a local disk, two requests each on an object
store, eight at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.memory import peak_mb

ROWS, BYTES = 333, 20_000_000  # of each file
CLASSES = 1000
SPLITS = ["train"] * (ROWS - 2) + ["val", "test"]


def made(temporary: str, files: int, rows_per_group: int = ROWS) -> Path:
    """The folder of a table of so many files, made in another process: memory that is freed here
    would be used again.
    """
    folder = Path(temporary) / "table"
    call = f"table.make(pathlib.Path({str(folder)!r}), {files}, {rows_per_group})"
    code = f"import pathlib; from benchmarks.scale import table; {call}"
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder


def make(folder: Path, files: int, rows_per_group: int) -> None:
    """A table of which one file exists, and the log names so many more."""
    import pyarrow as pa
    from deltalake import ColumnProperties, DeltaTable, WriterProperties, write_deltalake

    as_ingest = ColumnProperties(
        dictionary_enabled=False, statistics_enabled="NONE", encoding="PLAIN"
    )
    written = WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=rows_per_group,
        column_properties={"image": as_ingest},
    )
    write_deltalake(str(folder), pa.table(_columns()), writer_properties=written)
    log = folder / "_delta_log"
    lines = (log / f"{0:020}.json").read_text("utf-8").splitlines()
    add = next(json.loads(line)["add"] for line in lines if '"add"' in line)
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    with (log / f"{1:020}.json").open("w", encoding="utf-8") as out:
        # The real file is only there to be read; it is no part of the table any more.
        out.write(json.dumps({"remove": remove}) + "\n")
        for n in range(files):
            low = {"image_id": f"img{n:09d}", "label": "class-0000"}
            statistics = {"numRecords": ROWS, "minValues": low, "maxValues": low, "nullCount": {}}
            path = f"part-{n:08d}-{n * 2654435761 % 2**32:08x}-c000.parquet"
            action = {"path": path, "size": BYTES, "modificationTime": 1_700_000_000_000 + n}
            line = {"add": add | action | {"stats": json.dumps(statistics)}}
            out.write(json.dumps(line) + "\n")
    DeltaTable(str(folder)).create_checkpoint()


def _columns() -> dict[str, list[Any]]:
    """333 rows as `raypipe ingest` writes them, with images of a few bytes."""
    images = [f"image {row}".encode() for row in range(ROWS)]
    hashes = [hashlib.sha256(image).hexdigest() for image in images]
    return {
        "image_id": hashes,
        "label": [f"class-{row * 7919 % CLASSES:04}" for row in range(ROWS)],
        "split": SPLITS,
        "source": ["benchmark"] * ROWS,
        "sha256": hashes,
        "image": images,
    }


def simulate_footers(folder: Path, schema: Any) -> Any:
    """Give every file the footer of the real one; returns the function that reads real ones."""
    from raypipe.tables import footer, snapshot

    real = next(folder.glob("*.parquet"))
    one = footer.read_footer(str(folder), str(real), schema, "image", None)
    assert one.data is not None
    number = itertools.count(100_000)

    def copied(*_: Any) -> footer.Footer:
        """A file of its own: no two have the same sizes, so none may share memory."""
        n = next(number)
        groups = []
        for rows, size, chunk in one.groups():
            moved = chunk and chunk._replace(offset=chunk.offset + n, size=chunk.size + n)
            groups.append((rows, size + n, moved))
        return footer.Footer(bytes(bytearray(one.data)), one.schema, footer.packed(groups))

    snapshot.read_footer = copied
    return footer.read_footer


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, float]:
    """Seconds and memory of planning the table."""
    from raypipe.tables import scan
    from raypipe.tables.table import ImageTable, TableConfig

    folder = made(temporary, sizes["files"])
    before = peak_mb(reset=True)
    began = time.perf_counter()
    table, version = ImageTable.open_pinned(TableConfig(uri=str(folder)))
    opened = time.perf_counter() - began
    simulate_footers(folder, table.snapshot(version).schema())
    began = time.perf_counter()
    fragments, _ = scan.plan(table, version)
    return {
        "files": len(fragments),
        "open_s": opened,
        "plan_s": time.perf_counter() - began,
        "more_mb": peak_mb() - before,
        "footer_bytes": len(fragments[0].footer or b""),
    }
