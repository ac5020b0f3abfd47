"""RandAugment and TrivialAugmentWide for a batch: each picture gets its own changes.

A step gives every picture one of 14 changes. All pictures with the same kind of change are changed
together. Geometry becomes a matrix, which the caller combines with its own into one resampling.
Colour is changed on the pictures that drew it. Ranges are torchvision's; a move fills what it
uncovers with the mirror image instead of black.
Sources: E. Cubuk et al., "RandAugment" (2019); S. Mueller, F. Hutter, "TrivialAugment" (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from raypipe.images.draws import Draws

GEOMETRY = ("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate")

# What magnitude 1 means. shear: a slope. translate: half sides. rotate: degrees. enhance: factors
# 1 +- x. posterize: bits dropped.
RANDAUGMENT = {
    "shear": 0.3,
    "translate": 2 * 150 / 331,
    "rotate": 30.0,
    "enhance": 0.9,
    "posterize": 4.0,
}
TRIVIAL = {
    "shear": 0.99,
    "translate": 2 * 32 / 224,
    "rotate": 135.0,
    "enhance": 0.99,
    "posterize": 6.0,
}

# Entries of a 3 x 3 matrix, in homogeneous coordinates, by name.
ENTRIES = {
    "xx": (0, 0),
    "xy": (0, 1),
    "x": (0, 2),
    "yx": (1, 0),
    "yy": (1, 1),
    "y": (1, 2),
}


@dataclass(frozen=True)
class Step:
    """One change for each picture.

    change_B: which (index into NAMES). magnitude_B: how strong, 0-1. sign_B: which way, -1 or 1.
    ranges: what magnitude 1 means.
    """

    change_B: np.ndarray
    magnitude_B: np.ndarray
    sign_B: np.ndarray
    ranges: dict[str, float]

    def moves(self) -> np.ndarray:
        """theta_B33 of the geometry; the identity for pictures that drew another change."""

        def amount(name: str) -> np.ndarray:
            drawn = self.change_B == NAMES.index(name)
            kind = name.partition("_")[0]
            return drawn * self.sign_B * self.magnitude_B * self.ranges[kind]

        angle = np.radians(amount("rotate"))
        return affine(
            xx=np.cos(angle),
            xy=amount("shear_x") - np.sin(angle),
            x=amount("translate_x"),
            yx=amount("shear_y") + np.sin(angle),
            yy=np.cos(angle),
            y=amount("translate_y"),
        )

    def colour(self, images_BHWC: Tensor) -> Tensor:
        """The pictures after their changes of colour."""
        device = images_BHWC.device
        for number, (name, change) in enumerate(COLOURS.items(), start=len(GEOMETRY)):
            drawn = np.flatnonzero(self.change_B == number)
            if not len(drawn):
                continue
            chosen = torch.from_numpy(drawn).to(device)
            amounts_N = self._amounts(name)[drawn]
            amounts = torch.from_numpy(amounts_N).float().to(device)
            amounts_N111 = amounts.view(-1, 1, 1, 1)

            changed = change(images_BHWC[chosen], amounts_N111)
            changed = changed.clamp_(0, 255)
            images_BHWC = images_BHWC.index_copy(0, chosen, changed)
        return images_BHWC

    def _amounts(self, name: str) -> np.ndarray:
        """The second argument of a change in COLOURS, for every picture."""
        if name == "posterize":
            return 2.0 ** np.round(self.magnitude_B * self.ranges["posterize"])
        if name == "solarize":
            return 255 * (1 - self.magnitude_B)
        return 1 + self.sign_B * self.magnitude_B * self.ranges["enhance"]


def choose(policy: str, ops: int, magnitude: float, draws: Draws) -> list[Step]:
    """The steps of a batch: none, one (trivial), or `ops` of them at one magnitude."""
    if policy == "none":
        return []
    if policy == "trivial":
        return [_step("policy 0", draws.uniform("policy 0 magnitude"), TRIVIAL, draws)]
    magnitude_B = np.full(len(draws.positions_B), magnitude)
    return [_step(f"policy {k}", magnitude_B, RANDAUGMENT, draws) for k in range(ops)]


def affine(**entries: np.ndarray) -> np.ndarray:
    """B33 matrices of (x, y) -> (xx x + xy y + x, yx x + yy y + y).

    An entry that is not given is that of the identity.
    """
    batch = len(next(iter(entries.values())))
    matrix_B33 = np.tile(np.eye(3), (batch, 1, 1))
    for name, (row, column) in ENTRIES.items():
        if name in entries:
            matrix_B33[:, row, column] = entries[name]
    return matrix_B33


def _step(name: str, magnitude_B: np.ndarray, ranges: dict[str, float], draws: Draws) -> Step:
    change_B = draws.integers(f"{name} change", len(NAMES))
    sign_B = draws.sign(f"{name} sign")
    return Step(change_B, magnitude_B, sign_B, ranges)


def _luma(images_BHWC: Tensor) -> Tensor:
    """B x H x W x 1."""
    weights = images_BHWC.new_tensor([0.299, 0.587, 0.114])
    return (images_BHWC * weights).sum(dim=-1, keepdim=True)


def _blend(images_BHWC: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """0: the other picture; 1: the picture; above 1: farther away from the other."""
    return other + (images_BHWC - other) * factor


def _brightness(images_BHWC: Tensor, factor: Tensor) -> Tensor:
    return images_BHWC * factor


def _contrast(images_BHWC: Tensor, factor: Tensor) -> Tensor:
    """Away from (or towards) the picture's mean luma."""
    mean = _luma(images_BHWC).mean(dim=(1, 2), keepdim=True)
    return _blend(images_BHWC, mean, factor)


