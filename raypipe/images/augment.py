"""Random changes of a whole batch on its device: one resampling for all geometry, one colour
matrix.

uint8 pixels in, float pixels 0-255 out (the model normalises). The changes of a picture depend on
(seed, epoch, its position in the epoch's stream) and nothing else (images/draws.py). So a resumed
run, or a run with more workers, sees the same pixels, and copies of one sample that weighted
sampling draws are changed differently. A batch costs a few vectorised operations instead of a
Python call a picture: 25-70 ms for 32 pictures of 224 px on two cores (benchmarks/augment.py).

Order of changes: crop, flip, turn, zoom, shift, then the policy's geometry; the policy's colours;
brightness, contrast, saturation, hue; erasing. What a move brings in from outside the picture is
the picture's mirror image.

Legend: B pictures, H x W pixels, C colours. theta_B33 maps a place of the result to the place in
the source that it comes from; both axes run from -1 to 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from raypipe.config import Section
from raypipe.images import policy
from raypipe.images.draws import Draws

# RGB -> two axes of colour and the luma (NTSC's YIQ). A rotation in the plane of the first two axes
# changes the hue and leaves gray alone.
IQY = np.array([[0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112], [0.299, 0.587, 0.114]])
LUMA = IQY[2]


class AugmentConfig(Section):
    """How training images may change. The defaults change nothing."""

    crop_area: float = Field(default=1.0, gt=0, le=1)
    """The least share of the picture's area that a random crop keeps. The crop is resized to the
    full size. 1: no crop."""

    crop_aspect: float = Field(default=4 / 3, ge=1, le=4)
    """The largest factor between the aspect ratios of a crop and of the picture."""

    flip_horizontal: bool = False
    """Mirror half of the pictures left to right."""

    flip_vertical: bool = False
    """Mirror half of the pictures top to bottom."""

    quarter_turns: bool = False
    """Turn each picture by 0, 90, 180 or 270 degrees."""

    degrees: float = Field(default=0.0, ge=0, le=180)
    """Rotate by at most this number of degrees either way."""

    zoom: float = Field(default=0.0, ge=0, lt=1)
    """Scale by 1 - zoom to 1 + zoom."""

    shift: float = Field(default=0.0, ge=0, lt=1)
    """Move along each axis by up to this share of the side."""

    brightness: float = Field(default=0.0, ge=0, le=1)
    """Multiply all pixels by 1 - x to 1 + x."""

    contrast: float = Field(default=0.0, ge=0, le=1)
    """Multiply the distance from the picture's mean luma by 1 - x to 1 + x."""

    saturation: float = Field(default=0.0, ge=0, le=1)
    """Multiply the distance from gray by 1 - x to 1 + x."""

    hue: float = Field(default=0.0, ge=0, le=0.5)
    """Rotate hues by at most this share of the colour circle either way."""

    policy: Literal["none", "randaugment", "trivial"] = "none"
    """`randaugment`: `policy_ops` random changes at `policy_magnitude` of their range. `trivial`:
    one random change at a random magnitude (TrivialAugmentWide)."""

    policy_ops: int = Field(default=2, ge=1, le=8)
    """Changes per picture of randaugment. 2 is the paper's value for ImageNet."""

    policy_magnitude: float = Field(default=0.3, ge=0, le=1)
    """Strength of randaugment's changes; 1 is the end of their range."""

    erase: float = Field(default=0.0, ge=0, le=1)
    """The share of pictures in which a rectangle is replaced by the mean colour."""

    erase_area: float = Field(default=0.33, gt=0.02, le=0.9)
    """The largest erased rectangle, as a share of the picture's area. The smallest is 2 %."""

    mixup: float = Field(default=0.0, ge=0, le=10)
    """Alpha of the Beta distribution of a blend with another picture. 0: off. With both mixup and
    cutmix, each takes half of the mixed pictures."""

    cutmix: float = Field(default=0.0, ge=0, le=10)
    """Alpha of the Beta distribution of the area of a rectangle from another picture. 0: off."""

    mix_share: float = Field(default=1.0, ge=0, le=1)
    """The share of pictures that mixup or cutmix changes."""


