"""Claim: decode_into makes a 224 px picture of a 500x375 JPEG at least 2 times as fast as Pillow
alone, and as well.

python -m benchmarks.decode --json

Two threads write into preallocated slots; every candidate takes its turn in every round, so ratios
are paired. `apart` is the mean absolute difference (0-255) from Pillow's full decode and
antialiased bilinear resize. OpenCV takes part where it is installed; the project does not need it.
"""

from __future__ import annotations

import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_images

from raypipe.images.decode import _squeeze_into, decode_into

IMAGES, ROUNDS, SIDE, THREADS = 256, 7, 224, 2
Decode = Callable[[bytes, np.ndarray], Any]


def photos(count: int, width: int = 500, height: int = 375) -> list[bytes]:
    """JPEGs of quality 90, about 40 kB each: windows of two photographs, none the same."""
    rng, sources = (
        np.random.default_rng(0),
        [Image.fromarray(pixels) for pixels in load_sample_images().images],
    )
    encoded = []
    for i in range(count):
        source, scale = sources[i % 2], rng.uniform(0.45, 0.7)
        corner = rng.uniform(0, (source.width - width * scale, source.height - height * scale))
        box = (*corner, *(corner + np.array([width, height]) * scale))
        out = io.BytesIO()
        source.resize((width, height), Image.Resampling.BICUBIC, box=box).save(
            out, "JPEG", quality=90
        )
        encoded.append(out.getvalue())
    return encoded


def pillow(data: bytes, out_HWC: np.ndarray) -> None:
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    image.draft("RGB", (SIDE, SIDE))
    out_HWC[...] = np.asarray(
        image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    )


def pillow_block_cache(data: bytes, out_HWC: np.ndarray) -> None:
    pillow(data, out_HWC)


def pillow_then_torch(data: bytes, out_HWC: np.ndarray) -> None:
    _squeeze_into(np.array(Image.open(io.BytesIO(data), formats=("JPEG",))), out_HWC)


def pillow_half_scale(data: bytes, out_HWC: np.ndarray) -> None:
    """One DCT scale below the side asked for: what the quality would be if speed were all."""
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    image.draft("RGB", (SIDE * 3 // 4, SIDE * 3 // 4))
    _squeeze_into(np.array(image), out_HWC)


def simplejpeg_then_pillow(data: bytes, out_HWC: np.ndarray) -> None:
    out_HWC[...] = np.asarray(
        Image.fromarray(simplejpeg.decode_jpeg(data)).resize(
            (SIDE, SIDE), Image.Resampling.BILINEAR
        )
    )


def simplejpeg_five_eighths(data: bytes, out_HWC: np.ndarray) -> None:
    _squeeze_into(simplejpeg.decode_jpeg(data, min_height=SIDE, min_width=SIDE), out_HWC)


def simplejpeg_fast_dct(data: bytes, out_HWC: np.ndarray) -> None:
    _squeeze_into(simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True), out_HWC)


def with_others() -> dict[str, Decode]:
    """Candidates of libraries that are not ours."""
    others: dict[str, Decode] = {}
    with suppress(ImportError):
        cv2 = importlib.import_module("cv2")
        cv2.setNumThreads(0)

        def opencv(data: bytes, out_HWC: np.ndarray, how: int = cv2.INTER_LINEAR) -> None:
            pixels_HWC = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
            cv2.resize(pixels_HWC, (SIDE, SIDE), dst=out_HWC, interpolation=how)

        others["opencv_aliased"] = opencv
        others["opencv_area"] = lambda data, out_HWC: opencv(data, out_HWC, cv2.INTER_AREA)
        others["simplejpeg_then_opencv_aliased"] = lambda data, out_HWC: cv2.resize(
            simplejpeg.decode_jpeg(data), (SIDE, SIDE), dst=out_HWC, interpolation=cv2.INTER_LINEAR
        )
    return others


def rate(decode: Decode, encoded: list[bytes], out_BHWC: np.ndarray) -> float:
    """Images a second."""
    Image.core.set_blocks_max(256 if decode is pillow_block_cache else 0)
    with ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        list(pool.map(decode, encoded, out_BHWC))
        return len(encoded) / (time.perf_counter() - started)


def measure() -> dict[str, object]:
    encoded, out_BHWC = photos(IMAGES), np.empty((IMAGES, SIDE, SIDE, 3), np.uint8)
    ours = [decode_into, pillow, pillow_block_cache, pillow_then_torch, pillow_half_scale]
    ours += [simplejpeg_then_pillow, simplejpeg_five_eighths, simplejpeg_fast_dct]
    candidates: dict[str, Decode] = {f.__name__: f for f in ours} | with_others()
    whole = [
        Image.open(io.BytesIO(data)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        for data in encoded
    ]
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    apart = {}
    for _ in range(ROUNDS):
        for name, decode in candidates.items():
            rates[name].append(rate(decode, encoded, out_BHWC))
            apart[name] = round(
                float(np.abs(out_BHWC.astype(np.int16) - np.stack(whole)).mean()), 2
            )
    steady = {
        name: values[1:] for name, values in rates.items()
    }  # the first round loads libraries and warms caches
    return {
        "images_per_s": {name: round(statistics.median(values)) for name, values in steady.items()},
        "ratios": {
            name: round(
                statistics.median(v / p for v, p in zip(values, steady["pillow"], strict=True)), 2
            )
            for name, values in steady.items()
        },
        "apart": apart,
        "kilobytes": round(sum(map(len, encoded)) / IMAGES / 1000, 1),
        "threads": THREADS,
    }


if __name__ == "__main__":
    result = measure()
    print(json.dumps(result) if "--json" in sys.argv else json.dumps(result, indent=2))
