"""200 small images of every kind that a table may hold: the same answer to each is owed everywhere.

In turn: JPEG, PNG, grey JPEG, grey PNG, RGBA PNG, CMYK JPEG, JPEG turned by EXIF (orientations 2 to
8), WebP, palette PNG, and PNG of 16 bits. Sizes differ, so each is resized, up or down.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from tests.conftest import encode, texture

KINDS = ("jpeg", "png", "grey", "grey_png", "rgba", "cmyk", "exif", "webp", "palette", "deep")


def mixed_images(count: int = 200) -> list[bytes]:
    """Encoded bytes; image i is of kind KINDS[i % 10]."""
    images = []
    for i in range(count):
        picture = texture(i, side_px=24 + 7 * (i % 13))
        # Not square, so that turning by EXIF shows.
        picture = picture.resize((picture.width + i % 5, picture.height))
        images.append(_as(KINDS[i % len(KINDS)], picture, i))
    return images


def _as(kind: str, picture: Image.Image, i: int) -> bytes:
    if kind == "jpeg":
        return encode(picture, "JPEG", quality=90)
    if kind == "grey":
        return encode(picture.convert("L"), "JPEG", quality=90)
    if kind == "grey_png":
        return encode(picture.convert("L"))
    if kind == "rgba":
        ramp = np.linspace(0, 255, picture.width, dtype=np.uint8)
        picture.putalpha(Image.fromarray(np.tile(ramp, (picture.height, 1))))
        return encode(picture)
    if kind == "cmyk":
        return encode(picture.convert("CMYK"), "JPEG", quality=90)
    if kind == "exif":
        exif = Image.Exif()
        exif[0x0112] = 2 + (i // 10) % 7
        return encode(picture, "JPEG", quality=90, exif=exif)
    if kind == "webp":
        return encode(picture, "WEBP", quality=90)
    if kind == "palette":
        return encode(picture.convert("P"))
    if kind == "deep":
        grey_HW = np.asarray(picture.convert("L")).astype(np.uint16)
        return encode(Image.fromarray(grey_HW * 257))
    return encode(picture)
