"""Encoded bytes -> uint8 RGB pixels: as safe as Pillow with a short list of formats, twice as fast.

Pillow decides whether bytes are an image. They must be of an allowed format (Pillow knows 40, most
never fuzzed), within the pixel limit (a 12 kB PNG can be 100 megapixels), and decode to the last
row (`verify()` misses truncated JPEGs).

`jpeg.py` decodes plain JPEGs to the same pixels in fewer steps. What it declines comes here. Sizes
are changed by torch's antialiased kernel: it rounds as Pillow does and takes a sixth of the time.
All three release the GIL, so threads scale. A 500x375 JPEG -> 224 px on two threads: 2.2 times
Pillow alone. OpenCV is faster only where it aliases (benchmarks/results/2026-11-21-decode.md).

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

from raypipe.errors import DataError, one_line
from raypipe.images import jpeg

Format = Literal["JPEG", "PNG", "WEBP", "TIFF", "BMP"]
Encoded: TypeAlias = bytes | memoryview  # or any other contiguous buffer, such as pyarrow's
Picture: TypeAlias = bytes | memoryview | np.ndarray  # encoded, or pixels_HWC that are decoded
FORMATS: tuple[Format, ...] = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
PNG = b"\x89PNG\r\n\x1a\n"

# inspect's gray picture may be this small. A cell of the hash is then 7 pixels wide, which changes
# 2 of its 256 bits.
GRAY_PX = 128

# Of gray samples of a few bits: the step between two levels, when they are stretched to 0..255.
GRAY_STEPS = {"L;2": 85, "L;4": 17}
RGB_16, RGB_16_LOW = "RGB;16B", "RGB;16L"  # of 16-bit colours, as a PNG has them, and turned around
DARK = 4096 >> 8  # the high byte of a 16-bit sample, which is read, stays below it for 12 bits
TIFF_PHOTOMETRIC = 262  # the tag that says whether 0 is black or white

# EXIF orientations (1: upright), by what must be undone.
SIDEWAYS = (5, 6, 7, 8)
UPSIDE_DOWN = (3, 4, 7, 8)
MIRRORED = (2, 3, 6, 7)


class BadImage(DataError):
    """Bytes that are not an image we accept.

    reason: one word for counting. detail: for people.
    """

    def __init__(self, reason: str, detail: str, fix: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}", fix=fix)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str, str]]:
        return BadImage, (self.reason, self.detail, self.fix)


@dataclass(frozen=True)
class ImageInfo:
    """What ingest records of an accepted image; sizes in pixels, before EXIF rotation.

    more: the file has further pages or frames, of which nothing is read. dark: its samples have 16
    bits, and all are below 4096, as those of a camera of 12 bits or fewer. They are read as levels
    0 to 15 of 255.
    """

    format: str
    width: int
    height: int
    mode: str
    more: bool = False
    dark: bool = False


def open_image(
    data: Encoded, max_pixels: int = MAX_PIXELS, formats: tuple[Format, ...] = FORMATS
) -> Image.Image:
    """A lazily opened image of an allowed format and size. Raises BadImage; decodes nothing yet."""
    if not data:
        raise BadImage("empty", "0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        # Pillow's own limit, which it checks while it reads the header.
        raise BadImage("too_large", str(e)) from None
    except Exception as e:
        # Pillow raises a dozen kinds of error on hostile bytes; they all mean the same.
        allowed = "/".join(formats)
        detail = f"no {allowed} header in {len(data)} bytes ({type(e).__name__})"
        raise BadImage("not_an_image", detail) from None

    if image.width * image.height > max_pixels:
        raise BadImage("too_large", f"{image.width}x{image.height} is over {max_pixels:,} pixels")
    if _is_jpeg(image):
        scans = jpeg.scans(bytes(data))
        if scans > jpeg.MAX_SCANS:
            size = f"{image.width}x{image.height}"
            raise BadImage("too_many_scans", f"{scans} scans of {size} would take minutes")
    return image


def inspect(
    data: Encoded, max_pixels: int = MAX_PIXELS, formats: tuple[Format, ...] = FORMATS
) -> tuple[ImageInfo, np.ndarray]:
    """Decode to the last row: (info, gray_HW uint8 for the perceptual hash). Raises BadImage.

    gray_HW of a large JPEG is a reduced picture.
    """
    # The fast way, for plain JPEGs.
    if "JPEG" in formats:
        simple = jpeg.decode(bytes(data or b""), max_pixels, GRAY_PX, gray=True)
        if simple is not None:
            info = ImageInfo("JPEG", simple.width, simple.height, simple.mode)
            return info, _upright(simple, data, max_pixels)[..., 0]

    image = open_image(data, max_pixels, formats)
    # MPO, of phones, is a JPEG with more pictures behind it.
    format = "JPEG" if image.format == "MPO" else image.format or ""
    # What a phone adds to a JPEG is the same photograph, smaller or deeper.
    more = format != "JPEG" and bool(getattr(image, "is_animated", False))
    # Asked before `_load` forgets it.
    samples = _samples(image)
    # BGR;16 is a BMP that has 16 bits for the three colours of a pixel together.
    is_deep = ";16" in samples and not samples.startswith("BGR")
    pixels_HWC = _load(image)
    dark = is_deep and int(pixels_HWC.max()) < DARK
    info = ImageInfo(format, image.width, image.height, image.mode, more, dark)
    gray = Image.fromarray(pixels_HWC).convert("L")
    return info, np.asarray(gray)


def decode(
    data: Encoded,
    side_px: int | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[Format, ...] = FORMATS,
) -> np.ndarray:
    """pixels_HWC of one image. Raises BadImage.

    side_px: squeezed to side_px x side_px (aspect is not kept, nothing is cut off).
    """
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
    """Decode one image into its slot of a batch, squeezed to the slot's size.

    out_HWC: uint8, contiguous. Raises BadImage and leaves the slot untouched.
    """
    _squeeze_into(_pixels(data, max(out_HWC.shape[:2]), max_pixels, formats), out_HWC)


def decode_batch(encoded: Sequence[Encoded], side_px: int, threads: int = 2) -> np.ndarray:
    """pixels_BHWC of many images, decoded by threads into one batch. Raises BadImage."""
    pixels_BHWC, errors = _decode_slots(encoded, side_px, threads)
    if errors:
        slot, bad = min(errors.items())
        detail = f"{bad.detail}, image {slot} of a batch of {len(encoded)}"
        fix = "raypipe clean finds such images and tags a version without them"
        raise BadImage(bad.reason, detail, fix)
    return pixels_BHWC


@dataclass(frozen=True)
class Decoded:
    """The images of a batch that decode, and what is wrong with the others.

    pixels_NHWC: of the N good images only, in order. good: their places in the batch.
    errors: one line for each other place.
    """

    pixels_NHWC: np.ndarray
    good: tuple[int, ...]
    errors: dict[int, str]


def decode_good(encoded: Sequence[Picture | None], side_px: int, threads: int = 2) -> Decoded:
    """Decode what can be decoded, each image once. None counts as a missing image."""
    pixels_BHWC, bad = _decode_slots(encoded, side_px, threads)
    if not bad:
        return Decoded(pixels_BHWC, tuple(range(len(encoded))), {})
    good = tuple(slot for slot in range(len(encoded)) if slot not in bad)
    errors = {}
    for slot in sorted(bad):
        image = bad[slot]
        errors[slot] = one_line(f"{image.reason}: {image.detail}")
    return Decoded(pixels_BHWC[list(good)], good, errors)


def _decode_slots(
    encoded: Sequence[Picture | None], side_px: int, threads: int
) -> tuple[np.ndarray, dict[int, BadImage]]:
    """pixels_BHWC of all images, and by slot what did not decode: its pixels are undefined."""
    pixels_BHWC = np.empty((len(encoded), side_px, side_px, 3), dtype=np.uint8)
    errors: dict[int, BadImage] = {}

    def decode_slot(slot: int) -> None:
        data = encoded[slot]
        try:
            if data is None:
                raise BadImage("missing", "there is no image (null)")
            if isinstance(data, np.ndarray):
                _squeeze_into(_own_pixels(data), pixels_BHWC[slot])
            else:
                decode_into(data, pixels_BHWC[slot])
        except BadImage as bad:
            errors[slot] = bad

    # A pool of one thread only adds waiting: 10 us an image.
    if threads <= 1:
        for slot in range(len(encoded)):
            decode_slot(slot)
        return pixels_BHWC, errors
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode_slot, range(len(encoded))))
    return pixels_BHWC, errors


def _own_pixels(array: np.ndarray) -> np.ndarray:
    """A caller's pixels_HWC with strides that torch accepts. Raises BadImage for other arrays."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        detail = f"{array.dtype} of shape {array.shape}, not uint8 RGB (height, width, 3)"
        raise BadImage("not_pixels", detail)
    return np.array(array, order="C", copy=True)


