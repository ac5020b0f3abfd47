"""Encoded bytes -> uint8 RGB pixels: as safe as Pillow with a short list of formats, at twice its speed.

Pillow is the judge: what it opens from the allow-list (it knows 40 formats, most never fuzzed), within the pixel limit (a 12 kB
PNG can be 100 megapixels) and decodes to the last row (`verify()` misses truncated JPEGs) is an image. `jpeg.py` decodes plain
JPEGs to the same pixels in fewer steps, and what it declines comes here. Sizes are changed by torch's antialiased kernel, which
rounds as Pillow does and takes a sixth of the time. Threads scale: all three release the GIL. 500x375 JPEG -> 224 px on two
threads: 2.2 times Pillow alone; OpenCV is faster only where it aliases (benchmarks/results/2026-11-21-decode.md).

Shapes: pixels_HWC is uint8, 0-255, RGB, upright; sides in pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from PIL import ExifTags, Image

from raypipe.errors import DataError
from raypipe.images import jpeg

Format = Literal["JPEG", "PNG", "WEBP", "TIFF", "BMP"]
Encoded: TypeAlias = bytes | memoryview  # or any other contiguous buffer, such as pyarrow's
FORMATS: tuple[Format, ...] = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
GRAY_PX = 128  # inspect's gray picture may be this small: 7 pixels to a cell of the hash, which moves 2 of its 256 bits


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


def open_image(
    data: Encoded, max_pixels: int = MAX_PIXELS, formats: tuple[Format, ...] = FORMATS
) -> Image.Image:
    """A lazily opened image of an allowed format and size. Raises BadImage; decodes nothing yet."""
    if not data:
        raise BadImage("empty", "0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as e:  # Pillow's own limit, while it reads the header
        raise BadImage("too_large", str(e)) from None
    except (
        Exception
    ) as e:  # Pillow raises a dozen kinds on hostile bytes; all of them mean the same to us
        raise BadImage(
            "not_an_image",
            f"no {'/'.join(formats)} header in {len(data)} bytes ({type(e).__name__})",
        ) from None
    if image.width * image.height > max_pixels:
        raise BadImage("too_large", f"{image.width}x{image.height} is over {max_pixels:,} pixels")
    if (
        image.format in ("JPEG", "MPO")
        and (scans := jpeg.count_scans(bytes(data))) > jpeg.MAX_SCANS
    ):
        raise BadImage(
            "too_many_scans", f"{scans} scans of {image.width}x{image.height} would take minutes"
        )
    return image


def inspect(
    data: Encoded, max_pixels: int = MAX_PIXELS, formats: tuple[Format, ...] = FORMATS
) -> tuple[ImageInfo, np.ndarray]:
    """Decode to the last row; (info, gray_HW uint8 for the perceptual hash, of large JPEGs a reduced one). Raises BadImage."""
    plain = (
        jpeg.decode(bytes(data or b""), max_pixels, GRAY_PX, gray=True)
        if "JPEG" in formats
        else None
    )
    if plain:
        return ImageInfo("JPEG", plain.width, plain.height, plain.mode), _turn_plain(
            plain, data, max_pixels
        )[..., 0]
    image = open_image(data, max_pixels, formats)
    kind = (
        "JPEG" if image.format == "MPO" else image.format or ""
    )  # phones' MPO: a JPEG with more pictures behind it
    info = ImageInfo(kind, image.width, image.height, image.mode)
    return info, np.asarray(Image.fromarray(_load(image)).convert("L"))


def decode(
    data: Encoded,
    side_px: int | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[Format, ...] = FORMATS,
) -> np.ndarray:
    """pixels_HWC of one image; squeezed to side_px x side_px when given (aspect is not kept, nothing is cut off)."""
    if side_px is None:
        return _pixels(data, None, max_pixels, formats)
    pixels_HWC = np.empty((side_px, side_px, 3), dtype=np.uint8)
    decode_into(data, pixels_HWC, max_pixels, formats)
    return pixels_HWC


def decode_into(
    data: Encoded,
    out_HWC: np.ndarray,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[Format, ...] = FORMATS,
) -> None:
    """One image into its slot of a batch, squeezed to the slot's size: uint8, contiguous. Raises BadImage, slot untouched."""
    pixels_HWC = _pixels(data, max(out_HWC.shape[:2]), max_pixels, formats)
    if pixels_HWC.shape == out_HWC.shape:
        out_HWC[...] = pixels_HWC
    else:
        _resize_into(pixels_HWC, out_HWC)


