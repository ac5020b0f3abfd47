"""RandAugment and TrivialAugmentWide for a batch: each picture gets changes of its own, each kind of change is made at once.

A step gives every picture one of 14 changes. Those of geometry become a matrix, which the caller folds into its one
resampling; those of colour are applied to the pictures that drew them. Ranges are torchvision's; what a move uncovers is
mirrored instead of black. Sources: E. Cubuk et al., "RandAugment" (2019); S. Mueller, F. Hutter, "TrivialAugment" (2021).
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
# At magnitude 1: shear as a slope, translation in half sides, rotation in degrees, factors 1 +- x, bits that posterize drops.
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


@dataclass(frozen=True)
class Step:
    """One change for each picture: which (index into NAMES), how strong (0-1), which way, and what strength 1 means."""

    change_B: np.ndarray
    magnitude_B: np.ndarray
    sign_B: np.ndarray
    ranges: dict[str, float]

    def moves(self) -> np.ndarray:
        """theta_B33 of the pictures that drew a change of geometry, the identity for the others."""

        def amount(name: str) -> np.ndarray:
            return (
                (self.change_B == NAMES.index(name))
                * self.sign_B
                * self.magnitude_B
                * self.ranges[name.partition("_")[0]]
            )

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
        for number, (name, change) in enumerate(COLOURS.items(), start=len(GEOMETRY)):
            drawn = np.flatnonzero(self.change_B == number)
            if len(drawn):
                chosen = torch.from_numpy(drawn).to(images_BHWC.device)
                amounts = (
                    torch.from_numpy(self._amounts(name)[drawn])
                    .float()
                    .to(images_BHWC.device)
                    .view(-1, 1, 1, 1)
                )
                changed = change(images_BHWC[chosen], amounts).clamp_(0, 255)
                images_BHWC = images_BHWC.index_copy(0, chosen, changed)
        return images_BHWC

    def _amounts(self, name: str) -> np.ndarray:
        if name == "posterize":
            return 2.0 ** np.round(self.magnitude_B * self.ranges["posterize"])
        if name == "solarize":
            return 255 * (1 - self.magnitude_B)
        return 1 + self.sign_B * self.magnitude_B * self.ranges["enhance"]


def choose(policy: str, ops: int, magnitude: float, draws: Draws) -> list[Step]:
    """The steps for these samples: `ops` of them at one magnitude, a single one at any, or none."""
    if policy == "none":
        return []
    if policy == "trivial":
        return [_step("policy 0", draws.uniform("policy 0 magnitude"), TRIVIAL, draws)]
    magnitude_B = np.full(len(draws.positions_B), magnitude)
    return [_step(f"policy {k}", magnitude_B, RANDAUGMENT, draws) for k in range(ops)]


def affine(**entries: np.ndarray) -> np.ndarray:
    """B33 matrices of (x, y) -> (xx x + xy y + x, yx x + yy y + y); what is not given is as in the identity."""
    batch = len(next(iter(entries.values())))
    matrix_B33 = np.tile(np.eye(3), (batch, 1, 1))
    for name, (row, column) in {
        "xx": (0, 0),
        "xy": (0, 1),
        "x": (0, 2),
        "yx": (1, 0),
        "yy": (1, 1),
        "y": (1, 2),
    }.items():
        if name in entries:
            matrix_B33[:, row, column] = entries[name]
    return matrix_B33


def _step(name: str, magnitude_B: np.ndarray, ranges: dict[str, float], draws: Draws) -> Step:
    return Step(
        draws.integers(f"{name} change", len(NAMES)),
        magnitude_B,
        draws.sign(f"{name} sign"),
        ranges,
    )


def _luma(images_BHWC: Tensor) -> Tensor:
    """B x H x W x 1."""
    return (images_BHWC * images_BHWC.new_tensor([0.299, 0.587, 0.114])).sum(dim=-1, keepdim=True)


def _blend(images_BHWC: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return other + (images_BHWC - other) * factor


def _sharpness(images_BHWC: Tensor, factor: Tensor) -> Tensor:
    """Away from (or towards) a 3 x 3 blur; the outermost pixels stay."""
    kernel = images_BHWC.new_tensor([[1, 1, 1], [1, 5, 1], [1, 1, 1]]).expand(3, 1, 3, 3) / 13
    blurred = images_BHWC.clone()
    blurred[:, 1:-1, 1:-1] = conv2d(images_BHWC.permute(0, 3, 1, 2), kernel, groups=3).permute(
        0, 2, 3, 1
    )
    return _blend(images_BHWC, blurred, factor)


def _autocontrast(images_BHWC: Tensor, _: Tensor) -> Tensor:
    low, high = (
        images_BHWC.amin(dim=(1, 2), keepdim=True),
        images_BHWC.amax(dim=(1, 2), keepdim=True),
    )
    return torch.where(
        high > low, (images_BHWC - low) * 255 / (high - low).clamp(min=1e-6), images_BHWC
    )


def _equalize(images_BHWC: Tensor, _: Tensor) -> Tensor:
    """Each channel's histogram made flat, as Pillow does it; one without two values stays."""
    batch, height, width, channels = images_BHWC.shape
    values = images_BHWC.round().long().permute(0, 3, 1, 2).reshape(batch * channels, -1)
    histogram = torch.zeros(batch * channels, 256, dtype=torch.long, device=values.device)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    brightest = histogram.gather(1, values.amax(dim=1, keepdim=True))
    step = (height * width - brightest) // 255
    table = (histogram.cumsum(1) - histogram + step // 2) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), torch.arange(256, device=values.device))
    return (
        table.gather(1, values)
        .view(batch, channels, height, width)
        .permute(0, 2, 3, 1)
        .to(images_BHWC.dtype)
    )


COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda images, factor: images * factor,
    "contrast": lambda images, factor: _blend(
        images, _luma(images).mean(dim=(1, 2), keepdim=True), factor
    ),
    "saturation": lambda images, factor: _blend(images, _luma(images), factor),
    "sharpness": _sharpness,
    "posterize": lambda images, levels: (images / levels).floor() * levels,
    "solarize": lambda images, threshold: torch.where(images >= threshold, 255 - images, images),
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
NAMES = (*GEOMETRY, *COLOURS)
