"""MixUp and CutMix: pictures and their targets are blended with a partner in the batch.

Strengths belong to a sample's position (images/draws.py). Partners belong to the rank's batch: each
picture is mixed with the next one in a random circle. So a mixed picture depends on the samples on
its rank, and only a resume with the same world size sees the same ones.
Sources: H. Zhang et al., "mixup" (2017); S. Yun et al., "CutMix" (2019).
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from torch import Tensor

from raypipe.images.augment import AugmentConfig, box_mask
from raypipe.images.draws import Draws


def mix(
    images_BHWC: Tensor,
    targets_BC: Tensor,
    cfg: AugmentConfig,
    seed: int,
    epoch: int,
    positions_B: Tensor | np.ndarray,
) -> tuple[Tensor, Tensor]:
    """(images, targets), mixed.

    Images are float pixels after `augment`. Targets are shares of classes; their sum stays the
    same.
    """
    if not (cfg.mixup or cfg.cutmix) or len(images_BHWC) < 2:
        return images_BHWC, targets_BC
    device = images_BHWC.device
    draws = Draws(seed, epoch, positions_B)

    # Which pictures are mixed, and which of them by CutMix?
    mixed_B = draws.chance("mix", cfg.mix_share)
    cut_share = float(cfg.cutmix > 0)
    if cfg.mixup and cfg.cutmix:
        cut_share = 0.5
    cuts_B = draws.chance("mix by cutting", cut_share)

    # How much of itself does each picture keep?
    kept_by_cutmix_B = _kept(cfg.cutmix, "cutmix", draws)
    kept_by_mixup_B = _kept(cfg.mixup, "mixup", draws)
    kept_B = np.where(cuts_B, kept_by_cutmix_B, kept_by_mixup_B)
    kept_B = np.where(mixed_B, kept_B, 1.0)

    # CutMix: weight 0 inside the box, 1 outside. MixUp: one weight everywhere.
    box_area_B = np.where(cuts_B, 1 - kept_B, 0.0)
    square_B = np.ones(len(kept_B))
    box_BHW1 = box_mask(box_area_B, square_B, draws, "mix at", images_BHWC)
    blend_B = torch.from_numpy(np.where(cuts_B, 1.0, kept_B)).float().to(device)
    weight_BHW1 = torch.where(box_BHW1, 0.0, blend_B.view(-1, 1, 1, 1))

    # Targets follow the pixels: a box has whole ones, so its area differs from what was drawn.
    share_B1 = weight_BHW1.mean(dim=(1, 2))
    partner_B = torch.from_numpy(_partners(draws)).to(device)
    images_BHWC = torch.lerp(images_BHWC[partner_B], images_BHWC, weight_BHW1)
    targets_BC = torch.lerp(targets_BC[partner_B], targets_BC, share_B1)
    return images_BHWC, targets_BC


def _kept(alpha: float, name: str, draws: Draws) -> np.ndarray:
    """The share of itself that each sample keeps: Beta(alpha, alpha), by its inverse."""
    if not alpha:
        return np.ones(len(draws.positions_B))
    return scipy.special.betaincinv(alpha, alpha, draws.uniform(name))


def _partners(draws: Draws) -> np.ndarray:
    """The partner of each picture: the next one in a random circle, never itself."""
    order = np.argsort(draws.uniform("mix order"), kind="stable")
    partner_B = np.empty_like(order)
    partner_B[order] = np.roll(order, -1)
    return partner_B
