"""Claim: batch prediction runs at the speed of a bare loop that decodes and predicts, needs as much
memory for a million rows as for ten thousand, and predicts a tenth more rows for a tenth of the
time.

python -m benchmarks.serve_batch --json [--rounds 3] [--only bare,incremental,scale]

Photographs are 500x375 JPEGs (pictures.py) for efficientnet_lite0; small images are 32 px JPEGs for
small_cnn. `bare`: one process a core, each with one thread: row groups by pyarrow, decode, model;
it keeps nothing, hashes nothing, and its start does not count. Ours is `batch.predict`, from the
call to the summary: planning, hashes, sizes, looks, commits and reading the labels back. Ray runs,
and its processes have the model, as in a pipeline's second step. Ratios are taken in pairs, one
after the other, the median over the rounds.

batch_vs_bare: rows/s of ours ÷ bare. incremental_vs_full: seconds for 2,000 rows more ÷ seconds for
20,000 (since=last), efficientnet_lite0 at 64 px; _128px and _32px: small_cnn on images of that
size, which takes a second for 20,000, so that start-up counts. rate_200k_vs_20k: rows/s.
driver_peak_mb: the driver's peak resident set above what it had when the prediction began.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.clock import status_mb
from benchmarks.feed import commit, machine

Result = dict[str, Any]
SMALL, MORE, MANY = 20_000, 2_000, 200_000
PHOTOS = 1_000
CORES = 2
# 20,000 images take small_cnn a second, so that start-up counts. It does not for
# efficientnet_lite0 at 64 px, which takes 15 s.
GROWN = (("", "efficientnet_lite0", 64), ("_128px", "small_cnn", 128), ("_32px", "small_cnn", 32))
MODELS = {"small": "small_cnn", "photos": "efficientnet_lite0"}


# Tables and models


def small_table(uri: Path, first: int, count: int, side: int = 32) -> str:
    """Append `count` square JPEGs, numbered from `first`, to the table; 20,000 in a commit."""
    import pyarrow as pa

    from raypipe.tables.table import append

    for start in range(first, first + count, SMALL):
        numbers = range(start, min(start + SMALL, first + count))
        images = list(small_images(numbers, side))
        columns = {"image_id": [f"{n:08d}" for n in numbers], "image": pa.array(images)}
        append(str(uri), pa.table(columns), "benchmark")
    return str(uri)


def small_images(numbers: range, side: int = 32) -> Iterator[bytes]:
    # Two numbers of a base picture and a shift: no two have the same bytes.
    rng = np.random.default_rng(7)
    bases = [
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side))
        for _ in range(64)
    ]
    for number in numbers:
        pixels_HWC = np.array(bases[number % 64])
        pixels_HWC[0, :8] = [number >> 16 & 255, number >> 8 & 255, number & 255]
        out = io.BytesIO()
        Image.fromarray(np.roll(pixels_HWC, number % side, 1)).save(out, "JPEG", quality=90)
        yield out.getvalue() + number.to_bytes(4, "big")


def store_of(folder: Path, name: str, side_px: int | None = None) -> tuple[Any, Any]:
    """(run, store): a registry whose champion is `name`, made at the first call."""
    import torch

    from raypipe.config import RunConfig
    from raypipe.models.zoo import ImageModel, ModelConfig
    from raypipe.registry import packing, promote, runs, versions
    from raypipe.registry.package import Reference
    from raypipe.registry.store import open_store
    from raypipe.registry.tracking import RegistryConfig

    run = RunConfig(name=name, dir=str(folder / "run"))
    store = open_store(run, RegistryConfig())
    if promote.champion(store) is None:
        torch.manual_seed(0)
        pretrained = name == "efficientnet_lite0"
        cfg = ModelConfig(name=name, pretrained=pretrained, mode="finetune", side_px=side_px)
        model = ImageModel(cfg, 3).eval()
        width = model.head.features
        reference = Reference(np.zeros((2, width)), np.full((2, 3), 1 / 3), ("a", "b"))
        built = packing.build(folder / "package", model, cfg, ("a", "b", "c"), reference, {})
        with runs.run(store, "made", "train", {}, None) as run_id:
            pass
        version = versions.register(store, run_id, built, name, {})
        promote.promote(store, version, expected=None)
    return run, store


# Contenders; each runs in a process of its own


def bare(folder: Path, uri: str, name: str) -> Result:
    """Rows/s of CORES processes that only read, decode and predict."""
    _, store = store_of(folder, name)
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(CORES + 1)
    workers = [
        context.Process(target=_bare, args=(folder, uri, turn, ready)) for turn in range(CORES)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    ready.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    del store
    return {"rows_per_s": _rows(uri) / seconds, "seconds": seconds}


def _bare(folder: Path, uri: str, turn: int, ready: Any) -> None:
    import pyarrow.parquet as pq
    import torch

    from raypipe.images.decode import decode_batch
    from raypipe.models.allocator import keep_memory
    from raypipe.registry.package import Package

    torch.set_num_threads(1)
    keep_memory()
    package = Package(folder / "package")
    package.predict_pixels(np.zeros((16, package.side_px, package.side_px, 3), np.uint8))
    groups = []
    for path in sorted(Path(uri).glob("*.parquet")):
        file = pq.ParquetFile(path)
        groups += [(file, number) for number in range(file.num_row_groups)]
    ready.wait()
    for file, number in groups[turn::CORES]:
        images = file.read_row_group(number, columns=["image"], use_threads=False)["image"]
        encoded = images.to_pylist()
        for start in range(0, len(encoded), 64):
            package.predict_pixels(
                decode_batch(encoded[start : start + 64], package.side_px, threads=1)
            )
    ready.wait()


def ours(folder: Path, uri: str, name: str, since: bool = False) -> Result:
    """Rows/s of batch.predict, and the driver's peak of memory above what it began with."""
    from raypipe.cluster.connect import ClusterConfig, close, connect
    from raypipe.serve import batch
    from raypipe.serve.batch import PredictConfig
    from raypipe.tables.table import TableConfig

    connect(ClusterConfig(address="local", cpus=CORES))
    run, store = store_of(folder, name)
    # The processes load the model before the clock starts.
    warm = folder / "warm"
    if not warm.exists():
        small_table(warm, 10**7, 4_000)
    batch.predict(
        store, run, TableConfig(uri=str(warm)), PredictConfig(out=tempfile.mkdtemp(dir=folder))
    )
    out = str(folder / f"out-{Path(uri).name}")
    if not since:
        shutil.rmtree(out, ignore_errors=True)
    cfg = PredictConfig(out=out, since="last" if since else None)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before_mb, began = status_mb("VmRSS"), time.perf_counter()
    done = batch.predict(store, run, TableConfig(uri=uri), cfg)
    seconds = time.perf_counter() - began
    close()
    return {
        "rows_per_s": done.made / seconds,
        "seconds": seconds,
        "images": done.images,
        "made": done.made,
        "driver_peak_mb": status_mb("VmHWM") - before_mb,
    }


