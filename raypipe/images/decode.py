"""Encoded bytes -> uint8 RGB pixels, safely.

Formats are on an allow-list (Pillow opens 40 kinds, most never fuzzed), pixels are capped before anything is allocated (a
12 kB PNG can be 100 megapixels), and decoding always runs to the last row: `verify()` misses truncated JPEGs. Pillow releases
the GIL while it decodes, so threads scale. JPEGs decode at a reduced DCT scale when a smaller picture is asked for.

Shapes: pixels_HWC is uint8, 0-255, RGB.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from raypipe.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000


class BadImage(DataError):
    """Bytes that are not an image we accept; `reason` is one word for counting, the message is for people."""

    def __init__(self, reason: str, detail: str, fix: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}", fix=fix)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str, str]]:
        return BadImage, (self.reason, self.detail, self.fix)


@dataclass(frozen=True)
class ImageInfo:
    """What ingest records of an accepted image; sizes in pixels, before EXIF rotation."""

    format: str
    width: int
    height: int
    mode: str


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A lazily opened image of an allowed format and size. Raises BadImage; decodes nothing yet."""
    if not data:
        raise BadImage("empty", "0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bomb warning: our limit is stricter and raises
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as e:  # Pillow refuses twice its own limit while it reads the header
        raise BadImage("too_large", str(e)) from None
    except Exception as e:  # Pillow raises a dozen kinds on hostile bytes; all of them mean the same to us
        raise BadImage("not_an_image", f"no {'/'.join(FORMATS)} header in {len(data)} bytes ({type(e).__name__})") from None
    if image.width * image.height > max_pixels:
        raise BadImage("too_large", f"{image.width}x{image.height} is over {max_pixels:,} pixels")
    return image


def inspect(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[ImageInfo, np.ndarray]:
    """Decode every pixel; (info, grayscale uint8 HW for the perceptual hash). Raises BadImage when any row is missing."""
    image = open_image(data, max_pixels)
    info = ImageInfo(image.format or "", image.width, image.height, image.mode)
    return info, np.asarray(_to_rgb(_load(image)).convert("L"))


def decode(data: bytes, side_px: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """pixels_HWC of one image; squeezed to side_px x side_px when given (aspect is not kept, nothing is cut off)."""
    image = open_image(data, max_pixels)
    if side_px is not None and image.format == "JPEG":
        image.draft("RGB", (side_px, side_px))  # DCT scaling: decodes only the frequencies that survive the resize
    rgb = _to_rgb(_load(image))
    if side_px is not None and rgb.size != (side_px, side_px):
        rgb = rgb.resize((side_px, side_px), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(rgb)


def decode_batch(encoded: Sequence[bytes], side_px: int, threads: int = 2) -> np.ndarray:
    """pixels_BHWC of many images, decoded by threads straight into one preallocated batch. Raises BadImage."""
    pixels_BHWC = np.empty((len(encoded), side_px, side_px, 3), dtype=np.uint8)

    def one(i: int) -> None:
        try:
            pixels_BHWC[i] = decode(encoded[i], side_px)
        except BadImage as bad:
            fix = "raypipe clean finds such images and tags a version without them"
            raise BadImage(bad.reason, f"{bad.detail}, image {i} of a batch of {len(encoded)}", fix) from None

    with ThreadPoolExecutor(max(1, threads)) as pool:
        list(pool.map(one, range(len(encoded))))
    return pixels_BHWC


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """Lossless bytes of uint8 pixels (HW or HWC), quickly rather than small."""
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _load(image: Image.Image) -> Image.Image:
    try:
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception as e:
        raise BadImage("broken", f"{image.format} header, but the pixels do not decode ({e})") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # 16-bit grayscale: keep the high byte, do not clip
        pixels = np.asarray(image).astype(np.float32)
        return Image.fromarray(np.clip(pixels / 257.0, 0, 255).astype(np.uint8)).convert("RGB")
    if (
        image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    ):  # hidden colours under alpha are arbitrary: show white
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