def size(data: Encoded | None) -> tuple[int, int] | None:
    """(width, height) in pixels as stored, from the header alone; None where there is none.

    Of a JPEG or PNG it takes 2 us, where Pillow reads the whole header in 50.
    """
    head = bytes(data[:24]) if data else b""
    if head.startswith(PNG) and head[12:16] == b"IHDR":
        return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    if head.startswith(jpeg.START):
        found = jpeg.size(bytes(data or b""))
        if found is not None:
            return found
    try:
        with open_image(data or b"") as image:
            return image.width, image.height
    except BadImage:
        return None


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """Lossless bytes of uint8 pixels (HW or HWC), quickly rather than small."""
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "PNG", compress_level=1)
    return out.getvalue()


def orientation(image: Image.Image) -> int:
    """The EXIF or XMP orientation, 1 to 8. 1 (upright) where it is missing or not readable."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
        return value if value in range(1, 9) else 1
    except Exception:  # hostile metadata raise anything
        return 1


def sides_exchanged(image: Image.Image) -> bool:
    """Is the image stored on its side, so that turning it upright exchanges width and height?"""
    # Of a TIFF, Pillow gives the upright size.
    return image.format != "TIFF" and orientation(image) in SIDEWAYS


def _pixels(
    data: Encoded, least_px: int | None, max_pixels: int, formats: tuple[Format, ...]
) -> np.ndarray:
    """Upright pixels_HWC.

    least_px: a JPEG is decoded at the smallest power-of-two scale with both sides >= least_px.
    None: at full size.
    """
    # The fast way, for plain JPEGs.
    if "JPEG" in formats:
        simple = jpeg.decode(bytes(data or b""), max_pixels, least_px)
        if simple is not None:
            return _upright(simple, data, max_pixels)

    image = open_image(data, max_pixels, formats)
    if least_px and _is_jpeg(image):
        # Decode only the frequencies that survive the resize.
        image.draft(None, (least_px, least_px))
    return _load(image)


def _is_jpeg(image: Image.Image) -> bool:
    return image.format in ("JPEG", "MPO")


def _squeeze_into(pixels_HWC: np.ndarray, out_HWC: np.ndarray) -> None:
    """Copy or resample pixels: antialiased, equal to Pillow's BILINEAR to the last bit on x86."""
    if pixels_HWC.shape == out_HWC.shape:
        out_HWC[...] = pixels_HWC
        return
    # Not at the top: ingest only inspects, and its many processes need not load torch.
    import torch

    from raypipe.torch_private import resize_antialiased

    source_NCHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None]
    out_NCHW = torch.from_numpy(out_HWC).permute(2, 0, 1)[None]
    resize_antialiased(source_NCHW, out_HWC.shape[:2], out_NCHW)


