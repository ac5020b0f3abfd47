"""Claim: ingest runs at 0.7 or more of a bare loop that reads, hashes and decodes the same files on
the same two threads.

python -m benchmarks.ingest --json [--images 10000]

`ratio` is the median over interleaved pairs of (bare, ingest, ingest with max_side) on the same
files; each ingest makes a table. `peak_mb` is the resident memory of a process that only ingests,
above what it had after its imports.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from raypipe.config import validate
from raypipe.images import decode
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig

SIZE = 500, 375
THREADS = 2
PAIRS = 3
MAX_SIDE = 256


def pictures(folder: Path, count: int) -> float:
    """Distinct JPEGs with the spectrum of photographs, cut, turned and tinted out of a few
    textures; returns their mean kB.
    """
    rng = np.random.default_rng(7)
    textures = [_texture(rng, 1024) for _ in range(12)]

    def draw(i: int) -> int:
        own = np.random.default_rng(i)
        left, top = own.integers(0, 1024 - 640, 2).tolist()
        image = textures[i % len(textures)].crop((left, top, left + 600, top + 450))
        image = image.transpose(Image.Transpose(int(own.integers(0, 2)))).rotate(
            float(own.uniform(-4, 4)), Image.Resampling.BILINEAR
        )
        corner = own.integers(20, 60, 2).tolist()
        image = image.crop((*corner, corner[0] + SIZE[0], corner[1] + SIZE[1]))
        tint = own.uniform(0.75, 1.0, 3)
        image = Image.merge(
            "RGB",
            [
                band.point([int(v * t) for v in range(256)])
                for band, t in zip(image.split(), tint, strict=True)
            ],
        )
        out = io.BytesIO()
        image.save(out, "JPEG", quality=90)
        path = folder / f"{i % 100:02d}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.write_bytes(out.getvalue())

    with ThreadPoolExecutor(THREADS) as pool:
        return statistics.fmean(pool.map(draw, range(count))) / 1e3


def _texture(rng: np.random.Generator, side_px: int) -> Image.Image:
    """Noise whose amplitude falls with frequency, as that of photographs does."""
    frequency = np.hypot(np.fft.fftfreq(side_px)[:, None], np.fft.rfftfreq(side_px)[None])
    spectrum = 1 / np.maximum(frequency, 1 / side_px) ** 1.35
    bands = []
    common = rng.standard_normal((side_px, side_px))
    for _ in range(3):
        noise = 0.8 * common + 0.2 * rng.standard_normal((side_px, side_px))
        band = np.fft.irfft2(np.fft.rfft2(noise) * spectrum, (side_px, side_px))
        bands.append(np.clip(128 + 55 * band / band.std(), 0, 255).astype(np.uint8))
    return Image.fromarray(np.stack(bands, axis=-1))


def bare(files: list[Path]) -> float:
    """Images a second of reading, hashing and decoding to the last pixel, and nothing else."""

    def one(path: Path) -> None:
        data = path.read_bytes()
        hashlib.sha256(data).hexdigest()
        decode.decode(data)

    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(one, files):
            pass
    return len(files) / (time.perf_counter() - started)


def ours(folder: Path, table: Path, count: int, **settings: Any) -> float:
    """Images a second of the whole ingest into a new table."""
    cfg = validate(
        IngestConfig,
        {"from": {"images": str(folder)}, "workers": 0, "threads": THREADS, **settings},
    )
    shutil.rmtree(table, ignore_errors=True)
    started = time.perf_counter()
    done = ingest(TableConfig(uri=str(table)), cfg)
    assert (done.accepted, done.quarantined) == (count, 0), done
    return count / (time.perf_counter() - started)


def peak_mb(folder: Path, table: Path, count: int) -> float:
    """Of a new process: how far above its imports the resident memory went."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.ingest import ours; "
        "status = Path('/proc/self/status').read_text; "
        "used = lambda: int(status().split('VmHWM:')[1].split()[0]); before = used(); "
        "ours(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])); "
        "print((used() - before) / 1024)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(table), str(count)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(out.stdout)


def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="raypipe-ingest-") as scratch:
        folder, table = Path(scratch, "photos"), Path(scratch, "table")
        kilobytes = pictures(folder, count)
        files = sorted(folder.rglob("*.jpg"))
        bare(files)  # the page cache is warm for everyone
        runs = [
            (bare(files), ours(folder, table, count), ours(folder, table, count, max_side=MAX_SIDE))
            for _ in range(PAIRS)
        ]
        peak = peak_mb(folder, table, count)
    names = "bare", "ingest", f"ingest_{MAX_SIDE}px"
    return {
        "images_per_s": {
            name: round(statistics.median(column))
            for name, column in zip(names, zip(*runs, strict=True), strict=True)
        },
        "ratio": round(statistics.median(own / base for base, own, _ in runs), 3),
        f"ratio_{MAX_SIDE}px": round(statistics.median(own / base for base, _, own in runs), 3),
        "ratios": [round(own / base, 3) for base, own, _ in runs],
        "peak_mb": round(peak),
        "images": count,
        "mean_kb": round(kilobytes, 1),
    }


if __name__ == "__main__":
    wanted = int(sys.argv[sys.argv.index("--images") + 1]) if "--images" in sys.argv else 10_000
    result = measure(wanted)
    print(json.dumps(result) if "--json" in sys.argv else json.dumps(result, indent=2))