def augment(
    pixels_BHWC: Tensor, cfg: AugmentConfig, seed: int, epoch: int, positions_B: Tensor | np.ndarray
) -> Tensor:
    """A randomly changed copy: float32 0-255, same shape.

    positions_B: the pictures' places in the epoch's stream (int64), each once an epoch.
    """
    draws = Draws(seed, epoch, positions_B)
    steps = policy.choose(cfg.policy, cfg.policy_ops, cfg.policy_magnitude, draws)

    # All geometry becomes one matrix per picture, so pixels are interpolated only once.
    theta_B33 = _geometry(cfg, draws, len(pixels_BHWC))
    for step in steps:
        theta_B33 = theta_B33 @ step.moves()
    images_BHWC = _resample(pixels_BHWC.float(), theta_B33)

    for step in steps:
        images_BHWC = step.colour(images_BHWC)
    if cfg.brightness or cfg.contrast or cfg.saturation or cfg.hue:
        images_BHWC = _jitter(images_BHWC, cfg, draws)
    if cfg.erase:
        images_BHWC = _erase(images_BHWC, cfg, draws)
    return images_BHWC


def box_mask(
    area_B: np.ndarray, aspect_B: np.ndarray, draws: Draws, choice: str, like_BHWC: Tensor
) -> Tensor:
    """bool B x H x W x 1: true inside a rectangle at a random place in each picture.

    area_B: its share of the area. aspect_B: width / height, relative to the picture's. choice: the
    name of the random numbers for its place.
    """
    inside = []
    for axis, stretch_B in ((1, 1 / aspect_B), (2, aspect_B)):
        # Its length along this axis, in whole pixels.
        side = like_BHWC.shape[axis]
        length_B = np.round(np.sqrt(area_B * stretch_B) * side)
        length_B = np.minimum(length_B, side)

        # A random start, among those that leave it inside the picture.
        starts_B = side - length_B + 1
        start_B = np.floor(draws.uniform(f"{choice} {axis}") * starts_B)
        end_B = start_B + length_B

        pixel_S = np.arange(side)
        behind_start_BS = pixel_S >= start_B[:, None]
        before_end_BS = pixel_S < end_B[:, None]
        inside.append(behind_start_BS & before_end_BS)

    # A pixel is inside where its row and its column are.
    rows_BH, columns_BW = inside
    rows_BHW1 = rows_BH[:, :, None, None]
    columns_BHW1 = columns_BW[:, None, :, None]
    mask_BHW1 = torch.from_numpy(rows_BHW1 & columns_BHW1)
    return mask_BHW1.to(like_BHWC.device)


def _geometry(cfg: AugmentConfig, draws: Draws, batch: int) -> np.ndarray:
    """theta_B33 of the changes that the config names itself; the policy's come after them."""
    theta_B33 = np.tile(np.eye(3), (batch, 1, 1))
    if cfg.crop_area < 1:
        theta_B33 = theta_B33 @ _crop(cfg, draws)

    if cfg.flip_horizontal or cfg.flip_vertical:
        same = np.ones(batch)
        flip_x = draws.sign("flip x") if cfg.flip_horizontal else same
        flip_y = draws.sign("flip y") if cfg.flip_vertical else same
        theta_B33 = theta_B33 @ policy.affine(xx=flip_x, yy=flip_y)

    # Turns and zoom are one matrix: a rotation times a scale.
    if cfg.quarter_turns or cfg.degrees or cfg.zoom:
        quarters: np.ndarray | int = 0
        if cfg.quarter_turns:
            quarters = draws.integers("quarter turns", 4)
        degrees = draws.uniform("degrees", -cfg.degrees, cfg.degrees)
        angle = np.radians(90 * quarters + degrees)
        scale = 1 + draws.uniform("zoom", -cfg.zoom, cfg.zoom)
        theta_B33 = theta_B33 @ _rotation(angle, scale)

    if cfg.shift:
        reach = 2 * cfg.shift  # the side is 2 long
        x = draws.uniform("shift x", -reach, reach)
        y = draws.uniform("shift y", -reach, reach)
        theta_B33 = theta_B33 @ policy.affine(x=x, y=y)
    return theta_B33