def _load(image: Image.Image) -> np.ndarray:
    """Upright pixels_HWC, decoded to the last row."""
    try:
        # How the file holds its samples: asked before `load` forgets it.
        samples = _samples(image)
        nothing_HW = _nothing_here(image, samples)
        image.load()
        pixels_HWC = np.array(_to_rgb(image, samples))
        if nothing_HW is not None:
            pixels_HWC[nothing_HW] = 255
    except BadImage:
        raise
    except Exception as e:
        detail = f"{image.format} header, but the pixels do not decode ({e})"
        raise BadImage("broken", detail) from None
    return upright(pixels_HWC, orientation(image))


def _upright(simple: jpeg.Jpeg, data: Encoded, max_pixels: int) -> np.ndarray:
    """The pixels of a plain JPEG, upright. Its metadata are read only where it has some."""
    if not simple.tagged:
        return simple.pixels
    turn = orientation(open_image(data, max_pixels, ("JPEG",)))
    return upright(simple.pixels, turn)


def upright(pixels_HWC: np.ndarray, turn: int) -> np.ndarray:
    """Pixels of an image with this `orientation`, upright, with strides that torch accepts.

    Gray images may have no last axis.
    """
    if turn == 1:
        return pixels_HWC
    if turn in SIDEWAYS:
        pixels_HWC = pixels_HWC.swapaxes(0, 1)
    down = -1 if turn in UPSIDE_DOWN else 1
    across = -1 if turn in MIRRORED else 1
    # Not ascontiguousarray: it takes a flipped axis of one pixel for contiguous, and leaves its
    # stride negative.
    return np.array(pixels_HWC[::down, ::across], order="C", copy=True)


