"""Claim: stored features take little more memory than the features themselves, which a run holds.

100,000 images of the table of table.py, each with a sha256 of its own. Their features are kept:
they are written as a run writes them, in a real Delta table, before anything is measured. The run
then reads them, and lays them into one array a split. feed.verify=false: no image is read.
bytes_per_image_on_top: the peak of the memory, less the array that training reads.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.scale.memory import peak_mb
from benchmarks.scale.rows import ROWS_PER_GROUP, simulate_reads
from benchmarks.scale.table import ROWS, made, simulate_footers

MODEL = {"name": "efficientnet_lite0", "mode": "frozen", "side_px": 32}
EACH = 10_000  # features that are written at a time


@lru_cache(maxsize=64)
def digests(file: int) -> bytes:
    """The hashes of a file's 333 images, end to end."""
    return hashlib.shake_256(f"file {file}".encode()).digest(32 * ROWS)


def hashes(path: str) -> pa.Array:
    """The column sha256 of the file at `path`."""
    text = digests(int(Path(path).name.split("-")[1])).hex()
    return pa.array([text[at : at + 64] for at in range(0, len(text), 64)])


def keep(store: str, files: int) -> None:
    """Write the features of all images."""
    from raypipe.feed.kept_features import KeptFeatures

    kept = KeptFeatures(store, _model())
    rng = np.random.default_rng(0)
    contents: list[bytes] = []
    for file in range(files):
        joined = digests(file)
        contents += [joined[32 * row : 32 * row + 32] for row in range(ROWS)]
        if len(contents) >= EACH or file == files - 1:
            features_ND = rng.normal(size=(len(contents), kept.width)).astype(np.float32)
            kept.add(contents, features_ND, "benchmark")
            contents = []


def _model() -> Any:
    from raypipe.config import validate
    from raypipe.models.zoo import ModelConfig

    return validate(ModelConfig, MODEL)


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, float]:
    from raypipe.feed.dataset import FeedConfig, pin
    from raypipe.feed.features import feature_sources
    from raypipe.tables import fragment
    from raypipe.tables.table import ImageTable, TableConfig

    files = max(1, sizes["features"] // ROWS)
    folder = made(temporary, files, ROWS_PER_GROUP)
    store = f"{temporary}/features"
    code = f"from benchmarks.scale import features; features.keep({store!r}, {files})"
    subprocess.run([sys.executable, "-c", code], check=True)

    table = ImageTable.open(TableConfig(uri=str(folder)))
    read_footer = simulate_footers(folder, table.snapshot(table.pin()).schema())
    really_open = fragment.open_file
    simulate_reads(folder, hashes)
    only_images(folder, really_open, read_footer)
    feed = FeedConfig(verify=False)
    pinned = pin(TableConfig(uri=str(folder)), feed)
    before = peak_mb(reset=True)
    began = time.perf_counter()
    sources = feature_sources(pinned, ["train", "val"], _model(), feed, store)
    seconds = time.perf_counter() - began
    held = sum(source.inputs.nbytes for source in sources.values())
    images = sum(len(source.inputs) for source in sources.values())
    more_mb = peak_mb() - before
    return {
        "images": images,
        "s_per_million": seconds / images * 1e6,
        "more_mb": more_mb,
        "features_mb": held / 2**20,
        "bytes_per_image_on_top": (more_mb * 2**20 - held) / images,
    }


def only_images(folder: Path, really_open: Any, read_footer: Any) -> None:
    """Simulate the files of the image table alone: those of the kept features exist."""
    from raypipe.tables import fragment, snapshot

    simulated_open, simulated_footer = fragment.open_file, snapshot.read_footer

    def opened(uri: str, path: str, *rest: Any) -> Any:
        known = simulated_open if str(folder) in path else really_open
        return known(uri, path, *rest)

    def footer(uri: str, path: str, *rest: Any) -> Any:
        known = simulated_footer if str(folder) in path else read_footer
        return known(uri, path, *rest)

    fragment.open_file, snapshot.read_footer = opened, footer