def _saturation(images_BHWC: Tensor, factor: Tensor) -> Tensor:
    """Away from (or towards) gray."""
    return _blend(images_BHWC, _luma(images_BHWC), factor)


def _sharpness(images_BHWC: Tensor, factor: Tensor) -> Tensor:
    """Away from (or towards) a 3 x 3 blur; the outermost pixels stay."""
    blur = images_BHWC.new_tensor(
        [
            [1, 1, 1],
            [1, 5, 1],
            [1, 1, 1],
        ]
    )
    kernel = blur.expand(3, 1, 3, 3) / 13
    images_BCHW = images_BHWC.permute(0, 3, 1, 2)
    inside_BCHW = conv2d(images_BCHW, kernel, groups=3)
    blurred = images_BHWC.clone()
    blurred[:, 1:-1, 1:-1] = inside_BCHW.permute(0, 2, 3, 1)
    return _blend(images_BHWC, blurred, factor)


def _posterize(images_BHWC: Tensor, levels: Tensor) -> Tensor:
    """Round down to a multiple of `levels`."""
    return (images_BHWC / levels).floor() * levels


def _solarize(images_BHWC: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels from the threshold on."""
    return torch.where(images_BHWC >= threshold, 255 - images_BHWC, images_BHWC)


def _autocontrast(images_BHWC: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to 0-255; a channel of one value stays."""
    low = images_BHWC.amin(dim=(1, 2), keepdim=True)
    high = images_BHWC.amax(dim=(1, 2), keepdim=True)
    width = (high - low).clamp(min=1e-6)
    stretched = (images_BHWC - low) * 255 / width
    return torch.where(high > low, stretched, images_BHWC)


def _equalize(images_BHWC: Tensor, _: Tensor) -> Tensor:
    """Flatten each channel's histogram, as Pillow does; a channel of one value stays."""
    batch, height, width, channels = images_BHWC.shape
    whole_BCHW = images_BHWC.round().long().permute(0, 3, 1, 2)
    values = whole_BCHW.reshape(batch * channels, -1)
    device = values.device

    # One histogram of 256 bins for each channel of each picture.
    histogram = torch.zeros(batch * channels, 256, dtype=torch.long, device=device)
    histogram.scatter_add_(1, values, torch.ones_like(values))

    # The look-up table: how many pixels are darker, in steps that leave out the brightest ones.
    brightest = histogram.gather(1, values.amax(dim=1, keepdim=True))
    step = (height * width - brightest) // 255
    darker = histogram.cumsum(1) - histogram
    table = (darker + step // 2) // step.clamp(min=1)
    unchanged = torch.arange(256, device=device)
    table = torch.where(step > 0, table.clamp(max=255), unchanged)

    # Look up every pixel.
    equalized = table.gather(1, values)
    equalized_BCHW = equalized.view(batch, channels, height, width)
    return equalized_BCHW.permute(0, 2, 3, 1).to(images_BHWC.dtype)


# The order is part of the random choice: an index into NAMES.
COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
NAMES = (*GEOMETRY, *COLOURS)
