"""The copy of an image that a prepared table holds: smaller, upright, quick to decode.

It has the pixels that `decode` gives: upright, 8 bits, RGB, transparent parts white. The shorter
side has `side_px` pixels, for training crops and squeezes to a square of about that size. An image
is never enlarged. One that is small and upright already keeps its bytes: coding it again would
lose detail and win nothing.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from raypipe.errors import ConfigError
from raypipe.images import decode

Coding = Literal["same", "jpeg", "png", "webp"]
LONGEST_PX = {"JPEG": 65_500, "WEBP": 16_383}  # a side that their encoders take


@dataclass(frozen=True)
class Shape:
    """How images are prepared.

    side_px: the shorter side at most. coding: `same` keeps each image's own format. quality: 1 to
    100, of JPEG and WebP. Raises ConfigError.
    """

    side_px: int
    coding: Coding = "same"
    quality: int = 90

    def __post_init__(self) -> None:
        if self.side_px < 1:
            raise ConfigError(
                "This is no side of an image",
                got=f"side {self.side_px}",
                rule="The shorter side has at least one pixel",
                fix="Give a little more than the model's own size, like --side 256",
            )
        if self.coding not in get_args(Coding):
            raise ConfigError(
                "Images cannot be stored in this format",
                got=self.coding,
                rule=f"One of {', '.join(get_args(Coding))}",
            )
        if not 1 <= self.quality <= 100:
            raise ConfigError(
                "This is no quality of an image", got=self.quality, rule="1 to 100", fix="Take 90"
            )


@dataclass(frozen=True)
class Copy:
    """Bytes of an image, and what they are; width and height in pixels."""

    data: decode.Encoded
    format: str
    width: int
    height: int


def prepared(data: decode.Encoded, shape: Shape) -> Copy:
    """The copy to store; `data` itself where nothing is to do. Raises BadImage."""
    image = decode.open_image(data)
    # MPO, of phones, is a JPEG with more pictures behind it.
    own = "JPEG" if image.format == "MPO" else image.format or ""
    kind = own if shape.coding == "same" else shape.coding.upper()

    # The size of the copy, upright.
    width, height = image.size
    if decode.sides_exchanged(image):
        width, height = height, width
    scale = min(1.0, shape.side_px / min(width, height))
    width, height = (max(1, round(side * scale)) for side in (width, height))
    # A strip of a scanner may be longer than that: it keeps its own format.
    if max(width, height) > LONGEST_PX.get(kind, max(width, height)):
        kind = own

    # Decode and resize in one go. All images are decoded, so that none passes that is broken.
    pixels_HWC = np.empty((height, width, 3), np.uint8)
    decode.decode_into(data, pixels_HWC)
    if kind == own and scale == 1.0 and decode.orientation(image) == 1:
        return Copy(data, own, width, height)
    return Copy(_encode(pixels_HWC, kind, shape.quality), kind, width, height)


def _encode(pixels_HWC: np.ndarray, kind: str, quality: int) -> bytes:
    picture = Image.fromarray(pixels_HWC)
    # Gray pictures need one channel, whatever their file had.
    red, green, blue = (pixels_HWC[..., channel] for channel in range(3))
    if np.array_equal(red, green) and np.array_equal(red, blue):
        picture = picture.convert("L")
    options = {"compress_level": 6} if kind == "PNG" else {"quality": quality}
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()
