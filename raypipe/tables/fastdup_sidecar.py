"""fastdup in its sidecar: encoded images in; similar pairs, outliers, unreadable images, groups and image statistics out.

Runs under numpy 1 and Pillow 10.3 (see `cluster/sidecar.py`), so it imports nothing of raypipe. fastdup reads files only: the
caller sends PNG or JPEG that it has decoded, checked and encoded itself (fastdup's decoders have known overflows, so no
foreign byte may get here), and they are written to a scratch folder that is gone afterwards.

What a similarity means (measured on 2,624 ELPV solar cells, k=5): a re-saved JPEG of quality 85 is at 0.9945-0.9994 of its
original, a resized one at 0.92-0.98, and *different* cells of one module reach 0.9977. So 0.998 and above is the same picture,
0.96-0.998 only "keep together in one split". Exact copies are 1.0. Cost: 20 ms an image on 2 cores, 0.3 GB; no network.
fastdup is licensed CC BY-NC-ND 4.0 (not for commercial use without an agreement with its makers).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DEFAULTS = {
    "threshold": 0.9,
    "cc_threshold": 0.96,
    "neighbours": 5,
    "outlier_percentile": 0.05,
    "threads": 0,
}
STATS = {
    "blur": "blur",
    "mean": "mean",
    "std": "stdv",
    "min": "min",
    "max": "max",
    "contrast": "contrast",
    "unique": "unique",
}
LEAST = 10  # images; fastdup's index does not train on fewer


def find(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Analyse the n images in `data` (uint8, concatenated) cut at `offsets` (int64, n+1); row i of all results is image i.

    options: `threshold` lowest similarity of a pair, `cc_threshold` the same for groups, `neighbours` compared per image,
    `outlier_percentile` share of images reported as outliers (always that many: judge by their similarity), `threads` (0: all).
    Returns pair_a, pair_b (int64, a < b), pair_similarity (float32, highest first); outlier, outlier_nearest (int64),
    outlier_similarity (to the nearest image; lowest first); invalid (int64); component (int64 (n,), -1 alone); and
    stat_blur (variance of the Laplacian, low is blurred), stat_mean, ... of pixels 0-255 (float32 (n,), NaN if unreadable).
    """
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"unknown options {unknown}, known are {sorted(DEFAULTS)}")
    settings = {**DEFAULTS, **options}
    count = len(arrays["offsets"]) - 1
    if count < LEAST:
        raise ValueError(f"fastdup needs {LEAST} images, got {count}")
    with tempfile.TemporaryDirectory(prefix="raypipe-fastdup-") as scratch:
        images, work = Path(scratch, "images"), Path(scratch, "work")
        images.mkdir()
        _write(arrays["data"], arrays["offsets"], images)
        with _quiet(Path(scratch, "log")):
            fastdup = importlib.import_module(
                "fastdup"
            )  # in the sidecar only: the core has none, and no types for it
            logging.getLogger(
                "fastdup"
            ).disabled = True  # its handler keeps the stream of the first call
            job = fastdup.create(work_dir=str(work), input_dir=str(images))
            job.run(
                threshold=settings["threshold"],
                cc_threshold=settings["cc_threshold"],
                nearest_neighbors_k=int(settings["neighbours"]),
                outlier_percentile=settings["outlier_percentile"],
                num_threads=int(settings["threads"]) or None,
                overwrite=True,
            )
            tables = {
                "pairs": job.similarity(),
                "outliers": job.outliers(),
                "stats": job.img_stats(),
                "components": job.connected_components()[0],
            }
    found = {
        **_pairs(tables["pairs"]),
        **_outliers(tables["outliers"]),
        **_stats(tables["stats"], count),
    }
    found["component"] = np.full(count, -1, dtype=np.int64)
    if _filled(tables["components"]):
        found["component"][_rows(tables["components"]["filename"])] = tables["components"][
            "component_id"
        ].to_numpy()
    return found, {"fastdup": str(fastdup.__version__), "images": count, **settings}


def _write(data_B: np.ndarray, offsets: np.ndarray, folder: Path) -> None:
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        encoded = data_B[start:end].tobytes()
        kind = {b"\x89P": "png", b"\xff\xd8": "jpg"}.get(encoded[:2])
        if kind is None:
            raise ValueError(
                f"image {row} is neither PNG nor JPEG: only re-encoded images may come here"
            )
        Path(folder, f"{row:09d}.{kind}").write_bytes(encoded)


def _pairs(table: Any) -> dict[str, np.ndarray]:
    """Each pair once: fastdup lists both directions, and their similarities may differ in the last digit."""
    best: dict[tuple[int, int], float] = {}
    if _filled(table):
        for a, b, similarity in zip(
            _rows(table["filename_from"]),
            _rows(table["filename_to"]),
            table["distance"],
            strict=True,
        ):
            key = (int(min(a, b)), int(max(a, b)))
            best[key] = max(float(similarity), best.get(key, -1.0))
    ordered = sorted(best, key=lambda key: (-best[key], key))
    rows = np.array(ordered, dtype=np.int64).reshape(-1, 2)
    return {
        "pair_a": rows[:, 0],
        "pair_b": rows[:, 1],
        "pair_similarity": np.array([best[k] for k in ordered], dtype=np.float32),
    }


def _outliers(table: Any) -> dict[str, np.ndarray]:
    if not _filled(table):
        none = np.zeros(0, dtype=np.int64)
        return {
            "outlier": none,
            "outlier_nearest": none,
            "outlier_similarity": none.astype(np.float32),
        }
    table = table.sort_values(["distance", "filename_outlier"])
    return {
        "outlier": _rows(table["filename_outlier"]),
        "outlier_nearest": _rows(table["filename_nearest"]),
        "outlier_similarity": table["distance"].to_numpy(dtype=np.float32),
    }


def _stats(table: Any, count: int) -> dict[str, np.ndarray]:
    """One value per image and statistic; an image that fastdup could not read, or skipped, has none and is invalid."""
    table = table[table["is_valid"].astype(bool)]
    rows, found = _rows(table["filename"]), {}
    for name, column in STATS.items():
        found[f"stat_{name}"] = np.full(count, np.nan, dtype=np.float32)
        found[f"stat_{name}"][rows] = table[column].to_numpy(dtype=np.float32)
    found["invalid"] = np.setdiff1d(np.arange(count, dtype=np.int64), rows)
    return found


def _filled(table: Any) -> bool:
    return table is not None and len(table) > 0


def _rows(filenames: Any) -> np.ndarray:
    return np.array([int(Path(name).stem) for name in filenames], dtype=np.int64)


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """stdout and stderr of Python and of the C++ engine into a file, whose end is added to an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
    except Exception as e:
        raise RuntimeError(
            f"fastdup failed: {e!r}; it printed: {log.read_text(errors='replace')[-600:].strip()}"
        ) from e
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