def _samples(image: Image.Image) -> str:
    """Pillow's name for the samples in the file, like L;4; "" where it has none."""
    tiles = getattr(image, "tile", None)
    args = tiles[0].args if tiles else ""
    return str(args[0] if isinstance(args, tuple) and args else args)


def _nothing_here(image: Image.Image, samples: str) -> np.ndarray | None:
    """Where a PNG of 16-bit colours has its transparent colour, as bool HW; None without one.

    Pillow keeps the high byte of such samples, and other colours share it. Told that they are
    little-endian, it keeps the low byte. So the file is decoded twice more, which few need.
    `image` is not loaded yet.
    """
    key = image.info.get("transparency")
    source = getattr(image, "fp", None)
    if samples != RGB_16 or not isinstance(key, tuple) or not isinstance(source, io.BytesIO):
        return None
    data = source.getvalue()
    nothing_HW = np.ones((image.height, image.width), bool)
    for raw, shift in ((RGB_16, 8), (RGB_16_LOW, 0)):
        with Image.open(io.BytesIO(data), formats=("PNG",)) as again:
            again.tile = [tile._replace(args=raw) for tile in again.tile]  # type: ignore[attr-defined]
            levels = [level >> shift & 255 for level in key]
            nothing_HW &= (np.asarray(again) == levels).all(axis=2)
    return nothing_HW


def _to_rgb(image: Image.Image, samples: str) -> Image.Image:
    """The image in mode RGB. Raises BadImage for samples of 32 bits."""
    key = image.info.get("transparency")  # of a PNG: also one colour that stands for "nothing here"
    if image.mode == "RGB" and (key is None or samples != "RGB"):
        # The transparent colour of 16-bit samples is _nothing_here's.
        return image
    if image.mode in ("I", "F"):
        detail = "32-bit samples have no range of their own; save the image with 8 or 16 bits"
        raise BadImage("unsupported", detail)

    # 16 bits: take the high byte, as libpng does for RGB. Pillow's own conversion clips.
    if image.mode.startswith("I;16"):
        return Image.fromarray(_high_bytes(image, samples)).convert("RGB")

    # Into a BMP most programs write no alpha, and none shows it: 0 everywhere is none.
    if image.format == "BMP" and image.mode == "RGBA" and not image.getchannel("A").getbbox():
        return image.convert("RGB")

    # Transparent: colours under alpha are arbitrary, so show white.
    if image.mode in ("RGBA", "LA", "PA") or key is not None:
        # Pillow stretches gray levels of 2 and 4 bits to 8, and not the level that is transparent.
        if samples in GRAY_STEPS and isinstance(key, int):
            image.info["transparency"] = key * GRAY_STEPS[samples]
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _high_bytes(image: Image.Image, samples: str) -> np.ndarray:
    """Gray levels of 9 to 16 bits as uint8 HW."""
    values_HW = np.asarray(image)
    # A camera's 12 bits, packed: their highest byte begins four bits lower.
    high_HW = (values_HW >> (4 if samples == "I;12" else 8)).astype(np.uint8)
    # Pillow turns WhiteIsZero around for 8 bits only.
    if image.format == "TIFF" and image.tag_v2.get(TIFF_PHOTOMETRIC) == 0:  # type: ignore[attr-defined]
        high_HW = 255 - high_HW
    key = image.info.get("transparency")
    if isinstance(key, int):
        high_HW[values_HW == key] = 255
    return high_HW
