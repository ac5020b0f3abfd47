"""Shifted copies of pictures: what a model's estimate of its own accuracy is calibrated on.

Labelled pictures of another light or another camera are rare. Copies that are changed on purpose
have labels, so the model's accuracy on them is known (models/severity.py). Each kind changes
something else: geometry, grey levels, detail, or a part of the picture. A strength of 0.3 is hardly
seen, and at 1 most models lose many points.

Noise, blur, brightness, contrast and JPEG are no kinds, on purpose: `benchmarks/severity.py` tests
estimates on these five, as shifts that calibration has not seen.

Letters in names: N pictures, H x W pixels, 3 colours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from raypipe.errors import DataError, nearest

Shift = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def shifted(pixels_NHWC: np.ndarray, kind: str, strength: float, seed: int) -> np.ndarray:
    """Copies of uint8 pictures, changed by a kind of `KINDS` with a strength above 0 and up to 1.

    Equal arguments give equal pixels. DataError for an unknown kind or another strength.
    """
    if kind not in KINDS:
        fix = nearest(kind, list(KINDS))
        raise DataError("There is no such shift of pictures", got=kind, fix=fix)
    if not 0 < strength <= 1:
        raise DataError("A shift's strength is out of range", got=strength, rule="In (0, 1]")
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    changed = [KINDS[kind](pixels_HWC, strength, rng) for pixels_HWC in pixels_NHWC]
    return np.stack(changed) if changed else pixels_NHWC.copy()


def _posterize(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Fewer grey levels: 11 at strength 0.3, 3 at 1."""
    levels = max(2, round(3 / strength))
    step = 255 / (levels - 1)
    return (np.round(pixels_HWC / step) * step).astype(np.uint8)


def _equalize(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Each grey level becomes equally frequent, blended with the picture as it is."""
    counts = np.bincount(pixels_HWC.ravel(), minlength=256)
    equal = np.cumsum(counts) / pixels_HWC.size * 255
    table = (1 - strength) * np.arange(256) + strength * equal
    return table.astype(np.uint8)[pixels_HWC]


def _solarize(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """The brightest levels are inverted, as in a sensor that is overexposed."""
    highest = 255 * (1 - 0.5 * strength)
    table = np.where(np.arange(256) > highest, 2 * highest - np.arange(256), np.arange(256))
    return table.clip(0, 255).astype(np.uint8)[pixels_HWC]


def _gamma(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Another curve of exposure, brighter or darker by chance."""
    exponent = np.exp(strength * rng.choice([-1, 1]))
    table = 255 * (np.arange(256) / 255) ** exponent
    return table.astype(np.uint8)[pixels_HWC]


def _zoom(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """A part of the picture, enlarged: three quarters of its sides at strength 0.5."""
    height, width = pixels_HWC.shape[:2]
    kept = 1 - 0.5 * strength
    left = rng.uniform(0, width * (1 - kept))
    top = rng.uniform(0, height * (1 - kept))
    box = (left, top, left + width * kept, top + height * kept)
    image = Image.fromarray(pixels_HWC)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=box))


def _rotate(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Turned by up to 45 degrees, either way, without empty corners."""
    degrees = 45 * strength * rng.choice([-1, 1])
    margin = max(pixels_HWC.shape[:2]) // 2
    padding = ((margin, margin), (margin, margin), (0, 0))
    wide = Image.fromarray(np.pad(pixels_HWC, padding, mode="symmetric"))
    turned = np.asarray(wide.rotate(degrees, Image.Resampling.BILINEAR))
    return turned[margin : margin + pixels_HWC.shape[0], margin : margin + pixels_HWC.shape[1]]


def _erase(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """A grey rectangle hides a part: dirt on the lens. 40 % of the picture at strength 1."""
    height, width = pixels_HWC.shape[:2]
    share = np.sqrt(0.4 * strength)
    rows, columns = int(height * share), int(width * share)
    top = rng.integers(0, height - rows + 1)
    left = rng.integers(0, width - columns + 1)
    changed = pixels_HWC.copy()
    changed[top : top + rows, left : left + columns] = rng.integers(0, 256)
    return changed


def _pixelate(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Fewer pixels, as of a cheaper camera: a fifth of each side at strength 1."""
    height, width = pixels_HWC.shape[:2]
    factor = 1 + 4 * strength
    small = (max(1, round(width / factor)), max(1, round(height / factor)))
    image = Image.fromarray(pixels_HWC).resize(small, Image.Resampling.BOX)
    return np.asarray(image.resize((width, height), Image.Resampling.NEAREST))


def _dead(pixels_HWC: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Dead and stuck pixels: up to 10 % are black or white."""
    broken_HW = rng.random(pixels_HWC.shape[:2]) < 0.1 * strength
    changed = pixels_HWC.copy()
    changed[broken_HW] = 255 * rng.integers(0, 2, (int(broken_HW.sum()), 1))
    return changed


KINDS: dict[str, Shift] = {
    "posterize": _posterize,
    "equalize": _equalize,
    "solarize": _solarize,
    "gamma": _gamma,
    "zoom": _zoom,
    "rotate": _rotate,
    "erase": _erase,
    "pixelate": _pixelate,
    "dead": _dead,
}
