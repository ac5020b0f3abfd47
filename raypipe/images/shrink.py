"""A smaller copy of an image in its own format: what ingest stores under a limit of pixels a side.

The copy has upright 8-bit pixels, as every reader here decodes them. Colour profiles and other
metadata are dropped. TIFF and BMP become PNG, also when they are small enough: stored images then
need three decoders, not five.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from raypipe.images import decode

KEPT = decode.FORMATS


def stored(
    data: decode.Encoded,
    info: decode.ImageInfo,
    max_side: int | None,
    quality: int,
    max_pixels: int = decode.MAX_PIXELS,
    formats: tuple[decode.Format, ...] = decode.FORMATS,
) -> tuple[decode.Encoded, decode.ImageInfo]:
    """The bytes to store, and what they are.

    `data` itself where it is small enough and of a kept format. Else it is encoded again, with
    its longer side at most `max_side` pixels. quality (1-100) is that of JPEG and WebP. Raises
    BadImage.
    """
    longer = max(info.width, info.height)
    if info.format in KEPT and (max_side is None or longer <= max_side):
        return data, info

    # The copy's size. Width and height are exchanged where the image is stored on its side.
    height, width = info.height, info.width
    if decode.sides_exchanged(decode.open_image(data, max_pixels, formats)):
        height, width = width, height
    scale = min(1.0, (max_side or longer) / longer)
    height = max(1, round(height * scale))
    width = max(1, round(width * scale))

    # Decode and resize in one go; gray images stay gray.
    pixels_HWC = np.empty((height, width, 3), np.uint8)
    decode.decode_into(data, pixels_HWC, max_pixels, formats)
    image = Image.fromarray(pixels_HWC)
    if info.mode in ("1", "L"):
        image = image.convert("L")

    # Encode in the image's own format, or without loss.
    kind = info.format if info.format in KEPT else "PNG"
    options = {"compress_level": 6} if kind == "PNG" else {"quality": quality}
    out = io.BytesIO()
    image.save(out, kind, **options)
    copy = decode.ImageInfo(kind, image.width, image.height, image.mode, info.more, info.dark)
    return out.getvalue(), copy
