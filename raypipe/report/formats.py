"""Numbers and pictures as a page shows them. The template calls these functions as filters."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from raypipe.errors import hidden
from raypipe.images.decode import orientation, upright

THUMBNAIL_PX = 160
MINUS = "\N{MINUS SIGN}"
LIMITS = 0.05, 0.01  # of p-values, where nobody sets others
DIGITS = 17  # at most: a float has no more


def number(value: Any) -> str:
    """Format a number: 1234567 -> 1,234,567; 0.000123456 -> 0.0001235; 1e-07 -> 1e-7.

    Any other value is returned as `str(value)`.
    """
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:,.0f}" if _is_large(value) else f"{value:.4g}".replace("e-0", "e-")
    # The sign becomes a minus sign. An exponent keeps its hyphen, because people copy it.
    return text.replace("-", MINUS, 1) if value < 0 else text


def _is_large(value: float) -> bool:
    """Would four digits be an exponent? 9999.6 rounds to 10,000."""
    return 9999.5 <= abs(value) < 1e9


def cell(value: Any) -> str:
    """Any value of a result as one line of text, without credentials."""
    if isinstance(value, float):
        return f"{value:.0f}" if _is_large(value) else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value)) or "–"
    if value is None or value == "":
        return "–"
    # A label may be a dash itself.
    return "'–'" if value == "–" else hidden(str(value))


def chance(p: float, limit: float | None = None) -> str:
    """Format a p-value without an exponent, to two significant digits, or more beside a limit.

    limit: what it is compared with, besides LIMITS.
    0 is shown as "≈ 0": no permutation of the test was as extreme. That is not "< 0.000001".
    NaN is "–": whoever compares with it would read the smallest of all.
    """
    if math.isnan(p):
        return "–"
    if p >= 1e-6:
        decimals = max(2, 1 - math.floor(math.log10(p)))
        return beside(p, lambda more: f"{p:.{decimals + more}f}", limit)
    return "≈ 0" if p == 0 else "< 0.000001"


def beside(p: float, shown: Callable[[int], str], limit: float | None = None) -> str:
    """A p-value on its own side of LIMITS and `limit`: 0.04999 is below 0.05, and so is its text.

    shown: the text with so many digits more than usual.
    """
    limits = [*LIMITS, *([] if limit is None else [limit])]
    for more in range(DIGITS):
        text = shown(more)
        rounded = float(text)
        if all((rounded > at, rounded < at) == (p > at, p < at) for at in limits):
            break
    return text


def begun(trials: int, heads: int) -> str:
    """What a search has tried: 3 trials and 6 heads of the first answer."""
    text = f"{number(trials)} trial{'s' * (trials != 1)}"
    if heads:
        text += f" and {number(heads)} head{'s' * (heads != 1)} of the first answer"
    return text


def points(difference: float) -> str:
    """Format a difference of two shares in percentage points, with its sign and without "-0.0"."""
    digits = digits_of(difference)
    rounded = round(100 * difference, digits) or 0.0
    return f"{rounded:+.{digits}f}".replace("-", MINUS)


def digits_of(difference: float) -> int:
    """Decimals of percentage points: one, or more where that would say 0 of a difference."""
    return next((digits for digits in (1, 2, 3) if round(100 * difference, digits)), 1)


def tenths(share: float) -> str:
    """A share in per cent to a tenth, or finer where that would say 0 or 100 of one that is
    neither.
    """
    text = ""
    for digits in range(1, 6):
        text = f"{100 * share:.{digits}f}"
        if not 0 < share < 1 or 0 < float(text) < 100:
            break
    return text


def thumbnail(image: bytes) -> str | None:
    """Shrink an encoded image to 160 px and return it as a data URI.

    PNG and JPEG are tried, and the smaller one is used. None if the bytes cannot be decoded.
    """
    # A decoder may raise anything on hostile bytes. One bad picture must not cost the whole report.
    try:
        picture = _shrunk(image)
        jpeg, png = io.BytesIO(), io.BytesIO()
        picture.save(jpeg, "jpeg", quality=85)
        picture.save(png, "png", optimize=True)
    except Exception:
        return None
    kind, data = "jpeg", jpeg.getvalue()
    if len(png.getvalue()) < len(data):
        kind, data = "png", png.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _shrunk(image: bytes) -> Image.Image:
    """Decode an image to 8-bit gray or RGB of at most THUMBNAIL_PX a side: upright, on white."""
    picture: Image.Image = Image.open(io.BytesIO(image), formats=("JPEG", "PNG", "WEBP"))
    turn = orientation(picture)
    if picture.mode.startswith("I"):
        # 16-bit gray of industrial cameras: convert() would clip it to white, so scale it.
        gray = np.asarray(picture, np.float32)
        scale = 255 / max(1.0, gray.max())
        picture = Image.fromarray((gray * scale).astype(np.uint8))
    elif picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        # Colours under alpha are arbitrary; models see white there, too.
        above = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    picture = picture.convert("L" if picture.mode == "L" else "RGB")
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    return Image.fromarray(upright(np.asarray(picture), turn))
