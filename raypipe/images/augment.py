"""Random transforms of a whole batch on its device: one affine resampling for flips, turns, zoom and shift; then colour.

uint8 pixels in, float 0-255 out (the model normalises). Drawn from a generator seeded by (seed, epoch, step, rank), so a
resumed run sees the pixels that the interrupted one would have seen. 32 images of 224 px: one grid_sample instead of 32
Python calls.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from raypipe.config import Section


class AugmentConfig(Section):
    """How much training images may change. All zero switches augmentation off."""

    flip_horizontal: bool = False
    flip_vertical: bool = False
    quarter_turns: bool = False
    degrees: float = Field(default=0.0, ge=0, le=180)
    zoom: float = Field(default=0.0, ge=0, lt=1)
    shift: float = Field(default=0.0, ge=0, lt=1)
    brightness: float = Field(default=0.0, ge=0, lt=1)
    contrast: float = Field(default=0.0, ge=0, lt=1)

    @property
    def moves(self) -> bool:
        return bool(self.flip_horizontal or self.flip_vertical or self.quarter_turns or self.degrees or self.zoom or self.shift)


def augment(pixels_BHWC: Tensor, cfg: AugmentConfig, *seed: int) -> Tensor:
    """A randomly changed copy, float32 0-255, same shape. Equal seeds give equal pixels on any device."""
    draws = torch.Generator().manual_seed(_mix(seed))  # drawn on the CPU: the same numbers whatever the device
    batch, device = pixels_BHWC.shape[0], pixels_BHWC.device

    def uniform(spread: float) -> Tensor:
        return (torch.rand(batch, generator=draws) * 2 - 1) * spread

    def flips(wanted: bool) -> Tensor:
        return torch.where(torch.rand(batch, generator=draws) < 0.5, -1.0, 1.0) if wanted else torch.ones(batch)

    images_BHWC = pixels_BHWC.float()
    if cfg.moves:
        turns = torch.randint(0, 4, (batch,), generator=draws) * (torch.pi / 2) if cfg.quarter_turns else torch.zeros(batch)
        angle = turns + uniform(cfg.degrees) * (torch.pi / 180)
        scale = 1 + uniform(cfg.zoom)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        flip_x, flip_y = flips(cfg.flip_horizontal), flips(cfg.flip_vertical)
        rows = [cos * flip_x, -sin * flip_y, uniform(cfg.shift), sin * flip_x, cos * flip_y, uniform(cfg.shift)]
        theta_B23 = torch.stack(rows, dim=1).view(batch, 2, 3).to(device)
        images_BCHW = images_BHWC.permute(0, 3, 1, 2)
        grid = affine_grid(theta_B23, list(images_BCHW.shape), align_corners=False)
        images_BHWC = grid_sample(images_BCHW, grid, padding_mode="reflection", align_corners=False).permute(0, 2, 3, 1)
    if cfg.contrast:
        mean = images_BHWC.mean(dim=(1, 2, 3), keepdim=True)
        images_BHWC = mean + (images_BHWC - mean) * (1 + uniform(cfg.contrast)).view(-1, 1, 1, 1).to(device)
    if cfg.brightness:
        images_BHWC = images_BHWC * (1 + uniform(cfg.brightness)).view(-1, 1, 1, 1).to(device)
    return images_BHWC.clamp(0, 255)


def _mix(seed: tuple[int, ...]) -> int:
    mixed = 0
    for part in seed:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63)
    return mixed
