"""fastdup in its sidecar: encoded images in; similar pairs, outliers, unreadable images, groups and
image statistics out.

Runs under numpy 1 and Pillow 10.3 (see `cluster/sidecar.py`), so it imports nothing of raypipe.
fastdup reads files only: the images are written to a scratch folder that is deleted afterwards. The
caller sends PNG or JPEG that it has decoded, checked and encoded itself. No other bytes may get
here, because fastdup's decoders have known overflows.

Similarities, measured on 2,624 ELPV solar cells with k=5: an exact copy is at 1.0, a JPEG saved
again at quality 85 at 0.9945-0.9994 of its original, a resized image at 0.92-0.98, and *different*
cells of one module reach 0.9977. So 0.998 and above is the same picture; 0.96-0.998 only means
"keep together in one split". Cost: 20 ms an image on 2 cores, 0.3 GB; no network. fastdup is
licensed CC BY-NC-ND 4.0 (not for commercial use without an agreement with its makers).
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
# Our name of a statistic -> fastdup's column
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
# First bytes of a file -> its suffix
KINDS = {b"\x89P": "png", b"\xff\xd8": "jpg"}


def find(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Analyse the n images in `data` (uint8, concatenated), cut at `offsets` (int64, n+1). Row i of
    all results is image i.

    options: `threshold` lowest similarity of a pair, `cc_threshold` the same for groups,
    `neighbours` compared for each image, `outlier_percentile` share of images reported as outliers
    (always that many: judge by their similarity), `threads` (0: all).

    Returns pair_a, pair_b (int64, a < b), pair_similarity (float32, highest first); outlier,
    outlier_nearest (int64), outlier_similarity (to the nearest image; lowest first); invalid
    (int64); component (int64 (n,), -1 alone); and stat_blur (variance of the Laplacian, low is
    blurred), stat_mean, ... of pixels 0-255 (float32 (n,), NaN if unreadable).

    Raises ValueError for unknown options, too few images and other formats, RuntimeError when
    fastdup fails.
    """
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"unknown options {unknown}, known are {sorted(DEFAULTS)}")
    settings = {**DEFAULTS, **options}
    count = len(arrays["offsets"]) - 1
    if count < LEAST:
        raise ValueError(f"fastdup needs {LEAST} images, got {count}")
    with tempfile.TemporaryDirectory(prefix="raypipe-fastdup-") as scratch:
        images = Path(scratch, "images")
        images.mkdir()
        _write(arrays["data"], arrays["offsets"], images)
        with _quiet(Path(scratch, "log")):
            tables, version = _run(images, Path(scratch, "work"), settings)
    results = {
        **_pairs(tables["pairs"]),
        **_outliers(tables["outliers"]),
        **_stats(tables["stats"], count),
        "component": _components(tables["components"], count),
    }
    return results, {"fastdup": version, "images": count, **settings}


def _run(images: Path, work: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run fastdup on a folder of images; returns its tables (pandas, or None) and its version."""
    # By name: the core has no fastdup, and there are no types for it.
    fastdup = importlib.import_module("fastdup")
    # Its log handler would keep writing to the stream of the first call.
    logging.getLogger("fastdup").disabled = True
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
    return tables, str(fastdup.__version__)


def _write(data_B: np.ndarray, offsets: np.ndarray, folder: Path) -> None:
    """Write image i to a file named by its number. Raises ValueError for other formats than PNG and
    JPEG.
    """
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        encoded = data_B[start:end].tobytes()
        kind = KINDS.get(encoded[:2])
        if kind is None:
            raise ValueError(
                f"image {row} is neither PNG nor JPEG: only re-encoded images may come here"
            )
        Path(folder, f"{row:09d}.{kind}").write_bytes(encoded)


def _pairs(table: Any) -> dict[str, np.ndarray]:
    """Each pair once. fastdup lists both directions, and their similarities may differ in the last
    digit: the higher counts.
    """
    best: dict[tuple[int, int], float] = {}
    if _filled(table):
        first = _rows(table["filename_from"])
        second = _rows(table["filename_to"])
        similarity = table["distance"]
        for a, b, value in zip(first, second, similarity, strict=True):
            pair = (int(min(a, b)), int(max(a, b)))
            known = best.get(pair, -1.0)
            best[pair] = max(float(value), known)
    # The most similar first; equally similar pairs by their numbers.
    ordered = sorted(best, key=lambda pair: (-best[pair], pair))
    similarities = [best[pair] for pair in ordered]
    rows = np.array(ordered, dtype=np.int64).reshape(-1, 2)
    return {
        "pair_a": rows[:, 0],
        "pair_b": rows[:, 1],
        "pair_similarity": np.array(similarities, dtype=np.float32),
    }


def _outliers(table: Any) -> dict[str, np.ndarray]:
    """The outliers with their nearest image, the least similar first."""
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
    """The statistics of each image. An image that fastdup could not read, or skipped, has NaN and
    is invalid.
    """
    table = table[table["is_valid"].astype(bool)]
    rows = _rows(table["filename"])
    results = {}
    for name, column in STATS.items():
        # NaN where fastdup has no value.
        values = np.full(count, np.nan, dtype=np.float32)
        values[rows] = table[column].to_numpy(dtype=np.float32)
        results[f"stat_{name}"] = values
    results["invalid"] = np.setdiff1d(np.arange(count, dtype=np.int64), rows)
    return results


def _components(table: Any, count: int) -> np.ndarray:
    """The number of each image's group of similar images; -1 for an image that is alone."""
    components = np.full(count, -1, dtype=np.int64)
    if _filled(table):
        components[_rows(table["filename"])] = table["component_id"].to_numpy()
    return components


def _filled(table: Any) -> bool:
    return table is not None and len(table) > 0


def _rows(filenames: Any) -> np.ndarray:
    """The image numbers in the names that `_write` gave."""
    return np.array([int(Path(name).stem) for name in filenames], dtype=np.int64)


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Send stdout and stderr, of Python and of the C++ engine, to a file. An error gets the end of
    that file.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(1), os.dup(2)]
    try:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
    except Exception as e:
        printed = log.read_text(errors="replace")[-600:].strip()
        raise RuntimeError(f"fastdup failed: {e!r}; it printed: {printed}") from e
    finally:
        for number, copy in zip((1, 2), copies, strict=True):
            os.dup2(copy, number)
            os.close(copy)