CONTENDERS: dict[str, Callable[..., Result]] = {"bare": bare, "ours": ours}


def _rows(uri: str) -> int:
    from raypipe.tables import scan
    from raypipe.tables.table import ImageTable

    table = ImageTable(uri)
    fragments, _ = scan.plan(table, table.pin())
    return sum(one.rows for one in fragments)


def contend(what: str, folder: Path, uri: str, name: str, since: bool = False) -> Result:
    """The contender's result, from a fresh process. Raises SystemExit with its words."""
    command = [sys.executable, "-m", "benchmarks.serve_batch", "--contender", what]
    command += ["--folder", str(folder), "--table", uri, "--model", name]
    done = subprocess.run(
        [*command, *(["--since"] if since else [])], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(f"{what} {Path(uri).name}: {result}", file=sys.stderr)
    return result


# What is claimed


def against_bare(folder: Path, rounds: int) -> Result:
    from benchmarks import pictures

    tables = {
        "photos": pictures.table(folder, PHOTOS),
        "small": _once(folder / "small", lambda uri: small_table(uri, 0, SMALL)),
    }
    ratios: dict[str, list[float]] = {}
    for kind, uri in tables.items():
        home = folder / MODELS[kind]
        store_of(home, MODELS[kind])
        ratios[kind] = []
        for _ in range(rounds):
            before = contend("bare", home, uri, MODELS[kind])["rows_per_s"]
            mine = contend("ours", home, uri, MODELS[kind])["rows_per_s"]
            after = contend("bare", home, uri, MODELS[kind])["rows_per_s"]
            ratios[kind].append(round(2 * mine / (before + after), 3))
    return {
        "ratios": {
            "batch_vs_bare": statistics.median(ratios["photos"]),
            "batch_vs_bare_small": statistics.median(ratios["small"]),
        },
        "by_round": {f"batch_vs_bare_{kind}": found for kind, found in ratios.items()},
    }


def incremental(folder: Path, rounds: int) -> Result:
    ratios = {
        f"incremental_vs_full{name}": _grown(folder, rounds, model, side)
        for name, model, side in GROWN
    }
    return {
        "ratios": {key: statistics.median(found) for key, found in ratios.items()},
        "by_round": ratios,
    }


def _grown(folder: Path, rounds: int, model: str, side: int) -> list[float]:
    """Seconds for MORE rows ÷ seconds for SMALL rows, a ratio a round."""
    home = folder / f"{model}-{side}"
    store_of(home, model, None if model == "small_cnn" else side)
    ratios = []
    for number in range(rounds):
        uri = small_table(folder / f"grows-{model}-{side}-{number}", 0, SMALL, side)
        full = contend("ours", home, uri, model)
        small_table(Path(uri), SMALL, MORE, side)
        more = contend("ours", home, uri, model, since=True)
        assert (more["made"], more["images"]) == (MORE, SMALL + MORE)
        ratios.append(round(more["seconds"] / full["seconds"], 3))
    return ratios


def scale(folder: Path, rounds: int) -> Result:
    home = folder / MODELS["small"]
    store_of(home, MODELS["small"])
    few = _once(folder / "small", lambda uri: small_table(uri, 0, SMALL))
    many = _once(folder / "many", lambda uri: small_table(uri, 0, MANY))
    ratios, peaks = [], []
    for _ in range(rounds):
        one = contend("ours", home, few, MODELS["small"])
        ten = contend("ours", home, many, MODELS["small"])
        ratios.append(round(ten["rows_per_s"] / one["rows_per_s"], 3))
        peaks.append(round(ten["driver_peak_mb"], 1))
    return {
        "ratios": {"rate_200k_vs_20k": statistics.median(ratios)},
        "driver_peak_mb": max(peaks),
        "by_round": {"rate_200k_vs_20k": ratios, "driver_peak_mb": peaks},
    }


def _once(uri: Path, write: Callable[[Path], str]) -> str:
    """The table, written on first use."""
    return str(uri) if uri.exists() else write(uri)


PARTS = {"bare": against_bare, "incremental": incremental, "scale": scale}


def measure(folder: Path, rounds: int, only: list[str]) -> Result:
    """The parts together; keys as in the module's docstring."""
    whole: Result = {"ratios": {}, "by_round": {}}
    for name in only:
        found = PARTS[name](folder, rounds)
        for key, value in found.items():
            if isinstance(value, dict):
                whole[key] |= value
            else:
                whole[key] = value
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--keep", type=Path, help="the tables' folder; default: a temporary one")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--since", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contender:
        more = {"since": True} if asked.since else {}
        print(
            json.dumps(CONTENDERS[asked.contender](asked.folder, asked.table, asked.model, **more))
        )
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.keep or Path(temporary)).absolute()
        result = measure(folder, asked.rounds, asked.only.split(",")) | {
            "machine": machine(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.serve_batch " + " ".join(sys.argv[1:]),
        }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
