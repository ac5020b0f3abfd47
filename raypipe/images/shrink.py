"""A smaller copy of an image in its own format: what ingest stores when asked for at most so many pixels a side.

Upright 8-bit pixels, as every reader here decodes them; colour profiles and other metadata are left behind. TIFF and BMP become
PNG, also when they are small: what is stored needs three decoders, not five.
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
    """The bytes to keep and what they are: `data` itself, or encoded again with its longer side at most `max_side` pixels.

    `quality` (1-100) is that of JPEG and WebP. Raises BadImage.
    """
    longer = max(info.width, info.height)
    if info.format in KEPT and (max_side is None or longer <= max_side):
        return data, info
    lying = decode.lies(decode.open_image(data, max_pixels, formats))
    scale = min(1.0, (max_side or longer) / longer)
    height, width = (
        max(1, round(side * scale)) for side in (info.height, info.width)[:: -1 if lying else 1]
    )
    pixels_HWC = np.empty((height, width, 3), np.uint8)
    decode.decode_into(data, pixels_HWC, max_pixels, formats)
    image = Image.fromarray(pixels_HWC)
    if info.mode in ("1", "L"):
        image = image.convert("L")
    kind = info.format if info.format in KEPT else "PNG"
    options = {"compress_level": 6} if kind == "PNG" else {"quality": quality}
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue(), decode.ImageInfo(kind, image.width, image.height, image.mode)