def decode_batch(encoded: Sequence[Encoded], side_px: int, threads: int = 2) -> np.ndarray:
    """pixels_BHWC of many images, decoded by threads straight into one preallocated batch. Raises BadImage."""
    pixels_BHWC = np.empty((len(encoded), side_px, side_px, 3), dtype=np.uint8)

    def one(i: int) -> None:
        try:
            decode_into(encoded[i], pixels_BHWC[i])
        except BadImage as bad:
            fix = "raypipe clean finds such images and tags a version without them"
            raise BadImage(
                bad.reason, f"{bad.detail}, image {i} of a batch of {len(encoded)}", fix
            ) from None

    with ThreadPoolExecutor(max(1, threads)) as pool:
        list(pool.map(one, range(len(encoded))))
    return pixels_BHWC


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """Lossless bytes of uint8 pixels (HW or HWC), quickly rather than small."""
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _pixels(
    data: Encoded, least_px: int | None, max_pixels: int, formats: tuple[Format, ...]
) -> np.ndarray:
    """Upright pixels_HWC; a JPEG at the smallest power-of-two scale with both sides >= least_px (all of it when None)."""
    plain = jpeg.decode(bytes(data or b""), max_pixels, least_px) if "JPEG" in formats else None
    if plain:
        return _turn_plain(plain, data, max_pixels)
    image = open_image(data, max_pixels, formats)
    if least_px and image.format in ("JPEG", "MPO"):
        image.draft(
            None, (least_px, least_px)
        )  # decodes only the frequencies that survive the resize
    return _load(image)


def _resize_into(pixels_HWC: np.ndarray, out_HWC: np.ndarray) -> None:
    """Antialiased bilinear resampling, equal to Pillow's BILINEAR to the last bit on x86."""
    import torch  # not at the top: ingest only inspects, and its many processes need not load it

    source, out = (
        torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels_HWC, out_HWC)
    )
    # The operator under interpolate(antialias=True), for its `out`: interpolate returns NCHW, and turning costs as much again.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        source, out_HWC.shape[:2], False, None, None, out=out
    )


def _load(image: Image.Image) -> np.ndarray:
    """Upright pixels_HWC, decoded to the last row."""
    try:
        image.load()
        pixels_HWC = np.array(_to_rgb(image))
    except BadImage:
        raise
    except Exception as e:
        raise BadImage(
            "broken", f"{image.format} header, but the pixels do not decode ({e})"
        ) from None
    return _turn(pixels_HWC, image)


def _turn_plain(plain: jpeg.Jpeg, data: Encoded, max_pixels: int) -> np.ndarray:
    return (
        _turn(plain.pixels, open_image(data, max_pixels, ("JPEG",)))
        if plain.tagged
        else plain.pixels
    )


def orientation(image: Image.Image) -> int:
    """1 to 8, as the image's EXIF or XMP says; metadata that cannot be read, or say something else, mean 1: upright."""
    try:
        told = image.getexif().get(ExifTags.Base.Orientation, 1)
        return told if told in range(1, 9) else 1
    except Exception:  # hostile metadata raise anything
        return 1


def lies(image: Image.Image) -> bool:
    """Are width and height exchanged once the image is upright?"""
    return orientation(image) in (5, 6, 7, 8)


def _turn(pixels_HWC: np.ndarray, image: Image.Image) -> np.ndarray:
    """Upright, with strides that torch takes."""
    told = orientation(image)
    if told == 1:
        return pixels_HWC
    if told in (5, 6, 7, 8):
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    down, left = told in (3, 4, 7, 8), told in (2, 3, 6, 7)
    # Not ascontiguousarray: it calls a flipped axis of one pixel contiguous and leaves its stride negative.
    return np.array(pixels_HWC[:: -1 if down else 1, :: -1 if left else 1], order="C", copy=True)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F"):
        raise BadImage(
            "unsupported",
            "32-bit samples have no range of their own; save the image with 8 or 16 bits",
        )
    if image.mode.startswith(
        "I;16"
    ):  # the high byte, as libpng does for 16-bit RGB; Pillow's own conversion clips
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if (
        image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    ):  # colours under alpha are arbitrary: show white
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
