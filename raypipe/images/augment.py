"""Random changes of a whole batch on its device: all geometry in one resampling, all linear colour in one matrix a picture.

uint8 pixels in, float 0-255 out (the model normalises). What happens to a picture depends on (seed, epoch, its position in
the epoch's stream) and nothing else (`draws`), so a resumed run, or one with more workers, sees the same pixels, and copies of
one sample that weighted sampling draws are changed each in its own way. A batch costs a few
vectorised operations instead of a Python call a picture: 32 x 224 px on two cores in 25-70 ms (benchmarks/augment.py).

Order: crop, flip, turn, zoom, shift, the policy's geometry; the policy's colours; brightness, contrast, saturation, hue;
erasing. What a move brings in from outside the picture is its mirror image.
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

# RGB -> two axes of colour and the luma (NTSC's YIQ): a turn in the plane of the first two changes hue and leaves gray alone.
IQY = np.array([[0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112], [0.299, 0.587, 0.114]])
LUMA = IQY[2]


class AugmentConfig(Section):
    """How training images may change; as it stands, not at all.

    crop_area        least share of the picture's area that a random crop keeps (1: no crop), stretched to the full size
    crop_aspect      and how far its sides' ratio may be off, as a factor
    flip_*           a fair coin for each;  quarter_turns: 0, 90, 180 or 270 degrees
    degrees          turned by up to this either way;  zoom, shift: by up to this share of the side
    brightness, contrast, saturation    scaled by 1 - x to 1 + x;  hue: turned by up to this share of the colour circle
    policy           randaugment (policy_ops random changes at policy_magnitude of their range) or trivial (one, any magnitude)
    erase            share of pictures that lose a rectangle of 2 % to erase_area of their area
    mixup, cutmix    alpha of the Beta law of a blend with, or a rectangle from, another picture (0: off; with both, half each)
    mix_share        share of pictures that are mixed at all
    """

    crop_area: float = Field(default=1.0, gt=0, le=1)
    crop_aspect: float = Field(default=4 / 3, ge=1, le=4)
    flip_horizontal: bool = False
    flip_vertical: bool = False
    quarter_turns: bool = False
    degrees: float = Field(default=0.0, ge=0, le=180)
    zoom: float = Field(default=0.0, ge=0, lt=1)
    shift: float = Field(default=0.0, ge=0, lt=1)
    brightness: float = Field(default=0.0, ge=0, le=1)
    contrast: float = Field(default=0.0, ge=0, le=1)
    saturation: float = Field(default=0.0, ge=0, le=1)
    hue: float = Field(default=0.0, ge=0, le=0.5)
    policy: Literal["none", "randaugment", "trivial"] = "none"
    policy_ops: int = Field(default=2, ge=1, le=8)
    policy_magnitude: float = Field(default=0.3, ge=0, le=1)
    erase: float = Field(default=0.0, ge=0, le=1)
    erase_area: float = Field(default=0.33, gt=0.02, le=0.9)
    mixup: float = Field(default=0.0, ge=0, le=10)
    cutmix: float = Field(default=0.0, ge=0, le=10)
    mix_share: float = Field(default=1.0, ge=0, le=1)


def augment(
    pixels_BHWC: Tensor, cfg: AugmentConfig, seed: int, epoch: int, positions_B: Tensor | np.ndarray
) -> Tensor:
    """A randomly changed copy, float32 0-255, same shape. positions_B: the pictures' places in the epoch's stream (int64); two
    copies of one sample have two."""
    draws = Draws(seed, epoch, positions_B)
    steps = policy.choose(cfg.policy, cfg.policy_ops, cfg.policy_magnitude, draws)
    theta_B33 = _own_moves(cfg, draws, len(pixels_BHWC))
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
    """bool B x H x W x 1: a rectangle of this share of the area and ratio of sides, anywhere that it fits."""
    masks = []
    for axis, stretch_B in ((1, 1 / aspect_B), (2, aspect_B)):
        size = like_BHWC.shape[axis]
        length_B = np.minimum(np.round(np.sqrt(area_B * stretch_B) * size), size)
        start_B = np.floor(draws.uniform(f"{choice} {axis}") * (size - length_B + 1))
        at_S = np.arange(size)
        masks.append((at_S >= start_B[:, None]) & (at_S < (start_B + length_B)[:, None]))
    return torch.from_numpy(masks[0][:, :, None, None] & masks[1][:, None, :, None]).to(
        like_BHWC.device
    )


def _own_moves(cfg: AugmentConfig, draws: Draws, batch: int) -> np.ndarray:
    """theta_B33: where in the picture (-1 to 1) each place of the result comes from."""
    theta_B33 = np.tile(np.eye(3), (batch, 1, 1))
    if cfg.crop_area < 1:
        area, ratio = draws.uniform("crop area", cfg.crop_area), np.log(cfg.crop_aspect)
        aspect = np.exp(draws.uniform("crop aspect", -ratio, ratio))
        width, height = np.minimum(np.sqrt(area * aspect), 1), np.minimum(np.sqrt(area / aspect), 1)
        x, y = draws.uniform("crop x", -1) * (1 - width), draws.uniform("crop y", -1) * (1 - height)
        theta_B33 = theta_B33 @ policy.affine(xx=width, yy=height, x=x, y=y)
    if cfg.flip_horizontal or cfg.flip_vertical:
        flip_x = draws.sign("flip x") if cfg.flip_horizontal else np.ones(batch)
        flip_y = draws.sign("flip y") if cfg.flip_vertical else np.ones(batch)
        theta_B33 = theta_B33 @ policy.affine(xx=flip_x, yy=flip_y)
    if cfg.quarter_turns or cfg.degrees or cfg.zoom:
        quarters = draws.integers("quarter turns", 4) if cfg.quarter_turns else 0
        angle = np.radians(90 * quarters + draws.uniform("degrees", -cfg.degrees, cfg.degrees))
        scale = 1 + draws.uniform("zoom", -cfg.zoom, cfg.zoom)
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        theta_B33 = theta_B33 @ policy.affine(xx=cos, xy=-sin, yx=sin, yy=cos)
    if cfg.shift:
        reach = 2 * cfg.shift  # the side is 2 long
        x, y = draws.uniform("shift x", -reach, reach), draws.uniform("shift y", -reach, reach)
        theta_B33 = theta_B33 @ policy.affine(x=x, y=y)
    return theta_B33


def _resample(images_BHWC: Tensor, theta_B33: np.ndarray) -> Tensor:
    """Move the pictures that move; the others stay as they are to the last bit."""
    moved = np.flatnonzero(np.abs(theta_B33 - np.eye(3)).max(axis=(1, 2)) > 1e-12)
    if not len(moved):
        return images_BHWC
    chosen = torch.from_numpy(moved).to(images_BHWC.device)
    images_NCHW = images_BHWC[chosen].permute(0, 3, 1, 2)
    theta_N23 = torch.from_numpy(theta_B33[moved, :2]).float().to(images_BHWC.device)
    grid = affine_grid(theta_N23, list(images_NCHW.shape), align_corners=False)
    result = grid_sample(images_NCHW, grid, padding_mode="reflection", align_corners=False).permute(
        0, 2, 3, 1
    )
    result = result.clamp(0, 255)  # the four weights may sum to a little more than one
    return result if len(moved) == len(images_BHWC) else images_BHWC.index_copy(0, chosen, result)


def _jitter(images_BHWC: Tensor, cfg: AugmentConfig, draws: Draws) -> Tensor:
    """Brightness, contrast about the mean luma, saturation, hue. The last two leave gray alone, so all fold into Mx + b."""

    def factor(name: str, spread: float) -> np.ndarray:
        return 1 + draws.uniform(name, -spread, spread)

    brightness, contrast = factor("brightness", cfg.brightness), factor("contrast", cfg.contrast)
    matrix_B33 = (brightness * contrast)[:, None, None] * np.eye(3)
    if cfg.saturation:
        saturation = factor("saturation", cfg.saturation)[:, None, None]
        matrix_B33 = (saturation * np.eye(3) + (1 - saturation) * LUMA) @ matrix_B33
    if cfg.hue:
        angle = draws.uniform("hue", -cfg.hue, cfg.hue) * 2 * np.pi
        turn_B33 = policy.affine(
            xx=np.cos(angle), xy=-np.sin(angle), yx=np.sin(angle), yy=np.cos(angle)
        )
        matrix_B33 = np.linalg.inv(IQY) @ turn_B33 @ IQY @ matrix_B33
    batch, *_, device = *images_BHWC.shape, images_BHWC.device
    matrix = torch.from_numpy(matrix_B33).float().to(device)
    offset = torch.from_numpy((1 - contrast) * brightness).float().to(device).view(-1, 1, 1)
    luma = images_BHWC.mean(dim=(1, 2)) @ torch.from_numpy(LUMA).float().to(device)
    flat = images_BHWC.reshape(batch, -1, 3)
    return (
        torch.baddbmm(offset * luma.view(-1, 1, 1), flat, matrix.mT)
        .view_as(images_BHWC)
        .clamp_(0, 255)
    )


def _erase(images_BHWC: Tensor, cfg: AugmentConfig, draws: Draws) -> Tensor:
    """Fill a rectangle with the picture's mean colour. Source: Zhong et al., "Random Erasing" (2017)."""
    area = np.where(
        draws.chance("erase", cfg.erase), draws.uniform("erase area", 0.02, cfg.erase_area), 0.0
    )
    aspect = np.exp(draws.uniform("erase aspect", np.log(0.3), np.log(3.3)))
    mask = box_mask(area, aspect, draws, "erase at", images_BHWC)
    return torch.where(mask, images_BHWC.mean(dim=(1, 2), keepdim=True), images_BHWC)
