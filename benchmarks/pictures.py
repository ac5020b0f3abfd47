"""A generated image table that costs what photographs cost: 500x375 JPEG, quality 90, about 40 kB
each, no two alike.

Natural images have amplitudes that fall with frequency, edges, and grain. Here crops of eight cloud
textures meet along the outline of a third one, under sensor noise of varying strength: 40 kB on
average, 30-50 kB each. Drawn by seed, so every machine gets the same pixels. 6,000 images take
about 20 s on two cores.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

WIDTH, HEIGHT = 500, 375
TEXTURES, TEXTURE_PX = 8, 900
CLASSES = 10
AT_ONCE = 128  # pictures drawn ahead


def table(folder: Path, images: int) -> str:
    """The uri of a table of so many images, all in split `train`; written on first use, whole or
    not at all.
    """
    # Imported here: folders of JPEGs are made without deltalake, too.
    from raypipe.tables.schema import SCHEMA
    from raypipe.tables.table import append

    uri = folder / f"images-{images}"
    if not uri.exists():
        partial = uri.with_name(f"{uri.name}.partial-{os.getpid()}")
        append(str(partial), pa.RecordBatchReader.from_batches(SCHEMA, _rows(images)), "benchmark")
        partial.rename(uri)
    return str(uri)


def jpegs(folder: Path, images: int) -> list[Path]:
    """The same pictures as files; written on first use."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i:06d}.jpg" for i in range(images)]
    missing = [i for i, file in enumerate(files) if not file.exists()]
    for i, data in zip(missing, photos(missing), strict=True):
        partial = files[i].with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(files[i])
    return files


def photos(numbers: Sequence[int]) -> Iterator[bytes]:
    """The encoded pictures of these numbers, drawn on all cores."""
    rng = np.random.default_rng(0)
    textures = [_texture(rng) for _ in range(TEXTURES)]
    grain_HW1 = rng.normal(0, 1, (TEXTURE_PX, WIDTH, 1)).astype(np.float32)
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(numbers), AT_ONCE):
            yield from pool.map(
                lambda i: photo(i, textures, grain_HW1), numbers[start : start + AT_ONCE]
            )


def _rows(images: int) -> Iterator[pa.RecordBatch]:
    from raypipe.tables.schema import ROWS_PER_GROUP, SCHEMA

    drawn = enumerate(photos(range(images)))
    while group := [_row(i, data) for i, data in itertools.islice(drawn, ROWS_PER_GROUP)]:
        yield pa.RecordBatch.from_pylist(group, SCHEMA)


def photo(seed: int, textures: list[Image.Image], grain_HW1: np.ndarray) -> bytes:
    """The encoded picture of this number."""
    rng = np.random.default_rng([1, seed])

    def crop(k: int) -> Image.Image:
        x, y = int(rng.integers(TEXTURE_PX - WIDTH)), int(rng.integers(TEXTURE_PX - HEIGHT))
        return textures[k].crop((x, y, x + WIDTH, y + HEIGHT))

    front, back, outline = (crop(int(k)) for k in rng.integers(0, TEXTURES, 3))
    level = int(rng.integers(100, 156))
    scene = Image.composite(front, back, outline.convert("L").point(lambda v: 255 * (v > level)))
    noise_HW1 = grain_HW1[int(rng.integers(TEXTURE_PX - HEIGHT)) :][:HEIGHT] * rng.uniform(1, 4)
    pixels_HWC = (np.asarray(scene) + noise_HW1).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "JPEG", quality=90)
    return out.getvalue()


def _texture(rng: np.random.Generator) -> Image.Image:
    """Noise of all scales from half the picture down to a pixel or two, weaker as it gets finer."""
    cloud_HWC = np.zeros((TEXTURE_PX, TEXTURE_PX, 3), np.float32)
    for cells in (2**octave for octave in range(1, 10)):
        for channel in range(3):
            noise = Image.fromarray(rng.standard_normal((cells, cells), dtype=np.float32))
            cloud_HWC[..., channel] += (
                np.asarray(noise.resize((TEXTURE_PX, TEXTURE_PX), Image.Resampling.BICUBIC))
                / cells**0.65
            )
    cloud_HWC = (cloud_HWC - cloud_HWC.mean()) / cloud_HWC.std() * 45 + 128
    return Image.fromarray(cloud_HWC.clip(0, 255).astype(np.uint8))


def _row(number: int, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    return {
        "image_id": digest,
        "sha256": digest,
        "label": f"class-{number % CLASSES}",
        "split": "train",
        "source": "benchmark",
        "path": f"{number:06d}.jpg",
        "format": "JPEG",
        "width": WIDTH,
        "height": HEIGHT,
        "bytes": len(data),
        "look": digest,  # 256 bits like a perceptual hash; nothing here compares looks
        "family": digest,
        "image": data,
    }