def _rotation(angle_B: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """B33 matrices of a turn by an angle (radians), times a scale."""
    cos = np.cos(angle_B) * scale
    sin = np.sin(angle_B) * scale
    return policy.affine(
        xx=cos,
        xy=-sin,
        yx=sin,
        yy=cos,
    )


def _crop(cfg: AugmentConfig, draws: Draws) -> np.ndarray:
    """theta_B33 of a random crop: its width and height as shares of the sides, and its centre."""
    # The share of the picture's area that stays.
    area = draws.uniform("crop area", low=cfg.crop_area, high=1.0)

    # Uniform in the logarithm: twice as wide is as likely as twice as high.
    widest = np.log(cfg.crop_aspect)
    log_aspect = draws.uniform("crop aspect", low=-widest, high=widest)
    aspect = np.exp(log_aspect)

    # No side is longer than the picture's.
    width = np.minimum(np.sqrt(area * aspect), 1)
    height = np.minimum(np.sqrt(area / aspect), 1)

    # The centre, on axes from -1 to 1: up to 1 - width from the middle, the crop stays inside.
    x = draws.uniform("crop x", low=-1.0, high=1.0) * (1 - width)
    y = draws.uniform("crop y", low=-1.0, high=1.0) * (1 - height)
    return policy.affine(
        xx=width,
        yy=height,
        x=x,
        y=y,
    )


def _resample(images_BHWC: Tensor, theta_B33: np.ndarray) -> Tensor:
    """Move the pictures that move; the others stay the same to the last bit."""
    distance_B = np.abs(theta_B33 - np.eye(3)).max(axis=(1, 2))
    moved = np.flatnonzero(distance_B > 1e-12)
    if not len(moved):
        return images_BHWC

    device = images_BHWC.device
    chosen = torch.from_numpy(moved).to(device)
    images_NCHW = images_BHWC[chosen].permute(0, 3, 1, 2)
    theta_N23 = torch.from_numpy(theta_B33[moved, :2]).float().to(device)
    grid = affine_grid(theta_N23, list(images_NCHW.shape), align_corners=False)
    resampled_NCHW = grid_sample(
        images_NCHW,
        grid,
        padding_mode="reflection",
        align_corners=False,
    )

    # The four weights of a pixel may sum to a little more than one.
    images_NHWC = resampled_NCHW.permute(0, 2, 3, 1).clamp(0, 255)
    if len(moved) == len(images_BHWC):
        return images_NHWC
    return images_BHWC.index_copy(0, chosen, images_NHWC)


def _jitter(images_BHWC: Tensor, cfg: AugmentConfig, draws: Draws) -> Tensor:
    """Brightness, contrast about the mean luma, saturation and hue, as one Mx + b per picture.

    Saturation and hue leave gray alone, so they do not change the offset b.
    """

    def factor(name: str, spread: float) -> np.ndarray:
        return 1 + draws.uniform(name, -spread, spread)

    # Brightness and contrast scale all colours alike.
    brightness = factor("brightness", cfg.brightness)
    contrast = factor("contrast", cfg.contrast)
    scale_B11 = (brightness * contrast)[:, None, None]
    matrix_B33 = scale_B11 * np.eye(3)

    # Saturation blends with gray, hue turns about the gray axis.
    if cfg.saturation:
        saturation = factor("saturation", cfg.saturation)
        kept_B11 = saturation[:, None, None]
        blend_B33 = kept_B11 * np.eye(3) + (1 - kept_B11) * LUMA
        matrix_B33 = blend_B33 @ matrix_B33
    if cfg.hue:
        share = draws.uniform("hue", -cfg.hue, cfg.hue)
        turn_B33 = _rotation(share * 2 * np.pi, 1.0)
        matrix_B33 = np.linalg.inv(IQY) @ turn_B33 @ IQY @ matrix_B33

    # Contrast keeps the mean luma: what it takes from the pixels, the offset adds.
    device = images_BHWC.device
    luma_C = torch.from_numpy(LUMA).float().to(device)
    mean_luma_B = images_BHWC.mean(dim=(1, 2)) @ luma_C
    lift = (1 - contrast) * brightness
    lift_B = torch.from_numpy(lift).float().to(device)
    offset_B11 = lift_B.view(-1, 1, 1) * mean_luma_B.view(-1, 1, 1)

    # All pixels of a picture as rows of three colours: one matrix product.
    matrix = torch.from_numpy(matrix_B33).float().to(device)
    pixels_BPC = images_BHWC.reshape(len(images_BHWC), -1, 3)
    changed = torch.baddbmm(offset_B11, pixels_BPC, matrix.mT)
    return changed.view_as(images_BHWC).clamp_(0, 255)


def _erase(images_BHWC: Tensor, cfg: AugmentConfig, draws: Draws) -> Tensor:
    """Fill a rectangle with the picture's mean colour.

    Source: Zhong et al., "Random Erasing" (2017).
    """
    erased = draws.chance("erase", cfg.erase)
    area = draws.uniform("erase area", 0.02, cfg.erase_area)
    area = np.where(erased, area, 0.0)
    log_aspect = draws.uniform("erase aspect", np.log(0.3), np.log(3.3))
    aspect = np.exp(log_aspect)

    mask = box_mask(area, aspect, draws, "erase at", images_BHWC)
    mean_colour = images_BHWC.mean(dim=(1, 2), keepdim=True)
    return torch.where(mask, mean_colour, images_BHWC)
